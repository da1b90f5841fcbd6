"""Whether a number, a list or a text of some settings is in range; UserError where it is not.

The sentence names the setting as the command line does (`train.warmup_steps is -5; ...`). Read by
checks.py and by settings that stand elsewhere. No torch here: `--help` must be fast.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from skipless.errors import UserError, check_choice, not_utf8
from skipless.scheme import Scheme


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, numpy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number, numpy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(where: str, config: Any, *names: str, low: int = 1, high: int | None = None,
          or_none: bool = False) -> None:  # fmt: skip
    """Each field is a whole number from `low` to `high`; UserError otherwise."""
    for name in names:
        value = getattr(config, name)
        if value is None and or_none:
            continue
        if not is_whole(value) or value < low or (high is not None and value > high):
            range_ = f"at least {low}" if high is None else f"a whole number from {low} to {high}"
            _refuse(where, name, value, range_, or_none)


def real(where: str, config: Any, *names: str, interval: str = "(-inf, inf)",
         or_none: bool = False) -> None:  # fmt: skip
    """Each field is a finite number inside `interval`, such as "[0, 1)"; UserError otherwise."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    for name in names:
        value = getattr(config, name)
        if value is None and or_none:
            continue
        fits = is_real(value) and math.isfinite(value) and (
            (low <= value if interval[0] == "[" else low < value)
            and (value <= high if interval[-1] == "]" else value < high)
        )  # fmt: skip
        if not fits:
            words = {"(0, inf)": "positive and finite", "[0, inf)": "finite and at least 0",
                     "(-inf, inf)": "a finite number"}  # fmt: skip
            _refuse(where, name, value, words.get(interval, f"a number in {interval}"), or_none)


def decays(where: str, config: Any, *names: str) -> None:
    """Each field is a pair of averaging decays in [0, 1); UserError otherwise."""
    for name in names:
        pair = getattr(config, name)
        fits = isinstance(pair, Sequence) and len(pair) == 2
        if not fits or not all(is_real(b) and 0 <= b < 1 for b in pair):
            _refuse(where, name, pair, "two decays in [0, 1), such as 0.9,0.95", False)


def some(where: str, config: Any, name: str, choices: Collection[str] | None = None) -> None:
    """The field is a non-empty list without repetition, of `choices` if given."""
    values = getattr(config, name)
    if not values:
        kinds = f": some of {', '.join(choices)}" if choices else ""
        raise UserError(f"{where}.{name} is empty; give at least one entry{kinds}")
    for value in values:
        if choices is not None:
            check_choice(f"{where}.{name}", value, choices)
        if values.count(value) > 1:
            raise UserError(f"{where}.{name} has {value!r} twice; leave one of them out")


def text(where: str, config: Any, *names: str) -> None:
    """Each field is text that is not empty and can be written as UTF-8; UserError otherwise."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, str) or not value:
            raise UserError(f"{where}.{name} is {value!r}; give at least one character")
        if odd := not_utf8(value):
            raise UserError(f"{where}.{name} is {value!r}, which holds {odd}")


def schemes(where: str, config: Any, name: str) -> None:
    """The field is a list of quantisation schemes, none of them twice in other words."""
    some(where, config, name)
    seen: dict[str, str] = {}
    for value in getattr(config, name):
        canonical = str(scheme(where, name, value))
        if canonical in seen:
            raise UserError(
                f"{where}.{name} has {value!r} and {seen[canonical]!r}, which are the same; leave "
                "one of them out"
            )
        seen[canonical] = value


def scheme(where: str, name: str, value: str) -> Scheme:
    """`value` parsed as a quantisation scheme; the UserError names the setting."""
    try:
        return Scheme.parse(value)
    except UserError as error:
        raise UserError(f"{where}.{name}: {error}") from None


def _refuse(where: str, name: str, value: Any, expected: str, or_none: bool) -> None:
    raise UserError(
        f"{where}.{name} is {value!r}; it must be {expected}" + (", or none" if or_none else "")
    )
