"""The numbers of the report: one `Row` per configuration (seeds averaged), one `Pair` per
comparison of a residual-free row with its residual twin. Everything printed or judged comes from
here, and the same objects become report.json. Made by comparing. Tags S1, S3, S9. Read by verdict,
html and text.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from skipless.report import measures
from skipless.report.load import RunData

LEARNED_NATS = 0.5
"""Until the best row is half a nat better than token frequencies alone, models use hardly any
context and the order of rows is that of their warm-up. The rows of the full demo gain 1.0 to 1.6
nats, those of demo-fast at most 0.04."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration; numbers are means over its seeds. None: not measured; NaN: not finite."""

    label: str
    optimizer: str
    family: str
    connection: str
    learning_rate: float
    tokens: int
    num_seeds: int
    loss: float | None
    """Held-out cross-entropy at full precision, nats a token."""
    standard_error: float | None
    error_over: str
    """"seeds" (spread between seeds) or "tokens" (sampling of the held-out text only)."""
    perplexity: float | None
    bits_per_byte: float | None
    kurtosis: float | None
    worst_site: dict[str, Any] | None
    error: float | None
    """R_N, relative error of the last layer's stream at `error_scheme`."""
    error_scheme: str | None
    precision: dict[str, dict[str, dict[str, float | None]]]
    """{scope: {scheme: {"loss", "increase", "standard_error" of the increase}}}, nats."""
    note: str
    unfinished: str
    """ "step 29 of 40"; empty when all its runs are finished."""
    unigram_loss: float
    """Held-out loss of token frequencies alone, nats a token."""
    learned_little: bool
    """Whether it gained less than `comparing.LEARNED_SHARE` of what the best row did."""
    missing: tuple[str, ...]
    runs: tuple[RunData, ...] = dataclasses.field(repr=False)

    @property
    def is_ranked(self) -> bool:
        """Whether its numbers say how it compares: it is finished and learned something."""
        return not (self.learned_little or self.unfinished)

    @property
    def diverged(self) -> bool:
        return self.loss is not None and math.isnan(self.loss)

    def increase(self, scheme: str, scope: str = "block") -> float | None:
        return self.precision.get(scope, {}).get(scheme, {}).get("increase")

    def increase_error(self, scheme: str, scope: str = "block") -> float | None:
        return self.precision.get(scope, {}).get(scheme, {}).get("standard_error")

    def loss_under(self, scheme: str, scope: str = "block") -> float | None:
        return self.precision.get(scope, {}).get(scheme, {}).get("loss")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A residual-free row beside the best residual row that has the same optimiser."""

    optimizer: str
    row: Row
    reference: Row
    loss: float | None
    reference_loss: float | None
    """Both at the smaller of the two token counts."""
    equal_tokens: bool
    """False: one of the two losses was read off the curve of a longer run, mid-schedule."""
    standard_error: float | None
    """Of the difference: root of the sum of squares."""

    @property
    def gap(self) -> float | None:
        """(residual-free - residual) / residual; positive means residual-free is worse."""
        if self.loss is None or self.reference_loss is None:
            return None
        return self.loss / self.reference_loss - 1

    @property
    def established(self) -> bool:
        """Whether the difference exceeds two standard errors (False when they are unknown)."""
        if self.loss is None or self.reference_loss is None or self.standard_error is None:
            return False
        return abs(self.loss - self.reference_loss) > 2 * self.standard_error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows and pairs of one report."""

    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    caveats: tuple[str, ...]
    """Sentences about what makes these rows not strictly comparable."""

    @property
    def ranked(self) -> tuple[Row, ...]:
        """The rows that the verdict puts in an order."""
        return tuple(r for r in self.rows if r.is_ranked)

    @property
    def judged(self) -> tuple[Pair, ...]:
        """The pairs that the verdict compares: both rows are finished and learned something."""
        return tuple(p for p in self.pairs if p.row.is_ranked and p.reference.is_ranked)

    @property
    def held_out_tokens(self) -> str:
        """What the held-out losses are means over: "8,192", or the least and the most; empty where
        it is not known, or counted in passages."""
        found = [measures.held_out_tokens(run) for row in self.rows for run in row.runs]
        counts = sorted({count for count in found if count})
        return " to ".join(f"{count:,}" for count in dict.fromkeys(counts[:1] + counts[-1:]))

    @property
    def gain(self) -> float | None:
        """By how many nats the best row beats token frequencies; None without a loss."""
        gains = [r.unigram_loss - r.loss for r in self.rows if measures.is_known(r.loss)]
        return max(gains, default=None)

    @property
    def error_scheme(self) -> str | None:
        """The scheme, or schemes, that the rows' R_N belong to."""
        return (
            " / ".join(dict.fromkeys(r.error_scheme for r in self.rows if r.error_scheme)) or None
        )

    def schemes(self, scope: str) -> list[str]:
        """Every scheme measured in a scope, from gentle to harsh, as the runs list them."""
        return list(dict.fromkeys(s for row in self.rows for s in row.precision.get(scope, {})))

    def scopes(self) -> list[str]:
        return list(dict.fromkeys(s for row in self.rows for s in row.precision))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for report.json; runs become their paths."""
        return {
            "rows": [_row_dict(row) for row in self.rows],
            "pairs": [
                {
                    "optimizer": p.optimizer,
                    "row": p.row.label,
                    "reference": p.reference.label,
                    "loss": p.loss,
                    "reference_loss": p.reference_loss,
                    "gap": p.gap,
                    "equal_tokens": p.equal_tokens,
                    "standard_error": p.standard_error,
                    "established": p.established,
                }
                for p in self.pairs
            ],
            "caveats": list(self.caveats),
        }


def _row_dict(row: Row) -> dict[str, Any]:
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "runs"}
    values["runs"] = [str(run.path) for run in row.runs]
    values["missing"] = list(row.missing)
    values["diverged"] = row.diverged
    return values
