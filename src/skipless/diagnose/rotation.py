"""A Hadamard rotation of any width, to ask what rotating a tensor would give (Q5).

H/sqrt(n) with entries +-1 spreads every outlier channel over all channels. Orders 2^k times 1, 12,
20, 28 or 36 are built from Paley's two constructions; another width gets blocks of the largest
power of two that divides it, or, where that is below 16, a random orthogonal matrix. Signs of the
channels are drawn first (seed: the width), so that a channel-wise constant does not become an
outlier itself. Read by `remedies.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_SEEDS = {12: ("one", 11), 20: ("one", 19), 28: ("two", 13), 36: ("two", 17)}


@lru_cache(maxsize=8)
def rotation(width: int) -> Tensor:
    """An orthogonal matrix [width, width], float32; the same one each time."""
    generator = torch.Generator().manual_seed(width)
    signs = torch.randint(2, (width, 1), generator=generator).float() * 2 - 1
    core = hadamard(width)
    if core is None:
        block = width & -width
        if block < 16:
            drawn = torch.randn(width, width, dtype=torch.float64, generator=generator)
            return torch.linalg.qr(drawn).Q.float()
        core = torch.block_diag(*[hadamard(block)] * (width // block))  # type: ignore[list-item]
        return signs * core / block**0.5
    return signs * core / width**0.5


def hadamard(order: int) -> Tensor | None:
    """A matrix of +-1 with orthogonal rows [order, order], float32; None where none is built."""
    for size in (1, *_SEEDS):
        power, rest = divmod(order, size)
        if rest == 0 and power and power & (power - 1) == 0:
            found = torch.ones(1, 1) if size == 1 else _paley(*_SEEDS[size])
            while power > 1:
                found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
                power //= 2
            return found
    return None


def _paley(kind: str, q: int) -> Tensor:
    """Paley's matrix of order q + 1 (kind one, q = 3 mod 4) or 2 (q + 1) (two, q = 1 mod 4)."""
    squares = {x * x % q for x in range(1, q)}
    values = torch.tensor([0.0] + [1.0 if x in squares else -1.0 for x in range(1, q)])
    index = torch.arange(q)
    jacobsthal = values[(index[:, None] - index[None, :]) % q]
    border = torch.zeros(q + 1, q + 1)
    border[1:, 1:] = jacobsthal
    border[0, 1:] = 1.0
    border[1:, 0] = -1.0 if kind == "one" else 1.0
    if kind == "one":
        return border + torch.eye(q + 1)
    a, b = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(border, a) + torch.kron(torch.eye(q + 1), b)
