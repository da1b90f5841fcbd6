"""The figures, each a function that draws one comparison on axes, in the order of the page.

A figure none of whose numbers exist is left out and named. Tags S1, S3, S9, S10, S11, C7.
Read by build.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipless.report import measures
from skipless.report.canvas import Pen, render
from skipless.report.inside import (
    attention_by_depth,
    gains_over_time,
    gradients_by_depth,
    over_time,
)
from skipless.report.load import RunData
from skipless.report.measures import Curve
from skipless.report.scales import log_scale, log_scale_if_wide, signed_log_scale
from skipless.report.tables import Comparison
from skipless.report.zero_shot import draw_tasks


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One finished figure. `svg` uses CSS variables of `style.css_variables`."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def _loss_curves(pen: Pen, axes: Any) -> None:
    (both,) = axes
    pen.curves(both, measures.training_curve, markers=False, alpha=0.4, width=1.0)
    pen.curves(both, measures.held_out_curve)
    values = [
        y
        for row in pen.comparison.rows
        for run in row.runs
        for y in (*measures.held_out_curve(run)[1], *measures.training_curve(run)[1][5:])
        if math.isfinite(y)
    ]
    if values:  # the first few steps would squeeze everything that matters
        low, top = min(values), sorted(values)[int(0.97 * (len(values) - 1))]
        if top > low:
            both.set_ylim(low - 0.05 * (top - low), top + 0.08 * (top - low))
    both.set(xlabel="training tokens", ylabel="loss (nats per token)")
    both.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def _loss_by_precision(pen: Pen, axes: Any) -> None:
    axes[1].sharey(axes[0])
    for panel, scope in zip(axes, ("block", "linear"), strict=True):
        schemes = pen.comparison.schemes(scope)
        for row in pen.comparison.rows:
            table = row.precision.get(scope, {})
            points = [(0.0, row.loss)] if table and row.loss is not None else []
            points += [
                (1.0 + i, loss)
                for i, s in enumerate(schemes)
                if (loss := table.get(s, {}).get("loss")) is not None
            ]
            if any(math.isfinite(y) for _, y in points):
                pen.line(panel, row, [x for x, _ in points], [y for _, y in points])
        panel.set_xticks(range(len(schemes) + 1), ["full", *schemes], rotation=35, ha="right")
        panel.set(title=f"{scope} scope", ylabel="held-out loss (nats per token)")


def _kurtosis(pen: Pen, axes: Any) -> None:
    depth, time = axes
    pen.curves(
        depth,
        lambda run: measures.by_depth(
            measures.block_outputs(measures.final_probe(run)), "kurtosis"
        ),
    )
    layers = {run.num_layers for row in pen.comparison.rows for run in row.runs}
    if len(layers) == 1:
        middle = measures.middle_third(layers.pop())
        depth.axvspan(middle[0] - 0.5, middle[-1] + 0.5, color=pen.colours["--band"], zorder=0)
    signed_log_scale(depth, linear=1.0)
    depth.set(
        title="by depth, after training (band: middle third)",
        xlabel="layer",
        ylabel="excess kurtosis of block output",
    )
    pen.curves(time, _kurtosis_over_time, markers=False)
    signed_log_scale(time, linear=0.1)
    time.set(
        title="middle third over training",
        xlabel="training tokens",
        ylabel="mean |excess kurtosis|",
    )
    time.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def _kurtosis_over_time(run: RunData) -> Curve:
    return over_time(run, lambda probe: measures.middle_kurtosis(probe, run.num_layers))


def _sqnr(pen: Pen, axes: Any) -> None:
    axes[1].sharey(axes[0])
    measured = [measures.sqnr_by_depth(run) for row in pen.comparison.rows for run in row.runs]
    ideals = [ideal for *_, ideal in measured if ideal is not None and math.isfinite(ideal)]
    titles = ("worst tensor of each layer", "mean over the layer's tensors")
    for which, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        pen.curves(panel, lambda run, which=which: measures.sqnr_by_depth(run)[:2][which])
        if ideals:
            pen.yardstick(panel, sum(ideals) / len(ideals), "Gaussian yardstick")
        panel.set(title=title, xlabel="layer", ylabel="SQNR (dB)")


def _error(pen: Pen, axes: Any) -> None:
    (depth,) = axes
    pen.curves(depth, measures.error_by_depth)
    log_scale_if_wide(depth)
    depth.set(
        xlabel="depth (layers passed; half steps: after attention)",
        ylabel="relative error of the stream, R",
    )


def _attention(pen: Pen, axes: Any) -> None:
    entropy, sink = axes
    pen.curves(entropy, lambda run: attention_by_depth(run, "entropy"))
    entropy.set(
        title="entropy (1: looks everywhere equally)",
        xlabel="layer",
        ylim=(0, 1.03),
        ylabel="entropy / log(visible keys)",
    )
    pen.curves(sink, lambda run: attention_by_depth(run, "first_token_mass"))
    sink.set(title="attention on the first token", xlabel="layer", ylabel="share of attention")
    sink.set_ylim(bottom=0)


def _gradients(pen: Pen, axes: Any) -> None:
    axes[1].sharey(axes[0])
    for panel, which, title in zip(
        axes, (0, -1), ("early (first measurement)", "late (last measurement)"), strict=True
    ):
        pen.curves(panel, lambda run, which=which: gradients_by_depth(run, which))
        log_scale(panel)
        panel.set(title=title, xlabel="layer", ylabel="gradient norm of the layer's weights")


def _gains(pen: Pen, axes: Any) -> None:
    for panel, gain, title in zip(
        axes, ("a", "b"), ("weight a of the stream (skip)", "weight b of the branch"), strict=True
    ):
        pen.curves(panel, lambda run, gain=gain: gains_over_time(run, gain), markers=False)
        panel.set(title=title, xlabel="training tokens", ylabel=f"mean |{gain}| over the joins")
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, -0.05), max(high, 1.05))
        panel.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def _stream(pen: Pen, axes: Any) -> None:
    (depth,) = axes
    pen.curves(depth, lambda run: measures.stream_rms(measures.final_probe(run)))
    log_scale(depth)
    depth.set(xlabel="layer", ylabel="root mean square of the block output")


# name, title, caption, number of panels, drawing function; in the order of the page.
FIGURES: tuple[tuple[str, str, str, int, Callable[[Pen, Any], None]], ...] = (
    (
        "loss_curves",
        "How the models learn",
        "Thin: training loss, smoothed. Marked: held-out loss. Lower is better.",
        1,
        _loss_curves,
    ),
    (
        "loss_by_precision",
        "What rounding does to the loss",
        "From full precision on the left to few bits on the right. A flat line is a model that "
        "does not mind being rounded; the lowest line is the best model at that width. Block "
        "scope rounds the stream between layers too, linear scope only what enters matrices.",
        2,
        _loss_by_precision,
    ),
    (
        "kurtosis",
        "Outliers in the stream",
        "0 is a bell curve, large values mean that a few huge numbers stretch the scale. Linear "
        "between -1 and 1 (left), logarithmic beyond. Read it with the loss, never alone.",
        2,
        _kurtosis,
    ),
    (
        "sqnr",
        "How well single tensors survive rounding",
        "Signal over rounding error; the dotted line is a Gaussian tensor with its best clip. "
        "Higher is better; every 6 dB is worth about one bit.",
        2,
        _sqnr,
    ),
    (
        "error",
        "How the rounding error travels through depth",
        "Distance between the rounded and the exact stream, as a share of its length. The last "
        "point is R_N. Errors made early pass through every later layer.",
        1,
        _error,
    ),
    (
        "attention",
        "Where attention looks",
        "Near 1, a layer averages the whole prefix; near 0, each token looks at one place. A high "
        "share on the first token is an attention sink.",
        2,
        _attention,
    ),
    (
        "gradients",
        "Do gradients reach every layer?",
        "Level lines are healthy; a line that falls by powers of ten towards layer 0 means that "
        "early layers hardly learn.",
        2,
        _gradients,
    ),
    (
        "gains",
        "The skip over time",
        "1 keeps the stream as it is; an annealed skip falls from 1 to 0 and is gone for good. "
        "Rows with fixed connections have nothing to show here.",
        2,
        _gains,
    ),
    (
        "stream",
        "Size of the stream",
        "With skips the stream grows as layers add to it; without, each layer sets it anew.",
        1,
        _stream,
    ),
)

# As FIGURES; without numbers nothing is said, since few runs have them.
OPTIONAL: tuple[tuple[str, str, str, int, Callable[[Pen, Any], None]], ...] = (
    (
        "tasks",
        "What rounding does to zero-shot answers",
        "Average share of questions answered right, from full precision to few bits. Small models "
        "are near guessing, where differences are noise; the table has the intervals.",
        1,
        draw_tasks,
    ),
)


def draw_all(comparison: Comparison) -> tuple[list[Figure], list[str]]:
    """All figures that have numbers, and the titles of those that have none."""
    figures, without = [], []
    for name, title, caption, num_panels, draw in (*FIGURES, *OPTIONAL):
        drawn = render(comparison, draw, num_panels, name=name, title=title)
        if drawn is None:
            without += [title] if name not in (optional[0] for optional in OPTIONAL) else []
            continue
        svg, png = drawn
        figures.append(Figure(name=name, title=title, caption=caption, svg=svg, png=png))
    return figures, without


def tokens_text(value: float) -> str:
    """A number of tokens for an axis: 300k, 5M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
