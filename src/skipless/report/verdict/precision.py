"""Loss at full precision, with and without skips, and what rounding adds to it.

Read by the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from skipless.report.cells import show
from skipless.report.measures import is_known, sure
from skipless.report.tables import Comparison, Pair, Row
from skipless.report.verdict.judging import (
    all_known,
    damage_sign,
    headline_schemes,
    join,
    pair_names,
    place_sign,
    tells,
)
from skipless.report.verdict.short import explained

AIM_GAP = 0.05
"""Residual-free within 5 % of its residual twin in held-out loss."""


def best(comparison: Comparison) -> list[str]:
    """The lowest loss, what cannot be told apart from it, and rows without a loss."""
    sentences = []
    finite = sorted((r for r in comparison.ranked if all_known(r.loss)), key=lambda r: sure(r.loss))
    if finite:
        best = finite[0]
        sentences.append(
            f"Lowest held-out loss: {best.label}, {_with_error(best)} nats a token, perplexity "
            f"{best.perplexity:.1f}."
        )
        ties = [r for r in finite[1:] if _tied(best, r)]
        if ties:
            listed = join([f"{r.label} ({r.loss:.3f})" for r in ties])
            sentences.append(f"Not to be told apart from it (2 standard errors): {listed}.")
    for row in comparison.rows:
        if row.diverged:
            sentences.append(f"{row.label} did not train: its held-out loss is not finite.")
        elif row.loss is None:
            sentences.append(f"{row.label} has no held-out loss yet.")
    return sentences


def _with_error(row: Row) -> str:
    return f"{row.loss:.3f}" + (
        f" ± {row.standard_error:.3f}" if all_known(row.standard_error) else " (error not known)"
    )


def _tied(a: Row, b: Row) -> bool:
    errors = (a.standard_error, b.standard_error)
    if not all_known(*errors):
        return False
    return abs(sure(a.loss) - sure(b.loss)) <= 2 * math.hypot(*map(sure, errors))


def gaps(comparison: Comparison) -> list[str]:
    """The price of no skip, pair by pair, and which pairs meet the aim."""
    pairs, name = comparison.judged, pair_names(comparison)
    if not pairs:
        why = (
            "No residual-free row and residual row with the same optimiser are both finished and "
            "have learned enough"
            if comparison.pairs
            else "No residual-free row has a residual row with the same optimiser beside it"
        )
        return [f"{why}, so the price of removing the skip cannot be told from these runs."]
    known = [p for p in pairs if is_known(p.gap)]
    sentences = [
        f"{name(p)}: no comparison, the losses are {show(p.loss, absent='not measured')} and "
        f"{show(p.reference_loss, absent='not measured')}."
        for p in pairs
        if p not in known
    ]
    if not known:
        return sentences
    listed = [
        f"{name(p)} {p.gap:+.1%} ({p.loss:.3f} against {p.reference_loss:.3f})" for p in known
    ]
    even = all(p.equal_tokens for p in known)
    tokens = "equal tokens" if even else "the smaller number of tokens"
    sentences.insert(0, f"At {tokens}: {join(listed)}; positive is worse.")
    told = [p for p in known if tells(p)]
    met = [name(p) for p in told if sure(p.gap) <= AIM_GAP]
    missed = [name(p) for p in told if sure(p.gap) > AIM_GAP]
    aims = [f"{word} with {join(n)}" for word, n in (("met", met), ("missed", missed)) if n]
    if aims:
        sentences.append(f"The aim, at most {AIM_GAP:.0%} worse, is {', '.join(aims)}.")
    same = [name(p) for p in known if not tells(p)]
    if same:
        sentences.append(
            f"Within 2 standard errors and so no established difference: {join(same)}."
        )
    return sentences


def rounding(comparison: Comparison) -> list[str]:
    """Who loses by rounding at the headline schemes; without pairs the rows in order."""
    schemes = headline_schemes(comparison)
    if not schemes:
        return [
            "No row was evaluated at low precision in block scope, so nothing can be said about "
            "rounding."
        ]
    if comparison.judged:
        return [text for scheme in schemes for text in _rounding_at(scheme, comparison)]
    scheme = schemes[-1]
    known = [r for r in comparison.ranked if all_known(r.increase(scheme))]
    ranked = sorted(known, key=lambda r: sure(r.increase(scheme)))
    listed = [f"{r.label} {show(r.increase(scheme), '+.3f')}" for r in ranked]
    return (
        [f"Loss increase in nats at {explained(scheme)}, smallest first: {join(listed)}."]
        if listed
        else []
    )


def _rounding_at(scheme: str, comparison: Comparison) -> list[str]:
    """Who loses less, more or as much at a scheme, and who ends with the lower loss."""
    name = pair_names(comparison)
    known = [
        p
        for p in comparison.judged
        if all_known(p.row.increase(scheme), p.reference.increase(scheme))
    ]
    if not known:
        return [f"At {scheme} no comparison: no pair has both its numbers."]

    def listed(sign: int, of: Callable[[Pair, str], int], value: Callable[[Row], str]) -> str:
        """The pairs on one side, with the two numbers unless these are the same."""
        return join(
            [
                name(p) + (f" ({value(p.row)} against {value(p.reference)})" if sign else "")
                for p in known
                if of(p, scheme) == sign
            ]
        )

    def sentence(start: str, words: dict[int, str], of, value) -> str:
        parts = [
            f"{word} with {found}"
            for sign, word in words.items()
            if (found := listed(sign, of, value))
        ]
        return f"{start} {'; '.join(parts)}."

    loses = {-1: "less", 1: "more", 0: "as much, within noise,"}
    ends = {-1: "ahead", 1: "behind", 0: "level, within noise,"}
    return [
        sentence(
            f"At {scheme} it loses", loses, damage_sign, lambda r: show(r.increase(scheme), "+.3f")
        ),
        sentence(f"At {scheme} it ends", ends, place_sign, lambda r: show(r.loss_under(scheme))),
    ]
