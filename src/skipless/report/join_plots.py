"""Figures of the comparison of connections: loss, gradient norm by layer and over time, gains.

One figure a group of rows, so that a panel has few lines; the baselines of its rows are in each.
Read by join_page.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from skipless.recipes.connections import GROUPS, KINDS
from skipless.report import join_runs, measures
from skipless.report.canvas import Pen, render
from skipless.report.comparing import compare
from skipless.report.inside import gains_over_time
from skipless.report.join_numbers import JoinRow, JoinTable
from skipless.report.load import RunData
from skipless.report.measures import Curve
from skipless.report.plots import Figure, tokens_text
from skipless.report.scales import log_scale
from skipless.report.style import Look, looks
from skipless.report.tables import Comparison

STROKES: tuple[tuple[Any, str], ...] = (
    ("-", "o"),
    ((0, (5, 2)), "^"),
    ((0, (1.2, 1.4)), "s"),
    ((0, (6, 1.5, 1, 1.5)), "D"),
    ((0, (3, 1, 1, 1, 1, 1)), "v"),
    ((0, (9, 2)), "P"),
)
"""Lines and markers within a group, since most rows share the optimiser."""


def comparison(table: JoinTable) -> Comparison:
    """The table's rows as the canvas wants them, in the order and with the labels of the table."""
    rows = []
    for row in table.rows:
        if row.runs:
            rows.append(dataclasses.replace(compare(row.runs).rows[0], label=row.label))
    return Comparison(rows=tuple(rows), pairs=(), caveats=())


def styles(table: JoinTable, drawn: Comparison) -> dict[str, Look]:
    """{row label: Look}; lines and markers take turns within a group, the first is residual's."""
    found, used = looks(drawn.rows), dict.fromkeys(GROUPS, 1) | {KINDS["residual"].group: 0}
    for row in table.rows:
        if row.label in found:
            line, marker = STROKES[used[row.group] % len(STROKES)]
            used[row.group] += 1
            found[row.label] = dataclasses.replace(found[row.label], line=line, marker=marker)
    return found


def draw_table(table: JoinTable, drawn: Comparison) -> list[Figure]:
    """All figures of one depth and task; those without numbers are left out."""
    found = []
    looks_ = styles(table, drawn)
    for group, words in GROUPS.items():
        members = [row for row in table.rows if row.group == group]
        bases = {row.baseline for row in members}
        shown = [row for row in table.rows if row in members or row.kind in bases]
        if not any(row.kind != row.baseline for row in members):
            continue
        found.append(
            _figure(
                f"{table.name}-{group}",
                f"{table.title}: {words}",
                "Held-out loss (markers) and training loss; gradient norm by layer, median after "
                "warm-up, and thin at the first step; first layer's norm over the last layer's "
                "along training (1: even; below: gradients decay on their way back).",
                drawn, looks_, shown, _loss_and_gradients, 3,
            )
        )  # fmt: skip
    with_gains = [row for row in table.rows if {"a", "b"} & row.gains.keys()]
    if with_gains:
        found.append(
            _figure(
                f"{table.name}-trajectories",
                f"{table.title}: gains",
                "Weight of the branch (b) and of the stream (a), mean magnitude over all joins; b "
                "at every join after training, attention at whole numbers, MLP half a layer on "
                "(of channels the mean magnitude, else with its sign).",
                drawn, looks_, with_gains, _gains, 3,
            )
        )  # fmt: skip
    return [figure for figure in found if figure is not None]


def _figure(
    name: str,
    title: str,
    caption: str,
    drawn: Comparison,
    looks_: dict[str, Look],
    shown: list[JoinRow],
    draw: Any,
    num_panels: int,
) -> Figure | None:
    def on(pen: Pen, axes: Any) -> None:
        pen.looks = looks_
        draw(pen, axes, [row for row in drawn.rows if row.label in {s.label for s in shown}])

    both = render(drawn, on, num_panels, name=f"joins-{name}", title=title)
    if both is None:
        return None
    return Figure(name=name, title=title, caption=caption, svg=both[0], png=both[1])


def _loss_and_gradients(pen: Pen, axes: Any, rows: list) -> None:
    loss, depth, time = axes
    _curves(pen, loss, rows, measures.training_curve, markers=False, alpha=0.4, width=0.9)
    _curves(pen, loss, rows, measures.held_out_curve)
    ends = [ys[-1] for row in rows for run in row.runs if (ys := measures.held_out_curve(run)[1])]
    starts = [ys[0] for row in rows for run in row.runs if (ys := _late(run))]
    finite = [y for y in (*ends, *starts) if math.isfinite(y)]
    if finite and max(finite) > min(finite):
        room = max(finite) - min(finite)
        loss.set_ylim(min(finite) - 0.06 * room, max(finite) + 0.06 * room)
    loss.set(title="loss (nats)", xlabel="training tokens")
    _curves(pen, depth, rows, lambda run: _by_layer(join_runs.median_norms(run)))
    _curves(
        pen, depth, rows, lambda run: _by_layer(join_runs.first_norms(run)),
        markers=False, alpha=0.45, width=0.9,
    )  # fmt: skip
    depth.set(title="gradient norm by layer", xlabel="layer")
    _curves(pen, time, rows, join_runs.ratio_over_time, markers=False, width=1.3)
    time.set(title="first layer's norm / last layer's", xlabel="training tokens")
    for panel in (depth, time):
        if panel in pen.panels:
            log_scale(panel)
    for panel in (loss, time):
        panel.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def _late(run: RunData) -> list[float]:
    """Smoothed training losses after the first tenth, which would squeeze all that matters."""
    ys = measures.training_curve(run)[1]
    return ys[len(ys) // 10 :]


def _gains(pen: Pen, axes: Any, rows: list) -> None:
    branch, depth, stream = axes
    _curves(pen, branch, rows, lambda run: gains_over_time(run, "b"), markers=False)
    branch.set(title="weight of the branch, mean |b|", xlabel="training tokens")
    _curves(pen, depth, rows, lambda run: join_runs.gain_by_depth(run, "b"))
    depth.set(title="b at every join, at the end", xlabel="layer")
    _curves(pen, stream, rows, lambda run: gains_over_time(run, "a"), markers=False)
    stream.set(title="weight of the stream, mean |a|", xlabel="training tokens")
    for panel in (branch, stream):
        panel.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def _by_layer(norms: dict[float, float]) -> Curve:
    return list(norms), list(norms.values())


def _curves(
    pen: Pen,
    axes: Any,
    rows: list,
    of: Any,
    *,
    markers: bool = True,
    alpha: float = 1.0,
    width: float = 1.6,
) -> None:
    """One line a row and seed, of these rows only."""
    for row in rows:
        for index, run in enumerate(row.runs):
            xs, ys = of(run)
            if any(map(math.isfinite, ys)):
                thin = 1.0 if index == 0 else 0.5
                pen.line(
                    axes, row, xs, ys,
                    markers=markers and index == 0, alpha=alpha * thin, width=width * thin,
                )  # fmt: skip
