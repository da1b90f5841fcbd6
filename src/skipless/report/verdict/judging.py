"""Which way a residual-free row differs from its twin: less, more, or not to be told apart.

Read by the other files of this room.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from skipless.report.measures import is_known, sure
from skipless.report.tables import Comparison, Pair

HEADLINE_SCHEMES = ("W8A6", "W4A4")
"""Judged at block scope."""
SHOWN = 0.0005
"""Losses are shown to three decimals; what these do not show is no difference."""


def headline_schemes(comparison: Comparison) -> list[str]:
    """W8A6 and W4A4 where measured, else the last (harshest) scheme of block scope."""
    measured = comparison.schemes("block")
    return [s for s in HEADLINE_SCHEMES if s in measured] or measured[-1:]


def all_known(*values: float | None) -> bool:
    """Whether every value was measured and is a number."""
    return all(is_known(value) for value in values)


def tells(pair: Pair) -> bool:
    """False for a difference within two standard errors; one without errors is taken as it is."""
    return pair.established or not all_known(pair.standard_error)


def damage_sign(pair: Pair, scheme: str) -> int:
    """-1 when the row without skips loses less by rounding, 1 when more, 0 within noise."""
    ours, theirs = pair.row, pair.reference
    errors = [ours.increase_error(scheme), theirs.increase_error(scheme)]
    return _sign(sure(ours.increase(scheme)) - sure(theirs.increase(scheme)), errors)


def place_sign(pair: Pair, scheme: str) -> int:
    """-1 when the row without skips ends with the lower loss, 1 when with the higher."""
    ours, theirs = pair.row.loss_under(scheme), pair.reference.loss_under(scheme)
    if not is_known(ours) or not is_known(theirs):
        return 0
    return _sign(ours - theirs, [pair.standard_error])


def _sign(difference: float, errors: list[float | None]) -> int:
    """-1, 0 or 1; 0 within two standard errors, or too small to be shown."""
    noise = 2 * math.hypot(*map(sure, errors)) if all_known(*errors) else 0.0
    return 0 if abs(difference) <= max(noise, SHOWN) else int(math.copysign(1, difference))


def pair_names(comparison: Comparison) -> Callable[[Pair], str]:
    """How a pair is called: by its optimiser where that names one pair, else by its row."""
    optimizers = [p.optimizer for p in comparison.judged]
    return lambda p: p.optimizer if optimizers.count(p.optimizer) == 1 else p.row.label


def join(items: list[str]) -> str:
    """The items as prose: a, b and c."""
    return " and ".join([", ".join(items[:-1])] * (len(items) > 1) + items[-1:])
