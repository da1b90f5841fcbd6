"""What runs of the recipes `connections-*` came to: a row a connection, judged by its baseline.

Reads files only: metrics.jsonl (loss, and the rows with gradient norms and gains that
`probe.trace_every` wrote), train.json, eval.json, data.json. The criteria are constants here and
stand in the report. Tags C1-C11. Read by join_plots and join_page.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skipless.recipes.connections import KINDS, name_of
from skipless.report.join_runs import (
    final_gains,
    first_norms,
    first_over_last,
    median_norms,
    oscillation,
    ratio_over_time,
    step_seconds,
)
from skipless.report.load import RunData, number
from skipless.report.measures import mean
from skipless.report.tables import LEARNED_NATS

SAME_RANGE = 0.01
"""Losses this near (relative), or within two standard deviations of the difference between seeds,
are in the same range."""
LARGEST_DROP = 0.03
"""Largest drop of the metric, relative to the baseline's."""
SMALLEST_SHARE = 0.95
"""Smallest share of what the baseline learned over token frequencies (or over guessing)."""
EVEN = 10.0
"""Largest factor between the gradient norms of the first and the last layer, median after warm-up,
beyond what the baseline shows: under 1 / EVEN gradients decay on their way back, over EVEN they
grow."""
STEADY = 2.0
"""Largest oscillation, as a multiple of the baseline's."""
KEEPS_UP = "keeps up"
"""The verdict on a row that fulfils all criteria."""


@dataclass(frozen=True, kw_only=True)
class JoinRow:
    """One connection at one depth. Numbers are means over the finished seeds; None: not known."""

    kind: str
    label: str
    group: str
    baseline: str
    num_seeds: int
    tokens: int
    metric: float | None
    """Held-out loss in nats a token, or accuracy of a classifier."""
    spread: float | None
    """Standard deviation of the metric over seeds; None for one seed."""
    share: float | None
    """Of the baseline's metric: its loss over this loss, or this accuracy over its."""
    learned: float | None
    """Share of what the baseline learned: gain over token frequencies, or over guessing; None
    where the baseline itself gained nothing."""
    first_step_ratio: float | None
    """Gradient norm of the first layer over the last layer's at the first step."""
    ratio: float | None
    """The same, median after warm-up."""
    oscillation: float | None
    """Mean |change of log norm| from one traced step to the next after warm-up, over layers."""
    step_seconds: float | None
    """Median time from one training step to the next."""
    peak_memory: float | None
    """Bytes; the largest over seeds."""
    gains: dict[str, float]
    """Mean over all joins at the end: of |a| and |b|, of "rho" and "gate_bias" with their sign."""
    gradient_norms: dict[str, dict[str, float]]
    """{"first_step" | "after_warm_up": {layer: norm}}."""
    failed: tuple[str, ...]
    """Seeds without a result, in words."""
    criteria: dict[str, bool | None]
    """What it fulfils; empty for a baseline and where nothing is known."""
    verdict: str
    runs: tuple[RunData, ...] = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["runs"]
        return values | {"runs": [str(run.path) for run in self.runs]}


@dataclass(frozen=True, kw_only=True)
class JoinTable:
    """All rows of one depth and task."""

    num_layers: int
    authors: bool
    rows: tuple[JoinRow, ...]

    @property
    def title(self) -> str:
        return f"{'Which author, ' if self.authors else ''}{self.num_layers} layers"

    @property
    def name(self) -> str:
        return f"{'author-' if self.authors else ''}{self.num_layers}"

    @property
    def summary(self) -> str:
        """Who keeps up, and before that whether the rows have learned enough to tell."""
        judged = [row for row in self.rows if row.criteria]
        if not judged:
            return "There is no finished baseline beside another finished row yet."
        good = [row.label for row in judged if row.verdict == KEEPS_UP]
        found = f"{len(good)} of {len(judged)} keep up with their baseline" + (
            f": {'; '.join(good)}." if good else "."
        )
        return f"{self._caution()} {found}".lstrip()

    def _caution(self) -> str:
        """What a reader must know first: no baseline has learned to use context."""
        bases = [row for row in self.rows if row.kind == row.baseline and row.metric is not None]
        gains = [
            nothing - row.metric
            for row in bases
            if row.metric is not None and (nothing := _knowing_nothing(row, False)) is not None
        ]
        if self.authors or not gains or max(gains) >= LEARNED_NATS:
            return ""
        return (
            f"Too small for conclusions: no baseline is {LEARNED_NATS:g} nats better than knowing "
            "how frequent each token is."
        )


def tables(runs: Sequence[RunData]) -> list[JoinTable]:
    """The runs of the family by depth and task; others are passed over."""
    found = []
    places = {
        name_of(kind, depth, authors=authors): (authors, depth, kind)
        for kind, what in KINDS.items()
        for authors in (False, True)
        for depth in what.depths
    }
    grouped: dict[tuple[bool, int], dict[str, list[RunData]]] = {}
    for run in runs:
        if run.config.name in places:
            authors, depth, kind = places[run.config.name]
            grouped.setdefault((authors, depth), {}).setdefault(kind, []).append(run)
    for (authors, depth), by_kind in sorted(grouped.items()):
        rows = {kind: _row(kind, by_kind[kind], authors) for kind in KINDS if kind in by_kind}
        judged = tuple(_judged(row, rows.get(row.baseline), authors) for row in rows.values())
        found.append(JoinTable(num_layers=depth, authors=authors, rows=judged))
    return found


def _row(kind: str, runs: list[RunData], authors: bool) -> JoinRow:
    runs = sorted(runs, key=lambda run: run.config.train.seed)
    done = [run for run in runs if not run.unfinished]
    metrics = [m for run in done if (m := _metric(run, authors)) is not None]
    what = KINDS[kind]
    return JoinRow(
        kind=kind,
        label=what.label,
        group=what.group,
        baseline=what.baseline,
        num_seeds=len(done),
        tokens=min((run.tokens for run in done), default=0),
        metric=mean(metrics),
        spread=statistics.stdev(metrics) if len(metrics) > 1 else None,
        share=None,
        learned=None,
        first_step_ratio=_geometric(first_over_last(first_norms(run)) for run in done),
        ratio=_geometric(_median(ratio_over_time(run, after_warm_up=True)[1]) for run in done),
        oscillation=mean(oscillation(run) for run in done),
        step_seconds=_median([s for run in done if (s := step_seconds(run)) is not None]),
        peak_memory=max(
            (m for run in done if (m := number(run.result, "peak_memory_bytes"))), default=None
        ),
        gains=final_gains(done),
        gradient_norms={
            "first_step": _mean_norms([first_norms(run) for run in done]),
            "after_warm_up": _mean_norms([median_norms(run) for run in done]),
        },
        failed=tuple(
            f"seed {run.config.train.seed} stopped at {run.unfinished}" for run in runs
            if run.unfinished
        ),
        criteria={},
        verdict="baseline" if kind == what.baseline else "no baseline to compare with",
        runs=tuple(done),
    )  # fmt: skip


def _judged(row: JoinRow, base: JoinRow | None, authors: bool) -> JoinRow:
    """The row with share, learned, criteria and verdict filled in."""
    if row.metric is None:
        return dataclasses.replace(row, verdict="; ".join(row.failed) or "not measured")
    if base is None or base.metric is None:
        return row
    metric, reference = row.metric, base.metric
    nothing = _knowing_nothing(base, authors)
    share = metric / reference if authors else reference / metric
    learned = None
    if nothing is not None and (reference > nothing if authors else reference < nothing):
        learned = (metric - nothing) / (reference - nothing)
    row = dataclasses.replace(row, share=share, learned=learned)
    if row.kind == row.baseline:
        return row
    worse = reference - metric if authors else metric - reference
    noise = 2 * math.hypot(row.spread or 0.0, base.spread or 0.0)
    low, high = min(1.0, base.ratio or 1.0) / EVEN, max(1.0, base.ratio or 1.0) * EVEN
    swing = None
    if row.oscillation is not None and base.oscillation:
        swing = row.oscillation / base.oscillation
    criteria: dict[str, bool | None] = {
        "same range": worse <= max(noise, SAME_RANGE * reference),
        "drop": 1 - share <= LARGEST_DROP,
        "even gradient": None if row.ratio is None else low <= row.ratio <= high,
        "steady gradient": None if swing is None else swing <= STEADY,
        "learned": None if learned is None else learned >= SMALLEST_SHARE,
    }
    ratio = row.ratio or 0.0
    words = {
        "same range": f"{'accuracy' if authors else 'loss'} {metric / reference - 1:+.1%}",
        "drop": f"beyond {LARGEST_DROP:.0%}",
        "learned": f"learned {learned or 0.0:.0%}",
        "even gradient": f"gradient {'decays' if ratio < 1 else 'grows'}, first/last {ratio:.2g}",
        "steady gradient": f"gradient oscillates, x {swing or 0.0:.1f}",
    }
    complaints = [*row.failed, *(words[name] for name in words if criteria[name] is False)]
    unknown = [name for name, value in criteria.items() if value is None]
    if unknown:
        complaints.append(f"not known: {', '.join(unknown)}")
    verdict = "; ".join(complaints) or KEEPS_UP
    return dataclasses.replace(row, criteria=criteria, verdict=verdict)


def _metric(run: RunData, authors: bool) -> float | None:
    if authors:
        return number(run.evaluation, "accuracy")
    return number(run.result, "held_out_loss")


def _knowing_nothing(base: JoinRow, authors: bool) -> float | None:
    """The metric of a model that learned nothing: token frequencies, or guessing."""
    if authors:
        return 1 / (base.runs[0].config.model.num_labels or 1)
    return base.runs[0].unigram_loss


def _mean_norms(found: list[dict[float, float]]) -> dict[str, float]:
    layers = sorted({layer for norms in found for layer in norms})
    means = {f"{layer:g}": mean(norms.get(layer) for norms in found) for layer in layers}
    return {layer: value for layer, value in means.items() if value is not None}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _geometric(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the known, positive ones: the mean for ratios."""
    known = [math.log(v) for v in values if v is not None and v > 0]
    return math.exp(sum(known) / len(known)) if known else None
