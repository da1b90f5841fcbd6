"""What the fields of a scheme may be, and sentences for what they may not. Read by `formats`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from skipless.errors import UserError, suggestion

MIN_BITS, MAX_BITS = 2, 16
# [0-9] and not \d, which takes the digits of every script; so many that int() always reads them.
NUMBER = "[0-9]{1,9}"
GROUP = re.compile(r"g([1-9][0-9]{0,8})")
PERCENTILE = re.compile(r"p([0-9]{1,9}(?:\.[0-9]{1,30})?)")
_LETTERS = {"kv": "KV", "probability": "P"}


def check_groups(size: int, widths: Mapping[str, int]) -> None:
    """UserError for the first width, by the name of its matrix, that groups of `size` do not fill.

    The size it proposes divides all of `widths`.
    """
    for name, width in widths.items():
        if width % size:
            common = math.gcd(*widths.values())
            divisors = [d for d in range(1, common + 1) if common % d == 0]
            near = min(divisors, key=lambda d: abs(math.log(d / size)))
            raise UserError(
                f"{name}{': ' if name else ''}group size {size} does not divide the {width} input "
                f"channels; use g{near}"
            )


def check_bits(what: str, bits: int) -> None:
    """UserError for a width outside MIN_BITS to MAX_BITS."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not MIN_BITS <= bits <= MAX_BITS:
        advice = ""
        if isinstance(bits, int) and bits > MAX_BITS:
            advice = {
                "weights": "; 16 loses next to nothing",
                "activation": "; use Afp for floating point",
            }.get(what, f"; leave -{_LETTERS.get(what, what)} out for the activation's width")
        raise UserError(
            f"{what} width is {bits!r}; a whole number of bits from {MIN_BITS} to {MAX_BITS} "
            f"was expected{advice}"
        )


def check_value(
    what: str, value: str, known: tuple[str, ...], pattern: re.Pattern[str] | None = None
) -> None:
    """UserError for a word that is neither in `known` nor of the form `pattern`."""
    if value in known or (pattern and isinstance(value, str) and pattern.fullmatch(value)):
        return
    extra = {GROUP: ["g128"], PERCENTILE: ["p99.9"], None: []}[pattern]
    raise UserError(
        f"{what} is {value!r}; {suggestion(str(value), [*known, *extra], noun='value')}"
    )
