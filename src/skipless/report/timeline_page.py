"""The page and files of a timeline: heat maps site by step, and which site moved most, when.

    NAME-values.csv   a line a quantity, site and step; NAME-moves.csv a line a quantity and site
    NAME-KEY.png      a heat map a quantity
    NAME.html         one page that needs no other file
    NAME.json         every number (over-time.json beside index.html), written last

Read by the command line and `skipless.diagnose`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from skipless.files import to_strict_json, write_atomic
from skipless.report.canvas import Pen, Series, render, series_rows
from skipless.report.csv_text import csv_text
from skipless.report.frame import document, glossary, listed, number, sortable, word
from skipless.report.heat import heat_figure
from skipless.report.html import figure_html, section
from skipless.report.load import RESIDUAL, RESIDUAL_FREE
from skipless.report.plots import Figure
from skipless.report.scales import log_scale
from skipless.report.timeline import Timeline, label, quantity, read_timeline, where

SERIES = (
    Series("training loss", RESIDUAL, "Muon"),
    Series("held-out loss", RESIDUAL_FREE, "KL-Shampoo"),
)
MAX_ROWS = 1000
"""Rows of the page's table: a large model has ten thousand."""
GLOSSARY = {
    "Site": "An input or output of one module; the model's input is at the top of a map.",
    "Excess kurtosis": "How heavy the tails are over all tokens and channels: 0 for a Gaussian, "
    "thousands when single values are huge.",
    "max / sd": "The largest value over the standard deviation.",
    "Root mean square": "The size of a typical value.",
    "SQNR, every token alike": "Signal over rounding noise of each token, averaged over tokens, in "
    "decibels: 6 dB is about one bit.",
    "Channel energy": "1 when all channels have the same energy, the number of channels when one "
    "has it all.",
    "Gradient": "Of the loss: with respect to the values at a site, or to a layer's parameters.",
    "Moved": "Largest over smallest value in orders of magnitude: 1 is a factor of ten, 20 dB, or "
    "a kurtosis of 9 where there was none.",
    "Most": "The two neighbouring measurements between which the number changed most.",
}


def write_log(path: str | Path, page: Path) -> list[str]:
    """Read the log at `path` and write its page; returns lines for the terminal."""
    timeline = read_timeline(path)
    write_timeline(timeline, page)
    return terminal_lines(timeline, page)


def terminal_lines(timeline: Timeline, page: Path) -> list[str]:
    """What moved most, what is missing, and where the page is."""
    lines = [f"{place:2d}. {line}" for place, line in enumerate(timeline.lines(), 1)]
    lines += [f"not measured: {line}" for line in timeline.missing]
    return [*lines, f"{page}  (beside it every number as JSON and CSV, and figures as PNG)"]


def write_timeline(timeline: Timeline, page: Path) -> Path:
    """Write all files, those beside the page under its name (none for index.html); returns the
    page's path."""
    start = "" if page.stem == "index" else f"{page.stem}-"
    figures = draw(timeline)
    for figure in figures:
        write_atomic(page.with_name(f"{start}{figure.name}.png"), figure.png)
    write_atomic(page.with_name(f"{start}values.csv"), csv_text(values(timeline)))
    write_atomic(page.with_name(f"{start}moves.csv"), csv_text(timeline.moves))
    path = write_atomic(page, page_text(timeline, figures))
    numbers = page.with_name("over-time.json") if not start else page.with_suffix(".json")
    write_atomic(numbers, to_strict_json(timeline.to_dict(), indent=1) + "\n")
    return path


def values(timeline: Timeline) -> list[dict[str, Any]]:
    """Every number that is known: key, place, step, value."""
    return [
        {"key": key, "place": place, "step": step, "value": value}
        for key, data in timeline.maps.items()
        for place, numbers in zip(data.places, data.values, strict=True)
        for step, value in zip(data.steps, numbers, strict=True)
        if math.isfinite(value)
    ]


def draw(timeline: Timeline) -> list[Figure]:
    """The loss, and a heat map a quantity; those without numbers are left out."""
    found = [_losses(timeline)]
    for key, data in timeline.maps.items():
        found.append(
            heat_figure(
                data.values, [where(place) for place in data.places], data.steps,
                name=re.sub(r"\W+", "-", key.lower()).replace("_", "-"),
                title=f"{label(key)[0].upper()}{label(key)[1:]}",
                caption="A row a site, a column a measured step; empty where nothing was measured.",
                unit=label(key), labels=("optimiser step", "site, input at the top"),
                subject=timeline.name,
            )
        )  # fmt: skip
    return [figure for figure in found if figure is not None]


def _losses(timeline: Timeline) -> Figure | None:
    rows = series_rows(SERIES)

    def on(pen: Pen, axes: Any) -> None:
        (panel,) = axes
        for row, key in zip(rows.rows, ("loss", "held_out_loss"), strict=True):
            points = timeline.losses.get(key)
            if points and any(math.isfinite(y) for _, y in points):
                pen.line(panel, row, [float(x) for x, _ in points], [y for _, y in points],
                         markers=len(points) < 40)  # fmt: skip
        panel.set(xlabel="optimiser step", ylabel="loss (as logged)")
        ys = [y for line in panel.lines for y in line.get_ydata() if math.isfinite(y)]
        if panel in pen.panels and min(ys) > 0 and max(ys) > 20 * min(ys):
            log_scale(panel)

    both = render(rows, on, 1, name="loss", title="Loss", subject=timeline.name)
    if both is None:
        return None
    caption = "As the log has it, to see what happened when the inside changed; not from 0."
    return Figure(name="loss", title="Loss", caption=caption, svg=both[0], png=both[1])


def page_text(timeline: Timeline, figures: Sequence[Figure]) -> str:
    """The whole HTML text."""
    title = f"{timeline.name} over time"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(timeline.about)}.</p>",
        section("What moved most", listed(timeline.lines(), ordered=True)),
        section("Figures", "".join(map(figure_html, figures))),
        section("Every site", _moves(timeline)),
        section("What could not be measured", listed(timeline.missing)),
        section("What the numbers mean", glossary(GLOSSARY)),
    ]
    return document(title, parts, series_rows(SERIES).rows)


def _moves(timeline: Timeline) -> str:
    body = []
    for move in timeline.moves[:MAX_ROWS]:
        what = quantity(move["key"])
        assert what is not None, "only followed keys are mapped"
        body.append([
            word(where(move["place"])), word(label(move["key"])), number(move["moved"], ".3f"),
            number(move["first"], what.form), number(move["last"], what.form),
            number(move["smallest"], what.form), number(move["largest"], what.form),
            number(move["from_step"], ".0f"), number(move["to_step"], ".0f"),
            number(move["before"], what.form), number(move["after"], what.form),
        ])  # fmt: skip
    head = ["site", "quantity", "moved (orders of magnitude)", "first", "last", "smallest",
            "largest", "most from step", "to step", "before", "after"]  # fmt: skip
    number_left = len(timeline.moves) - len(body)
    note = (
        f"<p class=quiet>The {len(body):,} that moved most; {number_left:,} more are in the CSV "
        "file.</p>"
        if number_left else ""
    )  # fmt: skip
    return note + sortable(head, body)
