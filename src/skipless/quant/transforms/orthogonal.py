"""Orthogonal matrices that learn: a Hadamard matrix times the Cayley transform of a skew one (Q5).

    R = R0 (I + A/2)^-1 (I - A/2)        A = U - U^T, U free, 0 at the start

R is orthogonal for every U, so that any optimiser may move U and nothing has to be projected back;
the price is a linear system of the rotation's width a step. Everything is float64, whatever the
model's dtype: R R^T = I then holds to that rounding. Rotations by half a turn about some plane are
out of the transform's reach (and infinitely far away for U), which a start elsewhere mends.
Read by the method `rotation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipless.quant.transforms.rotation import nearest_orthogonal, rotation


def cayley(skew: Tensor) -> Tensor:
    """(I + A/2)^-1 (I - A/2) of a skew-symmetric A [..., n, n], orthogonal (Q5)."""
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(eye + skew / 2, eye - skew / 2)


class Orthogonal:
    """`number` rotations [n, n] side by side, to be learned."""

    def __init__(
        self,
        number: int,
        width: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start at Hadamard matrices whose rows get random signs, on `device` if it has float64."""
        drawn = torch.randint(2, (number, width, 1), generator=generator, device="cpu")
        signs = drawn.double() * 2 - 1
        start = signs * nearest_orthogonal(rotation(width))
        self.start = start if torch.device(device).type == "mps" else start.to(device)
        self.free = torch.zeros_like(self.start, requires_grad=True)

    def matrix(self) -> Tensor:
        """The rotations now, float64 [number, n, n], differentiable in `free`."""
        return self.start @ cayley(self.free - self.free.mT)

    @property
    def width(self) -> int:
        return self.start.shape[-1]

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the start."""
        self.free.zero_()


def turn_columns(matrix: Tensor, turns: Tensor, which: Tensor) -> Tensor:
    """x R for rows x of `matrix` [rows, blocks * n]: block b by turns[which[b]]; `turns`
    [number, n, n], `which` int64 [blocks]."""
    parts = matrix.unflatten(-1, (len(which), -1))
    return torch.einsum("rbi,bij->rbj", parts, turns[which]).flatten(-2)
