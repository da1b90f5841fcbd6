"""A branch that carries the stream: its last matrix W is fitted so that the skip can go at once.

The join y = x + W h + c becomes y = (W + D) h + c + d. D and d solve a ridge regression of the
stream on what the matrix reads,

    min  sum_t |D h_t + d - x_t|^2 / |y_t|^2  +  lambda |D|^2

each token relative to its own length, because the next norm sees nothing else. lambda is the one
of RIDGES that does best on every fourth batch, which is kept out of the choice of D; then all
batches are used. What h does not know of x is lost: this is a start, training follows.
Read by `stages.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skipless.fallback import double
from skipless.model import Connection
from skipless.quant import evaluation_mode, run_batch
from skipless.sites import bias_of, weight_of
from skipless.surgery.batches import real_tokens

__all__ = ["RIDGES", "fit_branch"]

RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidates of lambda, as shares of the mean eigenvalue of the features' second moments."""
HELD_OUT = 4  # every so many batches one chooses lambda


class _Done(Exception):
    """The join has been reached: the layers behind it need not run."""


class Moments:
    """Sums over tokens: h h^T, h x^T and |x|^2, each token weighted by 1 / |y|^2; float64."""

    def __init__(self) -> None:
        self.features: Any = 0
        self.products: Any = 0
        self.power: Any = 0

    def add(self, h: Tensor, x: Tensor, y: Tensor) -> None:
        """One batch: h [N, F], x and y [N, D]."""
        weight = y.square().sum(-1, keepdim=True).clamp(min=1e-12).reciprocal()
        self.features = self.features + h.mT @ (h * weight)
        self.products = self.products + h.mT @ (x * weight)
        self.power = self.power + (x.square() * weight).sum()

    def plus(self, other: Moments) -> Moments:
        """The sums over both."""
        found = Moments()
        found.features = self.features + other.features
        found.products = self.products + other.products
        found.power = self.power + other.power
        return found

    def solve(self, ridges: Sequence[float]) -> list[Tensor]:
        """The solution [F, D] for each ridge."""
        values, vectors = torch.linalg.eigh(self.features)
        turned, mean = vectors.mT @ self.products, values.mean()
        return [
            vectors @ (turned / (values.clamp(min=0) + ridge * mean)[:, None]) for ridge in ridges
        ]

    def error(self, solution: Tensor) -> float:
        """What `solution` leaves: sum |D h - x|^2 / |y|^2."""
        quadratic = (solution * (self.features @ solution)).sum()
        return float(quadratic - 2 * (solution * self.products).sum() + self.power)


@torch.no_grad()
def fit_branch(
    model: nn.Module, connection: Connection, linear: nn.Module, batches: Sequence[Any]
) -> float:
    """Add D and d to `linear`, the end of the branch that `connection` joins, in place.

    The connection must still add the stream with weight 1. At least two batches; each costs a
    forward pass up to the join. Padding does not count. Returns the share of |x|^2 / |y|^2 that the
    fit leaves on the batches that chose lambda.
    """
    chosen, rest, read = Moments(), Moments(), {}
    bias = bias_of(linear)

    def before(module: nn.Module, args: tuple) -> None:
        read["h"] = args[0]

    def join(module: nn.Module, args: tuple, out: Tensor) -> None:
        real = real_tokens(batch, out)
        h, x, y = (_rows(part, real) for part in (read.pop("h"), args[0], out))
        if bias is not None:
            h = torch.cat([h, h.new_ones(len(h), 1)], dim=1)
        (chosen if number % HELD_OUT == HELD_OUT - 1 or number == last else rest).add(h, x, y)
        raise _Done

    handles = [
        linear.register_forward_pre_hook(before), connection.register_forward_hook(join),
    ]  # fmt: skip
    last = len(batches) - 1 if len(batches) < HELD_OUT else -1
    try:
        with evaluation_mode(model):
            for number, batch in enumerate(batches):  # noqa: B007 (`join` reads it)
                with contextlib.suppress(_Done):
                    run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    errors = [chosen.error(solution) for solution in rest.solve(RIDGES)]
    best = min(range(len(RIDGES)), key=errors.__getitem__)
    (solution,) = rest.plus(chosen).solve(RIDGES[best : best + 1])
    weight = weight_of(linear)
    if bias is not None:
        bias += solution[-1].to(bias)
        solution = solution[:-1]
    weight += (solution.mT if isinstance(linear, nn.Linear) else solution).to(weight)
    return errors[best] / max(float(chosen.power), 1e-300)


def _rows(tensor: Tensor, real: Tensor | None) -> Tensor:
    """[..., D] as [N, D] in float64, of the `real` tokens if told; on the CPU where a device has no
    float64 (MPS)."""
    rows = tensor.detach().flatten(0, -2)
    return double(rows if real is None else rows[real.flatten()])
