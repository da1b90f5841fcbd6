"""AWQ: input channels with large activations get a finer grid, by a searched scale (Q5).

    s_j = mean |x_j|^a, a from a grid        x / s in front, W diag(s) inside

1. calibration: mean |x_j| of every channel, and up to 512 tokens of every tensor
2. for each a in 0, 0.05, ..., 1: round W diag(s), and x / s too if the scheme rounds activations,
   and compare the layers' outputs with the exact ones; the least squared error wins (a = 0 leaves
   the group as it is, so that the output error on these tokens never grows)
3. the scales are applied as in `smooth`

Source: arXiv 2306.00978. Differences to its code: the error is that of the linear layers which read
the tensor, not of a whole attention block, so that nothing has to be known about blocks; clips are
not searched (`-clip:mse` in the scheme does it for the weights). Read by `by_name.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipless.fallback import double
from skipless.jsonable import Config
from skipless.quant.fake import fake_quantize
from skipless.quant.transforms.session import Session, wide
from skipless.quant.transforms.tracing import Group
from skipless.quant.weights import quantize_weight
from skipless.scheme import Scheme

KEPT = 512
"""Tokens of a tensor on which scales are compared."""
STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Awq(Config):
    """Scale input channels by a searched power of their mean magnitude."""

    name: ClassVar[str] = "awq"
    stage: ClassVar[int] = 1

    def __str__(self) -> str:
        return self.name

    def prepare(self, session: Session) -> None:
        """Search and apply scales for every group of the session."""
        kept: dict[str, list[Tensor]] = {}
        sums: dict[str, tuple[Tensor, int]] = {}

        def visit(group: Group, rows: Tensor) -> None:
            key = group.names[0]
            total, count = sums.get(key, (0.0, 0))
            sums[key] = (total + double(rows.abs()).sum(0).cpu(), count + len(rows))
            parts = kept.setdefault(key, [])
            room = KEPT - sum(len(part) for part in parts)
            if room > 0:  # spread over the batch, not its first sequence alone
                parts.append(wide(rows[:: max(1, len(rows) // room)][:room]).clone())

        session.collect(visit, session.changeable)
        changed = 0
        for group in session.changeable:
            if group.names[0] not in sums:
                continue
            total, count = sums[group.names[0]]
            x = torch.cat(kept.pop(group.names[0]))
            mean = session.pool(group, (total / count).to(x.dtype).to(x.device))
            members = session.members(group)
            scheme = session.targets[members[0]].scheme
            matrices = [session.matrix(name) for name in members]
            power, factors = best_scales(x, mean, matrices, scheme)
            if power > 0:
                session.scale_inputs(group, factors)
                changed += 1
        session.notes.append(f"awq: {changed} of {len(session.changeable)} tensors scaled")


def best_scales(
    x: Tensor, mean: Tensor, matrices: list[Tensor], scheme: Scheme
) -> tuple[float, Tensor]:
    """(power a, scales [width]) with the least output error of `matrices` [out, width] on `x`
    [n, width]; `mean` [width] is mean |x_j|. Scales are normalised to sqrt(max min) = 1."""
    exact = [x @ matrix.T for matrix in matrices]
    best: tuple[float, float, Tensor] | None = None
    for step in range(STEPS + 1):
        power = step / STEPS
        s = torch.where(mean > 0, mean, torch.ones_like(mean)).pow(power)
        s = (s / (s.max() * s.min()).sqrt()).clamp(1e-4, 1e4)
        q = x / s
        if scheme.activation_bits is not None:
            q = fake_quantize(
                q, scheme.activation_bits, granularity=scheme.activation_granularity,
                symmetric=scheme.symmetric, clip=scheme.clip,
            )  # fmt: skip
        error = sum(
            float(double(q @ quantize_weight(matrix * s, scheme).T - wanted).square().sum())
            for matrix, wanted in zip(matrices, exact, strict=True)
        )
        if best is None or error < best[0]:
            best = (error, power, s)
    assert best is not None
    return best[1], best[2]
