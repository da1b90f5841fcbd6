"""Singular-value spectrum of a token matrix, exact or from a rank-64 sketch (S7).

The token matrix X is [tokens, D], not centred. `Sketch` sees it batch by batch and keeps a sum,
so that batches and processes merge by addition:

- D <= 256: the Gram matrix X^T X, exact.
- wider: Y = X^T (X Omega) with a fixed orthonormal Omega [D, 64], the Nystrom sketch of Tropp et
  al. (2017, "Fixed-rank approximation of a positive-semidefinite matrix from streaming data"). Its
  64 values are followed by a flat tail that carries the energy left over (the total is exact). A
  flat tail has the largest entropy, so effective rank is then an estimate from above.

Sums are float64. Read by geometry.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.probes.moments import F64, chunks

EXACT_WIDTH = 256
RANK = 64


def effective_rank(singular_values: Tensor) -> float:
    """exp(entropy of singular values normalised to sum 1); from 1 to their number (S7)."""
    p = singular_values.to(F64)
    total = p.sum()
    if not total > 0:
        return math.nan
    return float(torch.special.entr(p / total).sum().exp())


def spectrum_share(singular_values: Tensor, fraction: float = 0.1) -> float:
    """Share of the energy (squared singular values) in the largest `fraction` of them (S7)."""
    energy = singular_values.to(F64).square().sort(descending=True).values
    total = energy.sum()
    if not total > 0:
        return math.nan
    return float(energy[: max(1, math.ceil(fraction * len(energy)))].sum() / total)


def principal_angle(a: Tensor, b: Tensor) -> float:
    """Mean principal angle in degrees between the column spaces of orthonormal a and b [D, k]."""
    if a.shape[1] == 0 or b.shape[1] == 0:
        return math.nan
    cosines = torch.linalg.svdvals(a.to(F64).T @ b.to(F64)).clamp(max=1.0)
    return float(torch.rad2deg(torch.arccos(cosines)).mean())


class Sketch:
    """X^T X of all rows [*, D] seen so far, exact or through 64 test vectors."""

    def __init__(self, width: int):
        self.width, self.count, self.energy = width, 0, 0.0
        """`energy` is the sum of squares of all entries, exact."""
        self.total: Tensor | None = None
        """[D, D] (exact) or [D, 64], float64."""

    @property
    def exact(self) -> bool:
        """Whether the whole Gram matrix is kept."""
        return self.width <= EXACT_WIDTH

    @classmethod
    def of(cls, rows: Tensor) -> Sketch:
        """The sketch of one matrix [tokens, D]."""
        sketch = cls(rows.shape[1])
        for part in chunks(rows):
            x = part.to(F64)
            if sketch.exact:
                product = x.T @ x
                energy = float(product.diagonal().sum())
            else:
                product = x.T @ (x @ _test_vectors(sketch.width).to(x.device))
                energy = float(x.square().sum())
            sketch.total = product if sketch.total is None else sketch.total.add_(product)
            sketch.energy += energy
            sketch.count += len(x)
        return sketch

    def merge(self, other: Sketch) -> Sketch:
        """Add the rows of `other` (left as it is). Returns self."""
        if other.total is None:
            return self
        if self.width != other.width:
            raise UserError(f"sketches of width {self.width} and {other.width} cannot be merged")
        device = other.total.device if self.total is None else self.total.device
        new = other.total.to(device)
        self.total = new if self.total is None else self.total + new
        self.energy += other.energy
        self.count += other.count
        return self

    def decompose(self) -> tuple[Tensor, Tensor]:
        """(singular values descending [min(tokens, D)], right singular vectors [D, k]), float64.

        k is D in the exact form and 64 in the sketched one. On the CPU.
        """
        if self.total is None:
            return torch.empty(0, dtype=F64), torch.empty(self.width, 0, dtype=F64)
        number = min(self.count, self.width)
        total = self.total.cpu()
        if self.exact:
            values, vectors = torch.linalg.eigh(total)
            values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
            return values[:number].sqrt(), vectors[:, :number]
        values, vectors = _nystrom(total, _test_vectors(self.width))
        values, vectors = values[:number], vectors[:, :number]
        if number > len(values):
            left = max(0.0, self.energy - float(values.sum())) / (number - len(values))
            values = torch.cat([values, values.new_full((number - len(values),), left)])
        return values.sort(descending=True).values.sqrt(), vectors

    def state_dict(self) -> dict[str, Any]:
        """Everything, as CPU tensors and numbers."""
        return {**vars(self), "total": None if self.total is None else self.total.cpu()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Sketch:
        """The inverse of `state_dict`."""
        sketch = cls(state["width"])
        vars(sketch).update(state)
        return sketch


@cache
def _test_vectors(width: int) -> Tensor:
    """Omega [D, 64]: the same orthonormal columns on every process, so that sketches add up."""
    generator = torch.Generator().manual_seed(width)
    return torch.linalg.qr(torch.randn(width, RANK, dtype=F64, generator=generator)).Q


def _nystrom(product: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [64] descending and eigenvectors [D, 64] of Y (Omega^T Y)^+ Y^T.

    A small shift keeps the core positive definite; it is taken off the eigenvalues again.
    """
    shift = 1e-12 * float(torch.linalg.matrix_norm(product)) + 1e-300
    shifted = product + shift * omega
    core = omega.T @ shifted
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    root = vectors * values.clamp(min=shift).rsqrt()
    directions, singular, _ = torch.linalg.svd(shifted @ root, full_matrices=False)
    return (singular.square() - shift).clamp(min=0), directions
