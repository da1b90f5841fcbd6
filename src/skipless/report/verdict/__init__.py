"""The verdict in sentences, computed from the numbers, honest whichever way they come out.

Loss comes first, then the cost of rounding, then the inside; kurtosis is never judged alone,
because errors pass through every layer and R_N foretells the damage better (S9). A difference
within two standard errors is called none. Plain text: whoever shows it escapes it. Read by html and
text.

judging.py     which way a pair of rows differs, and whether at all
short.py       what a reader must know first, and the whole in three sentences
precision.py   loss at full precision, the price of no skip, loss by rounding
inside.py      kurtosis, R_N, and which of them foretells the damage
"""

from __future__ import annotations

from dataclasses import dataclass

from skipless.report.measures import is_known
from skipless.report.tables import Comparison
from skipless.report.verdict.inside import inside
from skipless.report.verdict.judging import headline_schemes
from skipless.report.verdict.precision import best, gaps, rounding
from skipless.report.verdict.short import caution, summary

__all__ = ["Statement", "headline_schemes", "verdict"]


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
        ("In short", caution(comparison) + summary(comparison)),
        ("Full precision", best(comparison)),
        ("The price of no skip", gaps(comparison)),
        ("Rounded to few bits", rounding(comparison)),
        ("Inside the models", inside(comparison)),
        ("How sure this is", _certainty(comparison)),
    ]
    leads = LEADS if comparison.judged else {}
    return [
        Statement(topic=topic, sentences=tuple(sentences), lead=leads.get(topic, ""))
        for topic, sentences in parts
        if sentences
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
    if counted := comparison.held_out_tokens:
        sentences.append(f"Held-out losses are means over {counted} tokens.")
    errors = [p.standard_error for p in comparison.judged if is_known(p.standard_error)]
    if errors:
        sentences.append(
            f"The standard error of a gap is at most {max(errors):.3f} nats (the two rows taken as "
            "independent, which overstates it on shared text)."
        )
    return sentences + list(comparison.caveats)
