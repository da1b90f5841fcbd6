"""The verdict in sentences, computed from the numbers, honest whichever way they come out.

Loss comes first, then the cost of rounding, then the inside; kurtosis is never judged alone,
because errors pass through every layer and R_N foretells the damage better (S9). Plain text:
whoever shows it escapes it. Read by html and text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skipless.report.measures import spearman
from skipless.report.tables import Comparison, Pair, Row

AIM_GAP = 0.05  # residual-free within 5 % of its residual twin in held-out loss
FAR_BEHIND = 0.2  # a row this far behind its twin has learned too little to have much to lose
AIM_KURTOSIS = 1.0  # mean |g| of the block output over the middle third of layers
HEADLINE_SCHEMES = ("W8A6", "W4A4")  # judged at block scope

LEADS = {
    "The price of no skip": "Held-out loss at full precision, without skips against with.",
    "Rounded to few bits": "Loss increase in nats at block scope: the model without skips against "
    "the one with.",
    "Inside the models": "Tensors and rounding errors, without skips against with; the kurtosis is "
    "that of the block outputs in the middle third of the layers.",
}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One finding: a topic of a few words and the sentences under it."""

    topic: str
    sentences: tuple[str, ...]
    lead: str = ""
    """What the sentences have in common, said once before them."""


def verdict(comparison: Comparison) -> list[Statement]:
    """All findings, in reading order. Topics without numbers say that they have none."""
    parts = [
        ("In short", _summary(comparison)),
        ("Full precision", _best(comparison)),
        ("The price of no skip", _gaps(comparison)),
        ("Rounded to few bits", _rounding(comparison)),
        ("Inside the models", _inside(comparison)),
        ("How sure this is", _certainty(comparison)),
    ]
    leads = LEADS if comparison.pairs else {}
    return [
        Statement(topic=topic, sentences=tuple(sentences), lead=leads.get(topic, ""))
        for topic, sentences in parts
        if sentences
    ]


def nats(value: float | None) -> str:
    """Four significant digits at most, a word when there is no finite number."""
    if value is None:
        return "not measured"
    return "not finite" if math.isnan(value) else f"{value:.3f}"


def headline_schemes(comparison: Comparison) -> list[str]:
    """W8A6 and W4A4 where measured, else the last (harshest) scheme of block scope."""
    measured = comparison.schemes("block")
    return [s for s in HEADLINE_SCHEMES if s in measured] or measured[-1:]


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _count(number: int, total: int) -> str:
    if number == total:
        return "both" if total == 2 else f"all {total}"
    return f"{number} of {total}" if number else f"none of the {total}"


def _summary(comparison: Comparison) -> list[str]:
    pairs = [p for p in comparison.pairs if _known(p.gap)]
    if not pairs:
        return []
    sentences = [_summary_of_gaps(pairs)]
    for scheme in headline_schemes(comparison)[-1:]:
        both = [
            p
            for p in pairs
            if p.gap <= FAR_BEHIND
            and _known(p.row.increase(scheme))
            and _known(p.reference.increase(scheme))
        ]
        if both:
            sentences.append(_summary_of_rounding(both, scheme))
    behind = [p.row.label for p in pairs if p.gap > FAR_BEHIND]
    if behind:
        sentences.append(
            f"Not counted for rounding: {_join(behind)}, more than {FAR_BEHIND:.0%} behind at full "
            "precision, having learned too little for rounding to lose much."
        )
    return sentences


def _summary_of_gaps(pairs: list[Pair]) -> str:
    if len(pairs) == 1:
        (pair,) = pairs
        word = "higher" if pair.gap > 0 else "lower"
        return (
            f"Without skip connections the held-out loss was {abs(pair.gap):.1%} {word} than with "
            f"them ({pair.optimizer} both times)."
        )
    worse = sum(p.gap > 0 for p in pairs)
    low, high = min(p.gap for p in pairs), max(p.gap for p in pairs)
    return (
        f"Without skip connections the held-out loss was higher in {_count(worse, len(pairs))} "
        f"comparisons ({low:+.1%} to {high:+.1%} against the same optimiser with skips)."
    )


def _summary_of_rounding(pairs: list[Pair], scheme: str) -> str:
    less = sum(p.row.increase(scheme) < p.reference.increase(scheme) for p in pairs)
    ahead = sum(_ahead(p, scheme) for p in pairs)
    start = f"Rounded to {scheme} (block scope), the model without skips lost "
    if len(pairs) == 1:
        place = "the lower" if ahead else "the higher"
        return f"{start}{'less' if less else 'more'} and ended with {place} loss."
    return (
        f"{start}less in {_count(less, len(pairs))} and ended with the lower loss in "
        f"{_count(ahead, len(pairs))}."
    )


def _ahead(pair: Pair, scheme: str) -> bool:
    ours, theirs = pair.row.loss_under(scheme), pair.reference.loss_under(scheme)
    return _known(ours) and _known(theirs) and ours < theirs


def _best(comparison: Comparison) -> list[str]:
    sentences = []
    finite = sorted((r for r in comparison.rows if _known(r.loss)), key=lambda r: r.loss)
    if finite:
        best = finite[0]
        sentences.append(
            f"Lowest held-out loss: {best.label}, {_with_error(best)} nats a token, perplexity "
            f"{best.perplexity:.1f}."
        )
        ties = [r for r in finite[1:] if _tied(best, r)]
        if ties:
            listed = _join([f"{r.label} ({r.loss:.3f})" for r in ties])
            sentences.append(f"Not to be told apart from it (2 standard errors): {listed}.")
    for row in comparison.rows:
        if row.diverged:
            sentences.append(f"{row.label} did not train: its held-out loss is not finite.")
        elif row.loss is None:
            sentences.append(f"{row.label} has no held-out loss yet.")
    return sentences


def _with_error(row: Row) -> str:
    return f"{row.loss:.3f}" + (
        f" ± {row.standard_error:.3f}" if _known(row.standard_error) else " (error not known)"
    )


def _tied(a: Row, b: Row) -> bool:
    if not (_known(a.standard_error) and _known(b.standard_error)):
        return False
    return abs(a.loss - b.loss) <= 2 * math.hypot(a.standard_error, b.standard_error)


def _gaps(comparison: Comparison) -> list[str]:
    if not comparison.pairs:
        return [
            "No residual-free row has a residual row with the same optimiser beside it, so the "
            "price of removing the skip cannot be told from these runs."
        ]
    return [f"{_subject(p, comparison)}: {_gap(p)}." for p in comparison.pairs]


def _subject(pair: Pair, comparison: Comparison) -> str:
    """ "With Muon" where that names the two rows, else both labels."""
    same = [r for r in comparison.rows if r.optimizer == pair.optimizer]
    if len(same) == 2:
        return f"With {pair.optimizer}"
    return f"{pair.row.label} against {pair.reference.label}"


def _gap(pair: Pair) -> str:
    if not _known(pair.gap):
        return f"no comparison, the losses are {nats(pair.loss)} and {nats(pair.reference_loss)}"
    direction = "higher (worse)" if pair.gap > 0 else "lower (better)"
    tokens = "at equal tokens" if pair.equal_tokens else "at the smaller number of tokens"
    text = (
        f"{pair.loss:.3f} against {pair.reference_loss:.3f}, "
        f"{abs(pair.gap):.1%} {direction} {tokens}"
    )
    if _known(pair.standard_error) and not pair.established:
        text += ", within 2 standard errors and so no established difference"
    met = "met" if pair.gap <= AIM_GAP else "missed"
    return f"{text} (aim: at most {AIM_GAP:.0%} worse, {met})"


def _rounding(comparison: Comparison) -> list[str]:
    schemes = headline_schemes(comparison)
    if not schemes:
        return [
            "No row was evaluated at low precision in block scope, so nothing can be said about "
            "rounding."
        ]
    sentences = [
        f"{_subject(p, comparison)}: " + "; ".join(_damage(p, s) for s in schemes) + "."
        for p in comparison.pairs
    ]
    if sentences:
        return sentences
    scheme = schemes[-1]
    known = [r for r in comparison.rows if _known(r.increase(scheme))]
    ranked = sorted(known, key=lambda r: r.increase(scheme))
    listed = [f"{r.label} {r.increase(scheme):+.3f}" for r in ranked]
    return (
        [f"Loss increase at {scheme} in nats, smallest first: {_join(listed)}."] if listed else []
    )


def _damage(pair: Pair, scheme: str) -> str:
    ours, theirs = pair.row.increase(scheme), pair.reference.increase(scheme)
    if not (_known(ours) and _known(theirs)):
        return f"at {scheme} no comparison ({nats(ours)} against {nats(theirs)})"
    word = "less" if ours < theirs else "more" if ours > theirs else "as much"
    text = f"at {scheme} it loses {word}, {ours:+.3f} against {theirs:+.3f}"
    final, other = pair.row.loss_under(scheme), pair.reference.loss_under(scheme)
    if _known(final) and _known(other):
        place = "ahead" if final < other else "behind" if final > other else "level"
        text += f", and ends {place} ({final:.3f} against {other:.3f})"
    return text


def _inside(comparison: Comparison) -> list[str]:
    sentences = []
    for pair in comparison.pairs:
        ours, theirs = pair.row, pair.reference
        if not (_known(ours.kurtosis) and _known(theirs.kurtosis)):
            continue
        aim = "met" if ours.kurtosis < AIM_KURTOSIS else "missed"
        parts = [
            f"mean |kurtosis| {ours.kurtosis:,.2f} against {theirs.kurtosis:,.2f} "
            f"(aim: below {AIM_KURTOSIS:g}, {aim})"
        ]
        if ours.worst_site and theirs.worst_site:
            here, there = ours.worst_site, theirs.worst_site
            parts.append(
                f"the worst tensor at {here['scheme']} keeps {here['sqnr']:.1f} against "
                f"{there['sqnr']:.1f} dB"
            )
        if _known(ours.error) and _known(theirs.error):
            parts.append(
                f"the error that reaches the last layer, R_N, is {ours.error:.2f} against "
                f"{theirs.error:.2f}"
            )
        sentences.append(f"{_subject(pair, comparison)}: " + "; ".join(parts) + ".")
    if sentences:
        warning = (
            "Low kurtosis makes each tensor easier to round but does not decide the loss: errors "
            "pass through every layer, so read it together with R_N and the losses above."
        )
        sentences = [*sentences, warning]
    return sentences + _correlation(comparison)


def _correlation(comparison: Comparison) -> list[str]:
    scheme = (headline_schemes(comparison) or [""])[-1]
    known = [
        r for r in comparison.rows if all(map(_known, (r.increase(scheme), r.error, r.kurtosis)))
    ]
    damage = [r.increase(scheme) for r in known]
    by_error = spearman([r.error for r in known], damage)
    by_kurtosis = spearman([r.kurtosis for r in known], damage)
    if by_error is None or by_kurtosis is None:
        return []
    return [
        f"Over these {len(known)} rows the rank correlation with the loss increase at {scheme} "
        f"is {by_error:+.2f} for R_N and {by_kurtosis:+.2f} for the kurtosis."
    ]


def _certainty(comparison: Comparison) -> list[str]:
    counts = {row.num_seeds for row in comparison.rows}
    if counts == {1}:
        sentences = [
            "One seed a row: ± is the standard error over held-out text only, so the spread "
            "between seeds is unknown and small differences may turn round with another seed."
        ]
    else:
        listed = "; ".join(f"{r.label}: {r.num_seeds}" for r in comparison.rows)
        number = f"{counts.pop()} seeds a row" if len(counts) == 1 else f"Seeds by row: {listed}"
        single = any(r.num_seeds == 1 for r in comparison.rows)
        sentences = [
            f"{number}; ± is the standard error over seeds"
            + (" (over held-out text where there is one seed)." if single else ".")
        ]
    errors = [p.standard_error for p in comparison.pairs if _known(p.standard_error)]
    if errors:
        sentences.append(
            f"The standard error of a gap is at most {max(errors):.3f} nats (the two rows taken as "
            "independent, which overstates it on shared text)."
        )
    return sentences + list(comparison.caveats)
