"""Numbers of one run, taken out of its files: curves, kurtosis, SQNR, R_l, precision (S1, S3, S9).

Convention of the whole room: None is "not measured", NaN is "measured and not finite".
Read by tables (numbers) and plots (curves).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeGuard

from skipless.report.load import RunData, number

Curve = tuple[list[float], list[float]]


def middle_third(num_layers: int) -> range:
    """Layers l (from 0) with num_layers/3 <= l < 2 num_layers/3: 4..7 of 12, 8..15 of 24.

    The middle layer when that is empty (fewer than 3 layers).
    """
    start, stop = -(-num_layers // 3), -(-2 * num_layers // 3)
    return range(start, stop) if start < stop else range(num_layers // 2, num_layers // 2 + 1)


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether `value` was measured and is a number."""
    return value is not None and not math.isnan(value)


def sure(value: float | None) -> float:
    """`value` where the caller has left out what was not measured."""
    assert value is not None, "a number that was not measured was to be compared"
    return value


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the measured values; None when there is none, NaN when one is not finite."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def final_probe(run: RunData) -> dict[str, Any]:
    """The measurement after training, else the last one during training, else empty."""
    return run.probe or (run.probes[-1] if run.probes else {})


def rows(container: Any, key: str) -> list[dict[str, Any]]:
    """`container[key]` as a list of dicts, whatever it is."""
    value = container.get(key) if isinstance(container, dict) else None
    return [r for r in value if isinstance(r, dict)] if isinstance(value, list) else []


def block_outputs(probe: dict[str, Any]) -> list[dict[str, Any]]:
    """One site a layer: the stream after the MLP's connection, i.e. the block's output."""
    by_layer: dict[int, dict[str, Any]] = {}
    for site in rows(probe, "sites"):
        layer, is_mlp = site.get("layer"), site.get("sublayer") == "mlp"
        # A stream site of an unnamed sublayer stands in where no MLP site exists.
        if site.get("kind") != "stream" or not isinstance(layer, int):
            continue
        if is_mlp or by_layer.get(layer, {}).get("sublayer") != "mlp":
            by_layer[layer] = site
    return [by_layer[layer] for layer in sorted(by_layer)]


def by_depth(sites: Iterable[dict[str, Any]], key: str) -> Curve:
    """(layers, values) of one quantity; layers without it are left out."""
    found = [(s["layer"], v) for s in sites if (v := number(s, key)) is not None]
    return [float(layer) for layer, _ in found], [v for _, v in found]


def middle_kurtosis(probe: dict[str, Any], num_layers: int) -> float | None:
    """Mean |pooled excess kurtosis| of the block output over the middle third of layers (S1)."""
    middle = middle_third(num_layers)
    sites = [s for s in block_outputs(probe) if s["layer"] in middle]
    values = [number(s, "kurtosis") for s in sites]
    return mean(abs(v) if v is not None else None for v in values)


def stream_rms(probe: dict[str, Any]) -> Curve:
    """Root mean square of the block output by layer, in the stream's own unit."""
    layers, values = [], []
    for site in block_outputs(probe):
        mu, sd = number(site, "mean"), number(site, "std")
        if mu is not None and sd is not None:
            layers.append(float(site["layer"]))
            values.append(math.hypot(mu, sd))
    return layers, values


def training_curve(run: RunData, *, num_points: int = 400) -> Curve:
    """(tokens, training loss in nats), smoothed by an exponential mean over 2 % of the steps.

    The mean is corrected for its start; a non-finite loss stays a gap.
    """
    found = [
        (t, v)
        for r in run.metrics
        if (t := number(r, "tokens")) is not None and (v := number(r, "loss")) is not None
    ]
    keep = 1 - 1 / max(1.0, 0.02 * len(found))
    tokens, smooth = [], []
    total = weight = 0.0
    for t, value in found:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
            smooth.append(total / weight)
        else:
            smooth.append(math.nan)
        tokens.append(t)
    stride = max(1, len(tokens) // num_points)
    return tokens[::stride], smooth[::stride]


def held_out_curve(run: RunData) -> Curve:
    """(tokens, held-out loss in nats) during training."""
    per_step = run.config.train.batch_size * run.config.train.sequence_length
    tokens, losses = [], []
    for row in run.metrics:
        step, value = number(row, "step"), number(row, "held_out_loss")
        if step is not None and value is not None:
            tokens.append(number(row, "tokens") or step * per_step)
            losses.append(value)
    return tokens, losses


def held_out_loss(run: RunData) -> float | None:
    """The final held-out loss in nats a token: eval.json, else quant.json, else the log."""
    if (value := number(run.evaluation, "held_out_loss")) is not None:
        return value
    if (value := number(run.quant, "full_precision")) is not None:
        return value
    losses = held_out_curve(run)[1]
    return losses[-1] if losses else None


def held_out_tokens(run: RunData) -> int | None:
    """The tokens that `held_out_loss` is the mean over; None where no file says so."""
    if number(run.evaluation, "held_out_loss") is not None:
        found = number(run.evaluation, "num_tokens")
    elif number(run.quant, "full_precision") is not None:
        found = number(run.quant, "num_tokens")
    else:
        found = number(run.result, "held_out_tokens")
    return None if found is None else int(found)


def loss_at(run: RunData, tokens: float) -> float | None:
    """Held-out loss after `tokens` training tokens, interpolated; None outside the curve."""
    xs, ys = held_out_curve(run)
    for (x0, y0), (x1, y1) in zip(
        zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False
    ):
        if x0 <= tokens <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
    return None


def precision_rows(run: RunData, scope: str) -> dict[str, dict[str, float | None]]:
    """{scheme: {"loss", "increase", "standard_error"}} of one scope, in nats, as measured.

    "standard_error" is that of the increase.
    """
    base = number(run.quant, "full_precision")
    table: dict[str, dict[str, float | None]] = {}
    for row in rows(run.quant, "rows"):
        if row.get("scope") == scope and isinstance(row.get("scheme"), str):
            loss, increase = number(row, "loss"), number(row, "increase")
            if increase is None and loss is not None and base is not None:
                increase = loss - base
            error = number(row, "standard_error")
            table[row["scheme"]] = {"loss": loss, "increase": increase, "standard_error": error}
    return table


def scopes(run: RunData) -> list[str]:
    """The scopes measured in quant.json, `block` first since the headline is taken there."""
    found = dict.fromkeys(str(r.get("scope")) for r in rows(run.quant, "rows"))
    return sorted(
        found,
        key=lambda s: ["block", "linear", "all"].index(s) if s in ("block", "linear", "all") else 9,
    )


def worst_site(run: RunData) -> dict[str, Any] | None:
    """The site with the lowest SQNR: {"site", "sqnr", "ideal", "gap", "scheme"} in dB (S3, S11).

    gap = ideal - measured: how far the tensor stays below a Gaussian one of the same width.
    A null SQNR (nothing was rounded away) is left out.
    """
    sqnr = (run.quant or {}).get("sqnr") or {}
    found = [(v, r) for r in rows(sqnr, "rows") if _is_number(v := number(r, "sqnr"))]
    if not found:
        return None
    value, row = min(found, key=lambda pair: pair[0])
    ideal = number(row, "ideal")
    return {
        "site": str(row.get("site", "?")),
        "sqnr": value,
        "ideal": ideal,
        "gap": None if ideal is None else ideal - value,
        "scheme": sqnr.get("scheme"),
    }


def sqnr_by_depth(run: RunData) -> tuple[Curve, Curve, float | None]:
    """(worst site a layer, mean over its sites, mean Gaussian yardstick), all in dB."""
    per_layer: dict[int, list[float]] = defaultdict(list)
    ideals = []
    for row in rows((run.quant or {}).get("sqnr"), "rows"):
        value, ideal = number(row, "sqnr"), number(row, "ideal")
        if _is_number(value) and isinstance(row.get("layer"), int):
            per_layer[row["layer"]].append(value)
            ideals.append(ideal)
    layers = sorted(per_layer)
    depth = [float(layer) for layer in layers]
    worst = [min(per_layer[layer]) for layer in layers]
    average = [sum(per_layer[layer]) / len(per_layer[layer]) for layer in layers]
    return (depth, worst), (depth, average), mean(ideals)


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def error_by_depth(run: RunData) -> Curve:
    """(depth in layers, R_l) at every join: attention at l + 0.5, MLP at l + 1 (S9)."""
    offset = {"attention": 0.5, "mlp": 1.0}
    found = []
    for row in rows((run.quant or {}).get("error"), "rows"):
        value = number(row, "r")
        if value is not None and isinstance(row.get("layer"), int):
            found.append((row["layer"] + offset.get(str(row.get("sublayer")), 1.0), value))
    found.sort()
    return [x for x, _ in found], [y for _, y in found]


def final_error(run: RunData) -> float | None:
    """R_N: the relative error of the stream after the last layer (S9)."""
    values = error_by_depth(run)[1]
    return values[-1] if values else None
