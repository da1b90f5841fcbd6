"""Outlier columns: a few input channels stay in full precision, the others are rounded (Q5).

    y = Q(x_rest) Q(W_rest)^T + x_out W_out^T

1. calibration: max |x_j| of every channel of every tensor that linear layers read
2. channels that reach the threshold (6, the published one) are the group's columns; or, written as
   a percentage, the share of the channels with the largest values
3. the quantiser of the tensor leaves these channels alone, and so do the weights that meet them

Source: LLM.int8, arXiv 2208.07339, which finds the columns in every batch anew; here they are fixed
by calibration, since a weight rounded beforehand cannot follow. A fixed threshold means something
only for tensors of the published scale: small models rarely reach 6, hence the percentage. The
products stay in floating point: integer execution refuses such a layer. Read by `by_name.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.jsonable import Config
from skipless.quant.transforms.session import Session
from skipless.quant.transforms.tracing import Group


@dataclass(frozen=True, kw_only=True)
class Outliers(Config):
    """Keep input channels with large activations: from `threshold` on, or the `share` largest."""

    name: ClassVar[str] = "outliers"
    stage: ClassVar[int] = 3
    threshold: float | None = 6.0
    share: float | None = None
    """In (0, 1); then `threshold` is None."""

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.share is None):
            raise UserError("outliers take a threshold or a share of the channels, one of the two")
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            raise UserError(f"the threshold of outliers is {self.threshold}; it must be positive")
        if self.share is not None and not 0 < self.share < 1:
            raise UserError(f"the share of outliers is {self.share}; it must be in (0, 1)")

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.name}:{100 * self.share:g}%"
        return self.name if self.threshold == 6.0 else f"{self.name}:{self.threshold:g}"

    def prepare(self, session: Session) -> None:
        """Choose the columns of every group; `session.columns` then holds them by layer."""
        largest: dict[str, Tensor] = {}

        def visit(group: Group, rows: Tensor) -> None:
            found = rows.abs().amax(0)
            known = largest.get(group.names[0])
            largest[group.names[0]] = found if known is None else torch.maximum(known, found)

        session.collect(visit)
        kept = total = 0
        for group in session.groups:
            if group.names[0] not in largest:
                continue
            columns = self.choose(largest[group.names[0]])
            total += group.width
            kept += columns.numel()
            for name in session.members(group) if columns.numel() else ():
                session.columns[name] = columns
        session.notes.append(f"{self}: {kept} of {total} input channels in full precision")

    def choose(self, largest: Tensor) -> Tensor:
        """Indices of the columns, ascending, from the largest magnitudes [width]."""
        if self.threshold is not None:
            return (largest >= self.threshold).nonzero()[:, 0]
        assert self.share is not None
        number = math.ceil(self.share * largest.numel())
        return largest.topk(min(number, largest.numel() - 1)).indices.sort().values
