"""The figures of a diagnosis, on the canvas of the report. Tags S1, S3, S9-S11. Read by writing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from skipless.diagnose.result import Diagnosis
from skipless.report.canvas import Pen, Series, render, series_rows
from skipless.report.load import RESIDUAL, RESIDUAL_FREE
from skipless.report.plots import Figure
from skipless.report.scales import log_scale, log_scale_if_wide, signed_log_scale
from skipless.report.tables import Comparison

KINDS = {
    "stream": "stream",
    "sublayer_output": "output of a sublayer",
    "norm_output": "output of a norm",
    "linear_input": "input of a linear layer",
}
SERIES = (
    Series("stream", RESIDUAL, "KL-Shampoo"),
    Series("output of a sublayer", RESIDUAL, "Muon"),
    Series("output of a norm", RESIDUAL_FREE, "KL-Shampoo"),
    Series("input of a linear layer", RESIDUAL_FREE, "Muon"),
    Series("measured", RESIDUAL_FREE, "KL-Shampoo"),
    Series("first token", "mixed", "AdamW"),
    Series("attention entropy", "mixed", "KL-Shampoo"),
)


def series() -> Comparison:
    """All lines of the figures; the canvas reads label, family and stroke of each."""
    return series_rows(SERIES)


class _Wanted(NamedTuple):
    """A figure before it is drawn."""

    name: str
    title: str
    caption: str
    on: Callable[[Pen, Any], None]
    panels: int


def draw(result: Diagnosis) -> tuple[list[Figure], list[str]]:
    """(figures, titles of those that have no numbers)."""
    found, without = [], []
    for wanted in _wanted(result):
        both = render(
            series(), wanted.on, wanted.panels, name=f"diagnosis-{wanted.name}",
            title=wanted.title, subject=result.model,
        )  # fmt: skip
        if both is None:
            without.append(wanted.title)
            continue
        found.append(Figure(name=wanted.name, title=wanted.title, caption=wanted.caption,
                            svg=both[0], png=both[1]))  # fmt: skip
    return found, without


def _wanted(result: Diagnosis) -> list[_Wanted]:
    scheme = result.schemes[0]
    found = [
        _Wanted(
            "rounding", f"What rounding to {scheme} leaves, by depth",
            "The lowest ratio of each kind of tensor in a layer. Left, every token counts alike; "
            "right, all values pooled: where the two differ, a few huge tokens hide what happens "
            "to the others. Dotted: a tensor of Gaussian values. Without skips the stream is the "
            "sublayer's output, and their lines are one.",
            lambda pen, axes: _rounding(pen, axes, result, scheme), 2,
        ),
        _Wanted(
            "tails", "How heavy the tails are, by depth",
            "The largest of each kind in a layer: excess kurtosis over all tokens and channels "
            "(0: Gaussian), and the largest value over the standard deviation.",
            lambda pen, axes: _tails(pen, axes, result), 2,
        ),
        _Wanted(
            "layers", f"What each layer costs at {scheme}",
            f"Left: one layer quantised alone{_errors(result)}. Right: the relative error R of the "
            "stream with all layers quantised; it includes what the layers before have done.",
            lambda pen, axes: _layers(pen, axes, result, scheme), 2,
        ),
        _Wanted(
            "prediction", f"Predicted against measured, by layer, at {scheme}",
            f"A point a layer, with its number. Predicted: {_predicted(result)}, every token "
            "counting alike.",
            lambda pen, axes: _prediction(pen, axes, result, scheme), 1,
        ),
        _Wanted(
            "attention", "Attention, by depth", "Mean over heads and rows of the first sequences.",
            lambda pen, axes: _attention(pen, axes, result), 2,
        ),
    ]  # fmt: skip
    if result.gradients is not None:
        found.append(_Wanted(
            "gradients", f"Gradients of the {result.gradients['of']}, by depth",
            "Left: length of the gradient with respect to the values at a place, the largest of "
            "each kind in a layer. Right: its excess kurtosis (0: Gaussian).",
            lambda pen, axes: _gradients(pen, axes, result), 2,
        ))  # fmt: skip
    return found


def _errors(result: Diagnosis) -> str:
    """What the caption says of the bars: how sure an increase of the loss is."""
    if not result.damage or result.damage["kind"] != "loss":
        return ""
    if any(row["standard_error"] is not None for row in result.layers):
        return "; bars are two standard errors over sequences"
    return ", on one sequence, so that nothing tells how sure it is"


def _predicted(result: Diagnosis) -> str:
    if (result.damage or {}).get("predicted") == "block":
        return "noise over energy of the output of its block, which alone is quantised"
    return "the sum, over the tensors that are rounded there, of noise over energy"


def _line(pen: Pen, axes: Any, label: str, points: dict[float, float]) -> None:
    known = {x: y for x, y in sorted(points.items()) if y is not None and math.isfinite(y)}
    row = next(row for row in pen.comparison.rows if row.label == label)
    if known:
        pen.line(axes, row, list(known), list(known.values()))


def _by_layer(
    rows: Sequence[dict[str, Any]],
    kind: str,
    of: Callable[[dict[str, Any]], float | None],
    choose: Callable,
) -> dict[float, float]:
    """{layer: the chosen of the kind's values there}; what belongs to no layer is left out."""
    found: dict[float, list[float]] = {}
    for row in rows:
        value = of(row)
        if row["kind"] == kind and row["layer"] is not None and value is not None:
            found.setdefault(row["layer"], []).append(value)
    return {layer: choose(values) for layer, values in found.items()}


def _rounding(pen: Pen, axes: Any, result: Diagnosis, scheme: str) -> None:
    ideals = [row["ideal"][scheme] for row in result.sites if scheme in row["ideal"]]
    for panel, key, title in (
        (axes[0], "token_sqnr", "every token alike"), (axes[1], "sqnr", "all values pooled (S3)"),
    ):  # fmt: skip
        for kind, label in KINDS.items():
            _line(pen, panel, label, _by_layer(
                result.sites, kind, lambda row, key=key: row[key].get(scheme), min
            ))  # fmt: skip
        if ideals and panel in pen.panels:
            pen.yardstick(panel, ideals[0], "a Gaussian tensor, best clip")
        panel.set(title=title, xlabel="layer", ylabel="signal to rounding noise (dB)")


def _tails(pen: Pen, axes: Any, result: Diagnosis) -> None:
    left, right = axes
    for kind, label in KINDS.items():
        _line(pen, left, label, _by_layer(result.sites, kind, lambda row: row["kurtosis"], max))
        _line(
            pen, right, label, _by_layer(result.sites, kind, lambda row: row["max_over_std"], max)
        )
    left.set(title="kurtosis", xlabel="layer", ylabel="excess kurtosis (no unit)")
    right.set(title="largest value", xlabel="layer", ylabel="max |x| (standard deviations)")
    if left in pen.panels:
        signed_log_scale(left, linear=1.0)
    if right in pen.panels:
        log_scale_if_wide(right)


def _layers(pen: Pen, axes: Any, result: Diagnosis, scheme: str) -> None:
    left, right = axes
    rows = [r for r in result.layers if r["scheme"] == scheme and r["increase"] is not None]
    _line(pen, left, "measured", {row["layer"]: row["increase"] for row in rows})
    for row in rows:
        if row["standard_error"] is not None:
            ends = (row["increase"] + sign * 2 * row["standard_error"] for sign in (-1, 1))
            left.vlines(row["layer"], *ends, color=pen.color(pen.looks["measured"]), linewidth=1)
    if left in pen.panels:
        left.axhline(0, color=pen.colours["--quiet"], linewidth=0.8)
    left.set(title="one layer alone", xlabel="layer", ylabel=_axis(result))
    points = {float(place): row["r"] for place, row in enumerate(result.depth)}
    _line(pen, right, "stream", points)
    right.set(title="all layers: error of the stream", xlabel="place in order of computation",
              ylabel="R = |x_q - x| / |x|")  # fmt: skip
    if right in pen.panels:
        right.set_ylim(bottom=0)


def _prediction(pen: Pen, axes: Any, result: Diagnosis, scheme: str) -> None:
    (panel,) = axes
    rows = [
        r for r in result.layers
        if r["scheme"] == scheme and None not in (r["predicted"], r["increase"])
    ]  # fmt: skip
    if not rows:
        return
    pen.panels.add(panel)
    xs, ys = [r["predicted"] for r in rows], [r["increase"] for r in rows]
    look = pen.looks["measured"]
    panel.plot(xs, ys, color=pen.color(look), linestyle="none", marker="o", markersize=5)
    for r in rows:
        panel.annotate(
            str(r["layer"]), (r["predicted"], r["increase"]), textcoords="offset points",
            xytext=(5, 3), fontsize=7.5, color=pen.colours["--quiet"],
        )  # fmt: skip
    correlation = (result.damage or {}).get("correlation", {}).get(scheme)
    title = "" if correlation is None else f"rank correlation {correlation:.2f}"
    if title and any(result.is_unsure(row) for row in rows):
        title += ", without a standard error"
    panel.set(title=title, xlabel="predicted (noise over energy)", ylabel=_axis(result))
    if min(xs) > 0 and max(xs) > 20 * min(xs):
        panel.set_xscale("log")
    if min(ys) > 0 and max(ys) > 20 * min(ys):
        log_scale(panel)


def _attention(pen: Pen, axes: Any, result: Diagnosis) -> None:
    left, right = axes
    rows = [r for r in result.attention if r["layer"] is not None and r.get("count")]
    _line(pen, left, "first token", {r["layer"]: r["first_token_mass"] for r in rows})
    _line(pen, right, "attention entropy", {r["layer"]: r["entropy"] for r in rows})
    left.set(title="mass on the first token", xlabel="layer", ylabel="share of attention")
    right.set(title="entropy", xlabel="layer", ylabel="entropy (nats)")
    for panel in axes:
        if panel in pen.panels:
            panel.set_ylim(bottom=0)


def _gradients(pen: Pen, axes: Any, result: Diagnosis) -> None:
    left, right = axes
    rows = result.gradients["sites"] if result.gradients else []
    for kind, label in KINDS.items():
        _line(pen, left, label, _by_layer(rows, kind, lambda row: row["norm"], max))
        _line(pen, right, label, _by_layer(rows, kind, lambda row: row["kurtosis"], max))
    left.set(title="length", xlabel="layer", ylabel="norm of the gradient (loss / value)")
    right.set(title="kurtosis", xlabel="layer", ylabel="excess kurtosis (no unit)")
    if left in pen.panels:
        log_scale_if_wide(left)
    if right in pen.panels:
        signed_log_scale(right, linear=1.0)


def _axis(result: Diagnosis) -> str:
    unit = result.damage["unit"] if result.damage else ""
    return "loss increase (nats a token)" if unit.startswith("nats") else unit
