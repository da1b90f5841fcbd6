"""Gradient norms, their ratio and swing, gains and times of one run, by its metrics.jsonl.

`probe.trace_every` writes the rows with gradient norms and gains. Read by join_numbers and
join_plots.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from skipless.report.inside import layer_of
from skipless.report.load import RunData, number
from skipless.report.measures import Curve, mean


def traced(run: RunData, *, after_warm_up: bool = False) -> list[tuple[int, dict[float, float]]]:
    """(step, {layer: gradient norm}) of every traced step."""
    found = []
    for row in run.metrics:
        norms, step = row.get("gradient_norms"), row.get("step")
        if not isinstance(norms, dict) or not isinstance(step, int):
            continue
        if after_warm_up and step <= run.config.train.warmup_steps:
            continue
        layers = {
            float(layer): value
            for key in norms
            if (layer := layer_of(key)) is not None and (value := number(norms, key)) is not None
        }
        if layers:
            found.append((step, dict(sorted(layers.items()))))
    return found


def first_norms(run: RunData) -> dict[float, float]:
    """{layer: gradient norm} at the first step."""
    found = traced(run)
    return found[0][1] if found and found[0][0] == 1 else {}


def median_norms(run: RunData) -> dict[float, float]:
    """{layer: gradient norm}, median after warm-up."""
    found = [norms for _, norms in traced(run, after_warm_up=True)]
    layers = found[0] if found else {}
    return {k: statistics.median(n[k] for n in found if k in n) for k in layers}


def ratio_over_time(run: RunData, *, after_warm_up: bool = False) -> Curve:
    """(tokens, gradient norm of the first layer over that of the last)."""
    per_step = run.config.train.batch_size * run.config.train.sequence_length
    points = [
        (step * per_step, ratio)
        for step, norms in traced(run, after_warm_up=after_warm_up)
        if (ratio := first_over_last(norms)) is not None
    ]
    return [float(x) for x, _ in points], [y for _, y in points]


def first_over_last(norms: dict[float, float]) -> float | None:
    """Norm of the first layer over that of the last; None for one layer and for a last one of 0."""
    values = list(norms.values())
    return values[0] / values[-1] if len(values) > 1 and values[-1] > 0 else None


def oscillation(run: RunData) -> float | None:
    """Mean |log norm change| between traced steps after warm-up, over layers; None for too few."""
    found = [norms for _, norms in traced(run, after_warm_up=True)]
    changes = [
        abs(math.log(now[layer] / before[layer]))
        for before, now in zip(found, found[1:], strict=False)
        for layer in now
        if before.get(layer, 0) > 0 and now[layer] > 0
    ]
    return mean(changes)


def step_seconds(run: RunData) -> float | None:
    """Median time between training steps that follow each other, measurements left out."""
    gaps = []
    before: dict[str, Any] = {}
    for row in run.metrics:
        if "loss" not in row:  # a held-out loss was measured in between
            before = {}
            continue
        now, then = number(row, "seconds"), number(before, "seconds")
        if now is not None and then is not None and now > then:
            gaps.append(now - then)
        before = row
    return statistics.median(gaps) if gaps else None


def gain_by_depth(run: RunData, gain: str) -> Curve:
    """(depth, last traced value): attention of layer l at l, its MLP at l + 0.5."""
    last = next((r["gains"] for r in reversed(run.metrics) if r.get("gains")), {})
    points = []
    for key in last if isinstance(last, dict) else {}:
        layer, value = layer_of(key), number(last, key)
        if key.split(".")[-1] == gain and layer is not None and value is not None:
            points.append((layer + (0.5 if "mlp" in key else 0.0), value))
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def _mean_gain(gains: Any, gain: str) -> float | None:
    if not isinstance(gains, dict):
        return None
    values = [number(gains, key) for key in gains if key.split(".")[-1] == gain]
    if gain in ("a", "b"):  # a gain that starts at 0 takes either sign, which the branch follows
        values = [None if v is None else abs(v) for v in values]
    return mean(values)


def final_gains(runs: Sequence[RunData]) -> dict[str, float]:
    """{gain: mean over joins and runs of the last traced values}, as in `JoinRow.gains`."""
    last = [next((r["gains"] for r in reversed(run.metrics) if r.get("gains")), {}) for run in runs]
    names = dict.fromkeys(key.split(".")[-1] for gains in last for key in gains)
    found = {name: mean(_mean_gain(gains, name) for gains in last) for name in names}
    return {name: value for name, value in found.items() if value is not None}
