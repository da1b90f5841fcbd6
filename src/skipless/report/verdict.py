"""The verdict in sentences, computed from the numbers, honest whichever way they come out.

Loss comes first, then the cost of rounding, then the inside; kurtosis is never judged alone,
because errors pass through every layer and R_N foretells the damage better (S9). A difference
within two standard errors is called none. Plain text: whoever shows it escapes it. Read by html and
text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from skipless.report.cells import show
from skipless.report.measures import is_known, spearman, sure
from skipless.report.tables import LEARNED_NATS, Comparison, Pair, Row

AIM_GAP = 0.05  # residual-free within 5 % of its residual twin in held-out loss
AIM_KURTOSIS = 1.0  # mean |g| of the block output over the middle third of layers
HEADLINE_SCHEMES = ("W8A6", "W4A4")  # judged at block scope
SHOWN = 0.0005  # losses are shown to three decimals; what these do not show is no difference

LEADS = {
    "The price of no skip": "Held-out loss at full precision, without skips against with.",
    "Rounded to few bits": "Loss increase in nats, without skips against with.",
    "Inside the models": "Without skips against with; the kurtosis is that of the block outputs in "
    "the middle third of the layers.",
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
        ("In short", _caution(comparison) + _summary(comparison)),
        ("Full precision", _best(comparison)),
        ("The price of no skip", _gaps(comparison)),
        ("Rounded to few bits", _rounding(comparison)),
        ("Inside the models", _inside(comparison)),
        ("How sure this is", _certainty(comparison)),
    ]
    leads = LEADS if comparison.judged else {}
    return [
        Statement(topic=topic, sentences=tuple(sentences), lead=leads.get(topic, ""))
        for topic, sentences in parts
        if sentences
    ]


def headline_schemes(comparison: Comparison) -> list[str]:
    """W8A6 and W4A4 where measured, else the last (harshest) scheme of block scope."""
    measured = comparison.schemes("block")
    return [s for s in HEADLINE_SCHEMES if s in measured] or measured[-1:]


def _known(*values: float | None) -> bool:
    return all(is_known(value) for value in values)


def _join(items: list[str]) -> str:
    return " and ".join([", ".join(items[:-1])] * (len(items) > 1) + items[-1:])


def _count(number: int, total: int) -> str:
    if number == total:
        return "both" if total == 2 else f"all {total}"
    return f"{number} of {total}" if number else f"none of the {total}"


def _explained(scheme: str) -> str:
    """A scheme at block scope, both told for whoever meets them here first."""
    bits = re.match(r"W(\d+)A(\d+)", scheme)
    told = f"{bits[1]}-bit weights and {bits[2]}-bit activations, " if bits else ""
    return f"{scheme} at block scope ({told}everything between embedding and head is rounded)"


def _caution(comparison: Comparison) -> list[str]:
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
        sentences.append(f"Not finished and so not compared: {_join(unfinished)}.")
    return sentences


def _summary(comparison: Comparison) -> list[str]:
    pairs = [p for p in comparison.judged if _known(p.gap)]
    sentences = [_summary_of_gaps(pairs)] if pairs else []
    for scheme in headline_schemes(comparison)[-1:]:
        both = [p for p in pairs if _known(p.row.increase(scheme), p.reference.increase(scheme))]
        if both:
            sentences.append(_summary_of_rounding(both, scheme))
    little = [f"{r.label} ({show(r.loss)} nats)" for r in comparison.rows if r.learned_little]
    if little:
        sentences.append(
            f"Left out of the comparisons: {_join(little)}, having learned less than half as much "
            "as the best row."
        )
    return sentences


def _summary_of_gaps(pairs: list[Pair]) -> str:
    if len(pairs) == 1:
        (pair,) = pairs
        gap = sure(pair.gap)
        if not _tells(pair):
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
    worse = sum(gap > 0 and _tells(p) for p, gap in zip(pairs, gaps, strict=True))
    better = sum(gap < 0 and _tells(p) for p, gap in zip(pairs, gaps, strict=True))
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
    less = sum(_damage(p, scheme) < 0 for p in pairs)
    ahead = sum(_place(p, scheme) < 0 for p in pairs)
    start = f"Rounded to {_explained(scheme)}, the model without skips lost "
    if len(pairs) == 1:
        amount = ("less", "as much", "more")[_damage(pairs[0], scheme) + 1]
        place = ("the lower", "the same", "the higher")[_place(pairs[0], scheme) + 1]
        return f"{start}{amount} and ended with {place} loss."
    return (
        f"{start}less in {_count(less, len(pairs))} and ended with the lower loss in "
        f"{_count(ahead, len(pairs))}."
    )


def _tells(pair: Pair) -> bool:
    """False for a difference within two standard errors; one without errors is taken as it is."""
    return pair.established or not _known(pair.standard_error)


def _sign(difference: float, errors: list[float | None]) -> int:
    """-1, 0 or 1; 0 within two standard errors, or too small to be shown."""
    noise = 2 * math.hypot(*map(sure, errors)) if _known(*errors) else 0.0
    return 0 if abs(difference) <= max(noise, SHOWN) else int(math.copysign(1, difference))


def _damage(pair: Pair, scheme: str) -> int:
    """-1 when the row without skips loses less by rounding, 1 when more, 0 within noise."""
    ours, theirs = pair.row, pair.reference
    errors = [ours.increase_error(scheme), theirs.increase_error(scheme)]
    return _sign(sure(ours.increase(scheme)) - sure(theirs.increase(scheme)), errors)


def _place(pair: Pair, scheme: str) -> int:
    """-1 when the row without skips ends with the lower loss, 1 when with the higher."""
    ours, theirs = pair.row.loss_under(scheme), pair.reference.loss_under(scheme)
    if not is_known(ours) or not is_known(theirs):
        return 0
    return _sign(ours - theirs, [pair.standard_error])


def _best(comparison: Comparison) -> list[str]:
    sentences = []
    finite = sorted((r for r in comparison.rows if _known(r.loss)), key=lambda r: sure(r.loss))
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
    errors = (a.standard_error, b.standard_error)
    if not _known(*errors):
        return False
    return abs(sure(a.loss) - sure(b.loss)) <= 2 * math.hypot(*map(sure, errors))


def _names(comparison: Comparison) -> Callable[[Pair], str]:
    """How a pair is called: by its optimiser where that names one pair, else by its row."""
    optimizers = [p.optimizer for p in comparison.judged]
    return lambda p: p.optimizer if optimizers.count(p.optimizer) == 1 else p.row.label


def _gaps(comparison: Comparison) -> list[str]:
    pairs, name = comparison.judged, _names(comparison)
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
    sentences.insert(0, f"At {tokens}: {_join(listed)}; positive is worse.")
    told = [p for p in known if _tells(p)]
    met = [name(p) for p in told if sure(p.gap) <= AIM_GAP]
    missed = [name(p) for p in told if sure(p.gap) > AIM_GAP]
    aims = [f"{word} with {_join(n)}" for word, n in (("met", met), ("missed", missed)) if n]
    if aims:
        sentences.append(f"The aim, at most {AIM_GAP:.0%} worse, is {', '.join(aims)}.")
    same = [name(p) for p in known if not _tells(p)]
    if same:
        sentences.append(
            f"Within 2 standard errors and so no established difference: {_join(same)}."
        )
    return sentences


def _rounding(comparison: Comparison) -> list[str]:
    schemes = headline_schemes(comparison)
    if not schemes:
        return [
            "No row was evaluated at low precision in block scope, so nothing can be said about "
            "rounding."
        ]
    if comparison.judged:
        return [text for scheme in schemes for text in _rounding_at(scheme, comparison)]
    scheme = schemes[-1]
    known = [r for r in comparison.rows if _known(r.increase(scheme))]
    ranked = sorted(known, key=lambda r: sure(r.increase(scheme)))
    listed = [f"{r.label} {show(r.increase(scheme), '+.3f')}" for r in ranked]
    return (
        [f"Loss increase in nats at {_explained(scheme)}, smallest first: {_join(listed)}."]
        if listed
        else []
    )


def _rounding_at(scheme: str, comparison: Comparison) -> list[str]:
    """Who loses less, more or as much at a scheme, and who ends with the lower loss."""
    name = _names(comparison)
    known = [
        p for p in comparison.judged if _known(p.row.increase(scheme), p.reference.increase(scheme))
    ]
    if not known:
        return [f"At {scheme} no comparison: no pair has both its numbers."]

    def listed(sign: int, of: Callable[[Pair, str], int], value: Callable[[Row], str]) -> str:
        """The pairs on one side, with the two numbers unless these are the same."""
        return _join(
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
            f"At {scheme} it loses", loses, _damage, lambda r: show(r.increase(scheme), "+.3f")
        ),
        sentence(f"At {scheme} it ends", ends, _place, lambda r: show(r.loss_under(scheme))),
    ]


def _inside(comparison: Comparison) -> list[str]:
    pairs, name = comparison.judged, _names(comparison)
    sentences = []

    def each(of: Callable[[Row], float | None], form: str) -> tuple[list[Pair], str]:
        known = [p for p in pairs if _known(of(p.row), of(p.reference))]
        texts = [
            f"{name(p)} {show(of(p.row), form)} against {show(of(p.reference), form)}"
            for p in known
        ]
        return known, _join(texts)

    known, text = each(lambda r: r.kurtosis, ",.2f")
    if known:
        missed = [name(p) for p in known if sure(p.row.kurtosis) >= AIM_KURTOSIS]
        aim = f"missed with {_join(missed)}" if missed else "met"
        sentences.append(f"Mean |kurtosis|: {text} (aim: below {AIM_KURTOSIS:g}, {aim}).")
    sqnr, text = each(lambda r: r.worst_site["sqnr"] if r.worst_site else None, ".1f")
    if sqnr:
        scheme = next(p.row.worst_site["scheme"] for p in sqnr if p.row.worst_site)
        sentences.append(f"Decibels that the worst tensor keeps at {scheme}: {text}.")
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
    known = [r for r in comparison.rows if _known(r.increase(scheme), r.error, r.kurtosis)]
    damage = [sure(r.increase(scheme)) for r in known]
    by_error = spearman([sure(r.error) for r in known], damage)
    by_kurtosis = spearman([sure(r.kurtosis) for r in known], damage)
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
    errors = [p.standard_error for p in comparison.judged if is_known(p.standard_error)]
    if errors:
        sentences.append(
            f"The standard error of a gap is at most {max(errors):.3f} nats (the two rows taken as "
            "independent, which overstates it on shared text)."
        )
    return sentences + list(comparison.caveats)
