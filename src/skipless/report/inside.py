"""What the probes say about the inside: attention by depth, gradients by layer, gains over time.

Separate from `measures` because these read the rows of probes.jsonl other than its sites, and of
metrics.jsonl where `probe.trace_every` wrote there (S10, C7).
Read by plots.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from skipless.report.load import RunData, number
from skipless.report.measures import Curve, final_probe, mean, rows


def attention_by_depth(run: RunData, quantity: str) -> Curve:
    """(layers, mean of "entropy" in [0, 1] or "first_token_mass" over a layer's heads and rows).

    The probe gives entropy in nats; it is divided by its value for uniform attention.
    """
    scale = 1 / uniform_entropy(run) if quantity == "entropy" else 1.0
    per_layer: dict[int, list[float]] = defaultdict(list)
    for row in rows(final_probe(run), "attention"):
        value = number(row, quantity)
        if value is not None and isinstance(row.get("layer"), int):
            per_layer[row["layer"]].append(value * scale)
    layers = sorted(per_layer)
    return [float(x) for x in layers], [sum(per_layer[x]) / len(per_layer[x]) for x in layers]


def uniform_entropy(run: RunData) -> float:
    """Mean log(visible keys) over the positions of a measured sequence, in nats."""
    length = run.config.train.sequence_length
    if not run.config.model.causal:
        return math.log(max(2, length))
    return math.lgamma(max(2, length) + 1) / max(2, length)  # mean of log 1, ..., log T


def gradients_by_depth(run: RunData, which: int) -> Curve:
    """(layers, gradient norm) of measurement `which` (0 first, -1 last) that has norms.

    Keys are layer numbers or names that hold one ("layers.3"); others, such as the embedding, are
    left out.
    """
    found = _measured(run, "gradient_norms")
    if not found:
        return [], []
    norms = found[which]["gradient_norms"]
    points = [
        (layer, v)
        for key in norms
        if (layer := layer_of(key)) is not None and (v := number(norms, key)) is not None
    ]
    points.sort()
    return [float(x) for x, _ in points], [y for _, y in points]


def _measured(run: RunData, key: str) -> list[dict[str, Any]]:
    """The rows with a table called `key`: of probes.jsonl, or of metrics.jsonl where more steps are
    traced there."""
    found = [
        [row for row in log if isinstance(row.get(key), dict) and row[key]]
        for log in (run.probes, run.metrics)
    ]
    return max(found, key=len)


def over_time(run: RunData, of: Callable[[dict[str, Any]], float | None]) -> Curve:
    """(tokens, one number of every line of probes.jsonl)."""
    return _by_tokens(run, run.probes, of)


def _by_tokens(
    run: RunData, log: list[dict[str, Any]], of: Callable[[dict[str, Any]], float | None]
) -> Curve:
    per_step = run.config.train.batch_size * run.config.train.sequence_length
    found = [
        (step * per_step, value)
        for row in log
        if isinstance(step := row.get("step"), int) and (value := of(row)) is not None
    ]
    return [float(x) for x, _ in found], [y for _, y in found]


def gains_over_time(run: RunData, gain: str) -> Curve:
    """(tokens, mean magnitude over all joins and channels of the gain called "a" or "b").

    A gain that starts at 0 takes either sign, which its branch follows: with signs they cancel.
    """

    def value(row: dict[str, Any]) -> float | None:
        return mean(_magnitude(v) for k, v in row["gains"].items() if k.split(".")[-1] == gain)

    return _by_tokens(run, _measured(run, "gains"), value)


def layer_of(key: str) -> int | None:
    """The layer a name belongs to: 3 of "3" and "layers.3.mlp"; None where there is none."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", str(key))
    return int(found.group(1)) if found else None


def _magnitude(value: Any) -> float | None:
    """|gain|, of several the mean."""
    if isinstance(value, list):
        return mean(_magnitude(v) for v in value)
    found = number({"v": value}, "v")
    return None if found is None else abs(found)
