"""Factors kept as packed triangles: a fifth less state, for a copy in and out at every step.

A symmetric d x d factor has d(d+1)/2 numbers of its own. `PackedSide` stores those, row by row of
the lower triangle, and unpacks the blocks of one chunk at a time. Read by buckets.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from skipless.optim.sides import FullSide, add_gram


@functools.lru_cache(maxsize=64)
def _places(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where in the flattened [d * d] matrix each packed number lies, and in the packed vector the
    diagonal."""
    rows, columns = torch.tril_indices(dim, dim, device=device)
    at = torch.arange(dim, device=device)
    return rows * dim + columns, at * (at + 3) // 2


def pack(factor: Tensor) -> Tensor:
    """The lower triangle [K, d(d+1)/2] of factor [K, d, d], row by row."""
    return factor.flatten(-2).index_select(-1, _places(factor.shape[-1], factor.device)[0])


def unpack(packed: Tensor, dim: int) -> Tensor:
    """Lower triangular [K, d, d] from [K, d(d+1)/2]."""
    factor = packed.new_zeros(*packed.shape[:-1], dim * dim)
    factor.index_copy_(-1, _places(dim, packed.device)[0], packed)
    return factor.unflatten(-1, (dim, dim))


class PackedSide(FullSide):
    """The factor in its own eigenbasis, as a packed triangle."""

    kind = "packed eigenbasis"

    def shapes(self):
        return super().shapes() | {self.name: (self.dim * (self.dim + 1) // 2,)}

    def begin(self, s, value, power):
        diagonal = _places(self.dim, s[self.name].device)[1]
        s[self.name].zero_().index_copy_(-1, diagonal, value.unsqueeze(-1).expand(-1, self.dim))

    def accumulate(self, c, s, decay, weight):
        factor = unpack(s[self.name], self.dim)
        add_gram(factor, c if self.is_left else c.mT, decay, weight)
        s[self.name].copy_(pack(factor))

    def factor(self, b, index):
        return unpack(b[self.name][index], self.dim)

    def store(self, b, index, factor):
        b[self.name][index] = pack(factor)

    def mean(self, b, index):
        return self.eigenvalues({self.name: b[self.name][index]}).mean(-1)

    def eigenvalues(self, s):
        return s[self.name].index_select(-1, _places(self.dim, s[self.name].device)[1])
