"""Spearman's rank correlation. Read by the verdict and by `skipless.diagnose`."""

from __future__ import annotations

import math
from collections.abc import Sequence


def spearman(xs: Sequence[float], ys: Sequence[float], *, least: int = 4) -> float | None:
    """Rank correlation in [-1, 1], ties at their mean rank; None for fewer than `least` points and
    where one side is constant. Values have to be numbers: NaN has no rank.
    """
    if len(xs) < least:
        return None
    centre = (len(xs) - 1) / 2
    a, b = ([rank - centre for rank in _ranks(values)] for values in (xs, ys))
    size = math.sqrt(sum(v * v for v in a) * sum(v * v for v in b))
    return sum(u * v for u, v in zip(a, b, strict=True)) / size if size else None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]
