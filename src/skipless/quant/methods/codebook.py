"""Codebook weights: 2^b values chosen by k-means instead of a uniform grid (Q5).

The best that b bits can do for a weight by itself when the values need not be equally spaced, and
so a baseline for what uniform grids give away. No integer hardware multiplies such codes.

1. one codebook for the matrix, the row or the group, as the scheme's granularity says
2. start: quantiles of the values; then Lloyd's iterations: each value goes to the nearest entry,
   each entry to the mean of its values, by cumulative sums over the sorted values, so that an
   iteration costs 2^b binary searches instead of a pass
3. an entry without values stays where it is

Scheme options asym and clip concern uniform grids and change nothing here. One-dimensional k-means
after Deep Compression, arXiv 1510.00149, without pruning and retraining. Read by `by_name.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.fallback import near
from skipless.jsonable import Config
from skipless.quant.transforms.session import Session
from skipless.quant.weights import QuantizedWeight

ITERATIONS = 30


@dataclass(frozen=True, kw_only=True)
class Codebook(Config):
    """Weights from a codebook made by k-means."""

    name: ClassVar[str] = "codebook"
    stage: ClassVar[int] = 4

    def __str__(self) -> str:
        return self.name

    def prepare(self, session: Session) -> None:
        """Nothing: no activation is looked at."""

    def choose(self, session: Session, weights: Sequence[QuantizedWeight]) -> None:
        """Replace the rounded values of every weight."""
        for weight in weights:
            scheme = weight.scheme
            try:
                values = kmeans(weight.matrix(), scheme.weight_bits, scheme.weight_granularity)
            except UserError as error:
                raise UserError(f"{weight.name}: {error}") from None
            weight.replace(values, None)


def kmeans(x: Tensor, bits: int, granularity: str = "tensor") -> Tensor:
    """`x` [out, in] with each value replaced by the nearest of 2^bits centres; same shape, dtype.

    Raises UserError for more than 8 bits.
    """
    if bits > 8:
        raise UserError(f"a codebook of {bits} bits has {2**bits} entries; at most 8 bits make one")
    rows = near(x.detach()).float()  # where running sums have float64
    if granularity == "tensor":
        rows = rows.reshape(1, -1)
    elif granularity != "channel":
        rows = rows.reshape(-1, int(granularity[1:]))
    ordered = rows.sort(-1).values
    sums = torch.nn.functional.pad(ordered.double().cumsum(-1), (1, 0))
    number = 2**bits
    entries = torch.arange(number, dtype=torch.float32, device=rows.device)
    places = (entries + 0.5) / number * ordered.shape[1]
    centres = ordered[:, places.long()].clone()
    for _ in range(ITERATIONS):
        ends = _borders(ordered, centres)
        count = ends.diff(dim=-1)
        mean = sums.gather(-1, ends).diff(dim=-1) / count.clamp_min(1)
        centres = torch.where(count > 0, mean.float(), centres)
        centres = centres.sort(-1).values
    index = torch.searchsorted(_between(centres), rows.contiguous())
    return centres.gather(-1, index).reshape(x.shape).to(x)


def _between(centres: Tensor) -> Tensor:
    return ((centres[:, 1:] + centres[:, :-1]) / 2).contiguous()


def _borders(ordered: Tensor, centres: Tensor) -> Tensor:
    """Where each entry's values begin and end in the sorted rows, [rows, entries + 1]."""
    inner = torch.searchsorted(ordered, _between(centres))
    first = torch.zeros_like(inner[:, :1])
    return torch.cat([first, inner, torch.full_like(first, ordered.shape[1])], -1)
