"""The two sides of a matrix block: how each keeps, applies and refreshes its factor.

A block G (m x n) has a left side of m rows and a right side of n columns. A side keeps a factor
(O1's L or R) in one of these forms:

    FullSide      factor in its own eigenbasis, and the basis: "left" [d, d], "left_basis" [d, d]
    PackedSide    the same, the factor as a packed triangle [d(d+1)/2] (packed.py)
    RootSide      the factor as it is and its inverse root: "left" [d, d], "left_root" [d, d]
    DiagonalSide  a vector [d]: for sides too wide for a matrix
    LowRankSide   top eigenvectors [d, k], their values [k] and one value for all the rest
    IdentitySide  nothing: the side is not whitened

Legend: K blocks, d this side's length, x and c [K, m, n]. Tensors of K blocks come in the dict `s`.
Only the lower triangle of a factor is kept up to date (half the products); `symmetric` fills it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skipless import fallback
from skipless.optim.roots import (
    STRIP,
    in_descending_order,
    inverse_power,
    jacobi_step,
    largest_amplification,
    newton_inverse_root,
    power_step,
    sorted_eigh,
)

FIRST_SWEEPS, SWEEPS = 16, 3
"""Jacobi sweeps at a block's first refresh, from no basis at all, and at the others: as many as
match a QR power step on factors that are renewed by 40 % between refreshes (b2 = 0.95)."""

State = dict[str, Tensor]
Index = Tensor | slice
"""Which blocks of a bucket: a tensor of numbers, or a slice, which costs no copies."""


def symmetric(factor: Tensor) -> Tensor:
    """The whole symmetric matrix from its lower triangle."""
    lower = factor.tril()
    return lower + lower.tril(-1).mT


class IdentitySide:
    """No factor: nothing is whitened on this side. Base of the others."""

    kind = "identity"
    has_frame = False
    """Whether `enter` turns blocks into another basis."""

    def __init__(self, name: str, dim: int) -> None:
        self.name, self.dim, self.is_left = name, dim, name == "left"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """State tensors of one block by name."""
        return {}

    def begin(self, s: State, value: Tensor, power: float) -> None:
        """Start at value [K] times the identity."""

    def enter(self, x: Tensor, s: State, out: Tensor | None = None) -> Tensor:
        """x in this side's frame: written to `out` where there is one, or x itself."""
        return x

    def leave(self, x: Tensor, s: State, out: Tensor | None = None) -> Tensor:
        """The inverse of `enter`."""
        return x

    def root(self, s: State, power: float, eps: float, true_dim: Any) -> Any:
        """What `whiten` needs, computed once a step."""
        return None

    def whiten(self, x: Tensor, root: Any, out: Tensor | None = None) -> Tensor:
        """factor^-power applied to x, in the frame. A new tensor, `out` (may be x), or x itself."""
        return x

    def accumulate(self, c: Tensor, s: State, decay: float, weight: float) -> None:
        """factor <- decay factor + weight c c^T (left), c^T c (right)."""

    def refresh(self, b: State, index: Index, exact: bool, power: float, eps: float):
        """Renew basis or root of some blocks; returns the turn [k, d, d] of the frame, or None."""
        return None

    def mean(self, b: State, index: Index) -> Tensor | None:
        """Mean eigenvalue [k], None where there is no factor."""
        return None

    def rescale(self, b: State, index: Index, by: Tensor, power: float) -> None:
        """factor <- by [k] * factor."""

    def eigenvalues(self, s: State) -> Tensor | None:
        """Current eigenvalue estimates [K, d], for reports."""
        return None

    def _along(self, vector: Tensor) -> Tensor:
        """[K, d] to a multiplier of x."""
        return vector.unsqueeze(-1) if self.is_left else vector.unsqueeze(-2)


class DiagonalSide(IdentitySide):
    """One value a row (or column)."""

    kind = "diagonal"

    def shapes(self):
        return {self.name: (self.dim,)}

    def begin(self, s, value, power):
        s[self.name].copy_(value.unsqueeze(-1))

    def root(self, s, power, eps, true_dim):
        return self._along(
            inverse_power(self.eigenvalues(s), power=power, eps=eps, true_dim=true_dim)
        )

    def whiten(self, x, root, out=None):
        return torch.mul(x, root, out=out)

    def accumulate(self, c, s, decay, weight):
        along = -1 if self.is_left else -2
        s[self.name].mul_(decay).add_(c.square().sum(along), alpha=weight)

    def mean(self, b, index):
        return b[self.name][index].mean(-1)

    def rescale(self, b, index, by, power):
        b[self.name][index] *= by.view(-1, *[1] * (b[self.name].ndim - 1))

    def eigenvalues(self, s):
        return s[self.name]


class FullSide(DiagonalSide):
    """The factor in its own eigenbasis: its diagonal is the eigenvalue estimate."""

    kind = "eigenbasis"
    has_frame = True

    def __init__(self, name: str, dim: int, method: str = "qr") -> None:
        super().__init__(name, dim)
        self.method = method

    def shapes(self):
        return {self.name: (self.dim, self.dim), f"{self.name}_basis": (self.dim, self.dim)}

    def begin(self, s, value, power):
        s[self.name].zero_().diagonal(dim1=-2, dim2=-1).copy_(value.unsqueeze(-1))

    def enter(self, x, s, out=None):
        basis = s[f"{self.name}_basis"]
        return torch.bmm(basis.mT, x, out=out) if self.is_left else torch.bmm(x, basis, out=out)

    def leave(self, x, s, out=None):
        basis = s[f"{self.name}_basis"]
        return torch.bmm(basis, x, out=out) if self.is_left else torch.bmm(x, basis.mT, out=out)

    def accumulate(self, c, s, decay, weight):
        add_gram(s[self.name], c if self.is_left else c.mT, decay, weight)

    def refresh(self, b, index, exact, power, eps):
        """One power step (O1 step 7: L Q = Q L~, so qr(L Q) = Q qr(L~)), or exact eigenvectors.

        Method "jacobi": Jacobi sweeps instead of either.
        """
        factor, basis = symmetric(self.factor(b, index)), f"{self.name}_basis"
        if self.method == "jacobi":
            turn, turned = jacobi_step(factor, FIRST_SWEEPS if exact else SWEEPS)
            if exact:
                turn, turned = in_descending_order(turn, turned)
        elif exact:
            turn = sorted_eigh(factor)[1].contiguous()
            turned = turn.mT @ factor @ turn
        else:
            turn, turned = power_step(factor)
        self.store(b, index, turned)
        b[basis][index] = b[basis][index] @ turn
        return turn

    def factor(self, b: State, index: Index) -> Tensor:
        """The factors [k, d, d] of some blocks, right in the lower triangle."""
        return b[self.name][index]

    def store(self, b: State, index: Index, factor: Tensor) -> None:
        """Keep new factors of some blocks."""
        b[self.name][index] = factor

    def orthonormalize(self, b: State, index: Index) -> None:
        """One Newton-Schulz step: takes the rounding of many turns out of the basis."""
        q = b[f"{self.name}_basis"][index]
        b[f"{self.name}_basis"][index] = torch.baddbmm(q, q, q.mT @ q, beta=1.5, alpha=-0.5)

    def mean(self, b, index):
        return b[self.name].diagonal(dim1=-2, dim2=-1)[index].contiguous().mean(-1)

    def eigenvalues(self, s):
        return s[self.name].diagonal(dim1=-2, dim2=-1)


class RootSide(FullSide):
    """The factor as it is, and its inverse root, cached between refreshes."""

    kind = "root"
    has_frame = False

    def shapes(self):
        return {self.name: (self.dim, self.dim), f"{self.name}_root": (self.dim, self.dim)}

    def begin(self, s, value, power):
        super().begin(s, value, power)
        root = s[f"{self.name}_root"].zero_().diagonal(dim1=-2, dim2=-1)
        root.copy_(torch.where(value > 0, value**-power, 0.0).unsqueeze(-1))

    def root(self, s, power, eps, true_dim):
        return s[f"{self.name}_root"]

    def whiten(self, x, root, out=None):
        return torch.bmm(root, x) if self.is_left else torch.bmm(x, root)

    def refresh(self, b, index, exact, power, eps):
        factor = b[self.name][index]
        if self.method == "newton":
            root = newton_inverse_root(symmetric(factor), power=power, eps=eps)
        else:
            values, vectors = sorted_eigh(factor)
            # Padded rows are zero eigenvalues; they only shift the mean that sets the clamp.
            scale = inverse_power(values, power=power, eps=eps, true_dim=self.dim)
            root = (vectors * scale.unsqueeze(-2)) @ vectors.mT
        b[f"{self.name}_root"][index] = root

    def rescale(self, b, index, by, power):
        super().rescale(b, index, by, power)
        b[f"{self.name}_root"][index] *= (by**-power).view(-1, 1, 1)

    def eigenvalues(self, s):
        return fallback.eigvalsh(s[self.name])


class LowRankSide(IdentitySide):
    """Top-k eigenpairs followed by one power step each time; the rest is isotropic."""

    kind = "low_rank"

    def __init__(self, name: str, dim: int, rank: int) -> None:
        super().__init__(name, dim)
        self.rank = min(rank, dim)

    def shapes(self):
        return {
            f"{self.name}_vectors": (self.dim, self.rank),
            f"{self.name}_values": (self.rank + 1,),
        }

    def begin(self, s, value, power):
        s[f"{self.name}_values"].copy_(value.unsqueeze(-1))
        s[f"{self.name}_vectors"].zero_().diagonal(dim1=-2, dim2=-1).fill_(1)

    def root(self, s, power, eps, true_dim):
        values = s[f"{self.name}_values"].clamp(min=0)
        largest = values.amax(-1, keepdim=True)
        rest = values[:, -1:]
        # The mean over all d eigenvalues sets ridge and clamp, as for whole factors.
        mean = (values.sum(-1, keepdim=True) + (self.dim - self.rank - 1) * rest) / self.dim
        floor = torch.maximum(mean / largest_amplification(self.dim) ** 2, largest * 1e-12)
        root = torch.maximum(values + eps * mean, floor) ** -power
        return s[f"{self.name}_vectors"], root.masked_fill_(mean <= 0, 0.0)

    def whiten(self, x, root, out=None):
        v, scale = root
        rest = scale[:, -1:].unsqueeze(-1)
        extra = scale[:, :-1] - scale[:, -1:]
        if self.is_left:
            return rest * x + v @ (extra.unsqueeze(-1) * (v.mT @ x))
        return rest * x + ((x @ v) * extra.unsqueeze(-2)) @ v.mT

    def accumulate(self, c, s, decay, weight):
        v, values = s[f"{self.name}_vectors"], s[f"{self.name}_values"]
        c = c if self.is_left else c.mT  # [K, d, other]
        number = max(self.dim - self.rank, 1)
        trace = decay * (values[:, :-1].sum(-1) + number * values[:, -1])
        trace = trace + weight * c.square().sum((-2, -1))
        rest = values[:, -1:].unsqueeze(-2)
        image = decay * v * values[:, None, :-1] + weight * (c @ (c.mT @ v))
        new = fallback.qr(image)[0]
        overlap = v.mT @ new
        old = (overlap.square() * (values[:, :-1] - values[:, -1:]).unsqueeze(-1)).sum(-2)
        kept = decay * (old + rest.squeeze(-2)) + weight * (c.mT @ new).square().sum(-2)
        v.copy_(new)
        values[:, :-1] = kept
        values[:, -1] = ((trace - kept.sum(-1)) / number).clamp(min=0)

    def mean(self, b, index):
        values = b[f"{self.name}_values"][index]
        rest = (self.dim - self.rank) * values[:, -1]
        return (values[:, :-1].sum(-1) + rest) / self.dim

    def rescale(self, b, index, by, power):
        b[f"{self.name}_values"][index] *= by.unsqueeze(-1)

    def eigenvalues(self, s):
        return s[f"{self.name}_values"]


def add_gram(factor: Tensor, c: Tensor, decay: float, weight: float) -> None:
    """factor <- decay factor + weight c c^T, at least its lower triangle. c [K, d, other].

    On CPUs wide factors go strip by strip: row strip k only up to its diagonal block, 5/8 of the
    products at four strips.
    """
    dim = factor.shape[-1]
    if factor.device.type != "cpu" or dim < 3 * STRIP:
        factor.baddbmm_(c, c.mT, beta=decay, alpha=weight)
        return
    strip = max(STRIP, dim // 8)
    for a in range(0, dim, strip):
        end = min(a + strip, dim)
        factor[:, a:end, :end].baddbmm_(c[:, a:end], c[:, :end].mT, beta=decay, alpha=weight)
