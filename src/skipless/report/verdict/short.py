"""What a reader must know before any number, and what the numbers come to in short.

Read by the verdict.
"""

from __future__ import annotations

import re

from skipless.report.cells import show
from skipless.report.measures import sure
from skipless.report.tables import LEARNED_NATS, Comparison, Pair
from skipless.report.verdict.judging import (
    all_known,
    damage_sign,
    headline_schemes,
    join,
    place_sign,
    tells,
)


def caution(comparison: Comparison) -> list[str]:
    """What a reader must know before any number: too little training, or an unfinished one."""
    sentences = []
    if comparison.gain is not None and comparison.gain < LEARNED_NATS:
        amount = f"only {comparison.gain:.2f} nats better" if comparison.gain > 0 else "not better"
        sentences.append(
            f"Too small for conclusions: the best row is {amount} than knowing how frequent each "
            f"token is, and below {LEARNED_NATS:g} nats the order of rows is that of their warm-up."
        )
    unfinished = [f"{r.label} ({r.unfinished})" for r in comparison.rows if r.unfinished]
    if unfinished:
        sentences.append(f"Not finished and so not compared: {join(unfinished)}.")
    return sentences


def summary(comparison: Comparison) -> list[str]:
    """Gap, rounding and what was left out, each in a sentence where there are numbers."""
    pairs = [p for p in comparison.judged if all_known(p.gap)]
    sentences = [_summary_of_gaps(pairs)] if pairs else []
    for scheme in headline_schemes(comparison)[-1:]:
        both = [p for p in pairs if all_known(p.row.increase(scheme), p.reference.increase(scheme))]
        if both:
            sentences.append(_summary_of_rounding(both, scheme))
    little = [f"{r.label} ({show(r.loss)} nats)" for r in comparison.rows if r.learned_little]
    if little:
        sentences.append(
            f"Left out of the comparisons: {join(little)}, having learned less than half as much "
            "as the best row."
        )
    return sentences


def _summary_of_gaps(pairs: list[Pair]) -> str:
    if len(pairs) == 1:
        (pair,) = pairs
        gap = sure(pair.gap)
        if not tells(pair):
            return (
                "With and without skip connections there is no established difference in held-out "
                f"loss ({gap:+.1%}, {pair.optimizer} both times)."
            )
        word = "higher" if gap > 0 else "lower"
        return (
            f"Without skip connections the held-out loss was {abs(gap):.1%} {word} than with "
            f"them ({pair.optimizer} both times)."
        )
    gaps = [sure(p.gap) for p in pairs]
    worse = sum(gap > 0 and tells(p) for p, gap in zip(pairs, gaps, strict=True))
    better = sum(gap < 0 and tells(p) for p, gap in zip(pairs, gaps, strict=True))
    same = len(pairs) - worse - better
    low, high = min(gaps), max(gaps)
    return (
        f"Without skip connections the held-out loss was higher in {_count(worse, len(pairs))} "
        + "comparisons"
        + (f", lower in {better}" if better else "")
        + (f", not to be told apart in {same}" if same else "")
        + f" ({low:+.1%} to {high:+.1%} against the same optimiser with skips)."
    )


def _summary_of_rounding(pairs: list[Pair], scheme: str) -> str:
    less = sum(damage_sign(p, scheme) < 0 for p in pairs)
    ahead = sum(place_sign(p, scheme) < 0 for p in pairs)
    start = f"Rounded to {explained(scheme)}, the model without skips lost "
    if len(pairs) == 1:
        amount = ("less", "as much", "more")[damage_sign(pairs[0], scheme) + 1]
        place = ("the lower", "the same", "the higher")[place_sign(pairs[0], scheme) + 1]
        return f"{start}{amount} and ended with {place} loss."
    return (
        f"{start}less in {_count(less, len(pairs))} and ended with the lower loss in "
        f"{_count(ahead, len(pairs))}."
    )


def explained(scheme: str) -> str:
    """A scheme at block scope, both told for whoever meets them here first."""
    bits = re.match(r"W(\d+)A(\d+)", scheme)
    told = f"{bits[1]}-bit weights and {bits[2]}-bit activations, " if bits else ""
    return f"{scheme} at block scope ({told}everything between embedding and head is rounded)"


def _count(number: int, total: int) -> str:
    if number == total:
        return "both" if total == 2 else f"all {total}"
    return f"{number} of {total}" if number else f"none of the {total}"
