"""The figure of a conversion: held-out loss against the share of skips removed.

Left the loss itself with the unconverted model's level; right what it costs, on a scale that is
linear near 0, so that a loss that fell shows below 0, and logarithmic beyond. The control is the
same skips removed at once from the original weights, untrained. Read by the CLI; `record` is what
convert.json holds.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skipless.files import write_atomic
from skipless.report.load import RESIDUAL, RESIDUAL_FREE
from skipless.report.style import INK, PALETTE

__all__ = ["draw_conversions", "draw_untrained"]

Rows = Sequence[Mapping[str, Any]]
CONVERTED = [light for light, _ in PALETTE[RESIDUAL_FREE]]
CONTROL = [light for light, _ in PALETTE[RESIDUAL]]
QUIET, GRID = INK["quiet"][0], INK["grid"][0]
LINEAR = 1e-2  # nats: the right panel is linear from -LINEAR to LINEAR


def draw_conversions(records: Mapping[str, Mapping[str, Any]], path: str | Path) -> Path:
    """Draw records (legend label -> convert.json) to `path`, PNG or SVG by its ending.

    The level of the unconverted model is that of the first record.
    """
    lines, controls = [], []
    for index, (label, record) in enumerate(records.items()):
        start = {
            "share": record["already"] / record["total"], "loss": record["loss"], "increase": 0.0,
        }  # fmt: skip
        kept = [row for row in record["stages"] if row["kept"]]
        beyond = [row for row in record["stages"] if not row["kept"]]
        lines.append((f"{label}, trained", [start, *kept], CONVERTED[index], "-", "o"))
        if beyond:
            lines.append((f"{label}, beyond the budget", beyond, CONVERTED[index], "", "x"))
        if record["untrained"] in controls:
            continue  # the same skips in the same order, trained in another way
        controls.append(record["untrained"])
        lines.append((
            f"{label}, untrained", [start, *record["untrained"]], CONTROL[index], (0, (4, 2)), "s",
        ))  # fmt: skip
    level = next(iter(records.values()))["loss"]
    return _draw(lines, level, Path(path))


def draw_untrained(curves: Mapping[str, Rows], path: str | Path) -> Path:
    """Draw what `untrained_curves` found (site -> rows) to `path`, PNG or SVG by its ending."""
    lines = [
        (f"{site}, untrained", list(rows), CONTROL[index], (0, (4, 2)), "sD^"[index % 3])
        for index, (site, rows) in enumerate(curves.items())
    ]
    return _draw(lines, next(iter(curves.values()))[0]["loss"], Path(path))


def _draw(lines: list[tuple[str, list[Any], str, Any, str]], level: float, path: Path) -> Path:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.hashsalt": "skipless", "font.size": 9, "axes.edgecolor": GRID, "grid.color": GRID,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9.4, 3.9), layout="constrained")
        FigureCanvasAgg(figure)
        loss, cost = figure.subplots(1, 2)
        for label, rows, color, line, marker in lines:
            for axes, key in ((loss, "loss"), (cost, "increase")):
                xs = [100 * row["share"] for row in rows]
                ys = [math.nan if row[key] is None else row[key] for row in rows]
                axes.plot(xs, ys, color=color, linestyle=line or "none", marker=marker,
                          markersize=4.5, linewidth=1.6, label=label)  # fmt: skip
        loss.axhline(level, color=QUIET, linewidth=1.2, linestyle=":", label="unconverted")
        loss.set_ylabel("held-out loss (nats per token)")
        cost.set_ylabel("increase (nats per token)")
        cost.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
        cost.axhline(0, color=QUIET, linewidth=1.2, linestyle=":")
        for axes in (loss, cost):
            axes.set_xlabel("skips removed (% of all)")
            axes.set_xlim(left=0)
            axes.grid(alpha=0.6)
            axes.set_axisbelow(True)
        handles, labels = loss.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        drawn, form = io.BytesIO(), path.suffix.lstrip(".") or "png"
        options: dict[str, Any] = {"metadata": {"Date": None}} if form == "svg" else {"dpi": 160}
        figure.savefig(drawn, format=form, facecolor="white", **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(path, drawn.getvalue())
