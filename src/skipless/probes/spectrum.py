"""Singular-value spectrum of a token matrix, exact or from a rank-64 sketch (S7).

The token matrix X is [tokens, D], not centred. `Sketch` sees it batch by batch and keeps a sum,
so that batches and processes merge by addition:

- D <= 256: the Gram matrix X^T X, exact.
- wider: Y = X^T (X Omega) with a fixed orthonormal Omega [D, 80]. 64 columns make the Nystrom
  sketch of Tropp et al. (2017, "Fixed-rank approximation of a positive-semidefinite matrix from
  streaming data"); the other 16 estimate the Frobenius norm of what it leaves out. The rest of the
  spectrum is a power law with that norm and the left-over energy, which is exact. At D = 768 and
  2,048 tokens this gave effective ranks of 746, 554, 136 and 213 where 727, 573, 145 and 134 are
  right (singular values constant, ~ i^-1/2, ~ i^-1, ~ exp(-i/50)) and shares within 0.08; without
  the 16 columns (a flat rest) 767, 700, 295 and 562.

Sums are float64. Read by geometry.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.probes.rows import F64, chunks

EXACT_WIDTH = 256
RANK = 64
NUM_TESTS = 16


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
    a, b = a.to(F64), b.to(F64)
    cosines = torch.linalg.svdvals(a.T @ b).clamp(max=1.0)
    # arccos has no digits left near 1, where the sine has them all (Bjorck and Golub 1973).
    sines = torch.linalg.svdvals(b - a @ (a.T @ b)).flip(0)[: len(cosines)].clamp(max=1.0)
    angles = torch.where(cosines**2 > 0.5, torch.arcsin(sines), torch.arccos(cosines))
    return float(torch.rad2deg(angles).mean())


class Sketch:
    """X^T X of all rows [*, D] seen so far, exact or through 64 + 16 test vectors."""

    def __init__(self, width: int):
        self.width, self.count, self.energy = width, 0, 0.0
        """`energy` is the sum of squares of all entries, exact."""
        self.total: Tensor | None = None
        """[D, D] (exact) or [D, 80], float64."""

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
        omega = _test_vectors(self.width)
        values, vectors = _nystrom(total[:, :RANK], omega[:, :RANK])
        if number > RANK:
            tests = omega[:, RANK:]
            rest = total[:, RANK:] - vectors @ (values[:, None] * (vectors.T @ tests))
            energy = max(0.0, self.energy - float(values.sum()))
            # What is left out vanishes on the first 64 vectors; the tests are uniform in the rest.
            square = float(rest.square().sum()) * (self.width - RANK) / NUM_TESTS
            values = torch.cat([values, _power_law(energy, square, number - RANK)])
        values, vectors = values[:number], vectors[:, :number]
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
    """Omega [D, 80]: the same orthonormal columns on every process, so that sketches add up."""
    generator = torch.Generator().manual_seed(width)
    drawn = torch.randn(width, RANK + NUM_TESTS, dtype=F64, generator=generator)
    return torch.linalg.qr(drawn).Q


def _power_law(total: float, square: float, number: int) -> Tensor:
    """`number` eigenvalues ~ (1 + i/64)^-c of sum `total` and, as far as possible, sum of squares
    `square`; c >= 0 by bisection."""
    place = torch.arange(RANK, RANK + number, dtype=F64).log() - torch.tensor(RANK, dtype=F64).log()
    wanted = square / total**2 if total > 0 else 0.0
    low, high = 0.0, 200.0
    for _ in range(50):
        c = (low + high) / 2
        weights = torch.exp(-c * place)
        concentration = float(weights.square().sum() / weights.sum() ** 2)
        low, high = (c, high) if concentration < wanted else (low, c)
    weights = torch.exp(-low * place)
    return total * weights / weights.sum()


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
