"""Kurtosis, the worst tensor and R_N of pairs, and which of them goes with the damage.

Read by the verdict.
"""

from __future__ import annotations

from collections.abc import Callable

from skipless.report.cells import show
from skipless.report.measures import sure
from skipless.report.ranks import spearman
from skipless.report.tables import Comparison, Pair, Row
from skipless.report.verdict.judging import all_known, headline_schemes, join, pair_names

AIM_KURTOSIS = 1.0
"""Mean |g| of the block output over the middle third of layers."""


def inside(comparison: Comparison) -> list[str]:
    """Kurtosis, SQNR of the worst tensor and R_N, without skips against with."""
    pairs, name = comparison.judged, pair_names(comparison)
    sentences = []

    def each(of: Callable[[Row], float | None], form: str) -> tuple[list[Pair], str]:
        known = [p for p in pairs if all_known(of(p.row), of(p.reference))]
        texts = [
            f"{name(p)} {show(of(p.row), form)} against {show(of(p.reference), form)}"
            for p in known
        ]
        return known, join(texts)

    known, text = each(lambda r: r.kurtosis, ",.2f")
    if known:
        missed = [name(p) for p in known if sure(p.row.kurtosis) >= AIM_KURTOSIS]
        aim = f"missed with {join(missed)}" if missed else "met"
        sentences.append(f"Mean |kurtosis|: {text} (aim: below {AIM_KURTOSIS:g}, {aim}).")
    sqnr, text = each(lambda r: r.worst_site["sqnr"] if r.worst_site else None, ".1f")
    if sqnr:
        at = dict.fromkeys(
            r.worst_site["scheme"] for p in sqnr for r in (p.row, p.reference) if r.worst_site
        )
        sentences.append(f"Decibels that the worst tensor keeps at {' / '.join(at)}: {text}.")
    errors, text = each(lambda r: r.error, ".2f")
    if errors:
        sentences.append(f"The error that reaches the last layer, R_N: {text}.")
    if known:
        sentences.append(
            "Low kurtosis makes each tensor easier to round but does not decide the loss: errors "
            "pass through every layer, so read it together with R_N and the losses above."
        )
    return sentences + _correlation(comparison)


def _correlation(comparison: Comparison) -> list[str]:
    scheme = (headline_schemes(comparison) or [""])[-1]
    known = [r for r in comparison.ranked if all_known(r.increase(scheme), r.error, r.kurtosis)]
    damage = [sure(r.increase(scheme)) for r in known]
    by_error = spearman([sure(r.error) for r in known], damage)
    by_kurtosis = spearman([sure(r.kurtosis) for r in known], damage)
    if by_error is None or by_kurtosis is None:
        return []
    return [
        f"Over these {len(known)} rows the rank correlation with the loss increase at {scheme} "
        f"is {by_error:+.2f} for R_N and {by_kurtosis:+.2f} for the kurtosis."
    ]
