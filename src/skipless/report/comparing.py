"""Runs to rows, and residual-free rows to their residual twins: seeds averaged, differences noted.

Tags S1, S3, S9. Read by build, text and join_plots.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from skipless.config import BOOKKEEPING
from skipless.jsonable import leaves
from skipless.report import measures
from skipless.report.load import RESIDUAL, RESIDUAL_FREE, RunData, number
from skipless.report.tables import Comparison, Pair, Row

LEARNED_SHARE = 0.5
"""A row that gained less than this share of what the best row gained over guessing (ln of the
vocabulary) has learned next to nothing: it has little to lose by rounding, and its gap to a twin
tells how slowly it starts, not what it costs to leave out the skip."""
FREQUENCY_SHARE = 0.8
"""The loss of token frequencies as a share of ln(vocabulary), for runs that did not note it: 0.80
and 0.84 on the demo's and rf-small's text."""

SHARED = {
    "data": (
        "data.sources",
        "data.tokenizer",
        "data.held_out_fraction",
        "data.seed",
        "model.vocab_size",
    ),
    "shape": (
        "model.hidden_size",
        "model.num_hidden_layers",
        "model.num_attention_heads",
        "model.intermediate_size",
        "model.hidden_act",
    ),
    "batches": ("train.batch_size", "train.sequence_length", "train.schedule"),
}
"""Settings that two rows must share for their losses to be comparable, by what they are."""
NOT_A_ROW = (*BOOKKEEPING, "train.seed")
"""Seeds are averaged over."""


def compare(runs: Sequence[RunData]) -> Comparison:
    """Group runs into rows, pair residual-free rows with residual ones, note what differs."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(_signature(run), []).append(run)
    labels = _labels([group[0] for group in groups.values()])
    table = tuple(map(_row, groups.values(), labels))
    table = _marked(table)
    return Comparison(rows=table, pairs=tuple(_pairs(table)), caveats=tuple(_caveats(table)))


def _labels(runs: Sequence[RunData]) -> list[str]:
    """A label a run, no two alike: with the folder's name where labels are, with its path where
    names are too."""
    found = [run.label for run in runs]
    for more in (lambda run: run.path.name, lambda run: str(run.path)):
        found = [
            f"{run.label} ({more(run)})" if found.count(label) > 1 else label
            for run, label in zip(runs, found, strict=True)
        ]
    return found


def _marked(table: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, those marked that learned little beside the best one."""
    gains = [math.log(row.runs[0].config.model.vocab_size) - _or_nan(row.loss) for row in table]
    most = max((g for g in gains if not math.isnan(g)), default=0.0)
    return tuple(
        dataclasses.replace(row, learned_little=most > 0 and gain < LEARNED_SHARE * most)
        for row, gain in zip(table, gains, strict=True)
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _signature(run: RunData) -> str:
    values = {k: v for k, v in leaves(run.config).items() if k not in NOT_A_ROW}
    return json.dumps(values, default=lambda c: c.to_dict(), sort_keys=True)


def _row(runs: list[RunData], label: str) -> Row:
    losses = [v for run in runs if (v := measures.held_out_loss(run)) is not None]
    first = runs[0]
    if len(losses) > 1:
        centre = sum(losses) / len(losses)
        variance = sum((v - centre) ** 2 for v in losses) / (len(losses) - 1)
        error, over = math.sqrt(variance / len(losses)), "seeds"
    else:
        error, over = number(first.evaluation, "standard_error"), "tokens"
    worst = [w for run in runs if (w := measures.worst_site(run)) is not None]
    schemes = {
        str((run.quant or {}).get("error", {}).get("scheme"))
        for run in runs
        if isinstance((run.quant or {}).get("error"), dict)
    }
    one = len(runs) == 1
    missing = [m if one else f"{run.path.name}: {m}" for run in runs for m in run.missing]
    loss = measures.mean(losses)
    return Row(
        label=label,
        optimizer=first.optimizer,
        family=first.family,
        connection=first.connection,
        learning_rate=first.config.optim.lr,
        tokens=min(run.tokens for run in runs),
        num_seeds=len(runs),
        loss=loss,
        standard_error=error,
        error_over=over,
        perplexity=None if loss is None else math.exp(min(loss, 700.0)),
        bits_per_byte=measures.mean(number(r.evaluation, "bits_per_byte") for r in runs),
        kurtosis=measures.mean(
            measures.middle_kurtosis(measures.final_probe(r), r.num_layers) for r in runs
        ),
        worst_site=min(worst, key=lambda w: w["sqnr"]) if worst else None,
        error=measures.mean(measures.final_error(r) for r in runs),
        error_scheme=" / ".join(sorted(schemes)) or None,
        precision=_precision(runs),
        note=first.config.note,
        unfinished=next((run.unfinished for run in runs if run.unfinished), ""),
        unigram_loss=first.unigram_loss
        or FREQUENCY_SHARE * math.log(first.config.model.vocab_size),
        learned_little=False,
        missing=tuple(missing),
        runs=tuple(runs),
    )


def _precision(runs: list[RunData]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Means over seeds of loss and increase for every scope and scheme."""
    table: dict[str, dict[str, dict[str, float | None]]] = {}
    for scope in dict.fromkeys(s for run in runs for s in measures.scopes(run)):
        per_run = [measures.precision_rows(run, scope) for run in runs]
        table[scope] = {
            scheme: {
                key: measures.mean(rows.get(scheme, {}).get(key) for rows in per_run)
                for key in ("loss", "increase", "standard_error")
            }
            for scheme in dict.fromkeys(s for rows in per_run for s in rows)
        }
    return table


def _pairs(table: Sequence[Row]) -> list[Pair]:
    pairs = []
    for row in table:
        twins = [r for r in table if r.family == RESIDUAL and r.optimizer == row.optimizer]
        if row.family != RESIDUAL_FREE or not twins:
            continue
        # The strongest residual row: where a control beats the plain one, it is the measure.
        reference = min(twins, key=lambda r: r.loss if measures.is_known(r.loss) else math.inf)
        tokens = min(row.tokens, reference.tokens)
        equal = max(row.tokens, reference.tokens) <= 1.01 * tokens
        ours, theirs = row.standard_error, reference.standard_error
        error = None
        if measures.is_known(ours) and measures.is_known(theirs):
            error = math.hypot(ours, theirs)
        pairs.append(
            Pair(
                optimizer=row.optimizer,
                row=row,
                reference=reference,
                loss=_loss_at(row, tokens),
                reference_loss=_loss_at(reference, tokens),
                equal_tokens=equal,
                standard_error=error,
            )
        )
    return pairs


def _loss_at(row: Row, tokens: int) -> float | None:
    if row.tokens <= 1.01 * tokens:
        return row.loss
    return measures.mean(measures.loss_at(run, tokens) for run in row.runs)


def _caveats(table: Sequence[Row]) -> list[str]:
    sentences = []
    values = [leaves(row.runs[0].config) for row in table]
    for what, names in SHARED.items():
        differing = [n for n in names if len({repr(v[n]) for v in values}) > 1]
        if differing:
            sentences.append(
                f"The rows do not share the same {what} ({', '.join(differing)} differ), so their "
                "losses are not strictly comparable."
            )
    tokens = {row.tokens for row in table if row.tokens}
    if tokens and max(tokens) > 1.01 * min(tokens):
        sentences.append(
            f"The rows saw different numbers of tokens ({min(tokens):,} to {max(tokens):,}); gaps "
            "compare at the smaller number, where the longer run was still mid-schedule."
        )
    return sentences
