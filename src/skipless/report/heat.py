"""Heat maps for pages: a table of numbers as coloured cells, on the canvas of the report.

Read by timeline_page and by `skipless.diagnose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from skipless.report.canvas import Pen, render
from skipless.report.plots import Figure
from skipless.report.tables import Comparison


def heat_figure(
    values: Sequence[Sequence[float]],
    down: Sequence[Any],
    across: Sequence[Any],
    *,
    name: str,
    title: str,
    caption: str,
    unit: str,
    labels: tuple[str, str],
    subject: str = "",
    centred: bool = False,
    low_is_red: bool = False,
) -> Figure | None:
    """Values [down][across] as a figure; None where none is finite.

    `labels` are those of the axes (across, down), `unit` that of the bar; `subject` as in `render`.
    `centred`: differences, in two colours that meet at 0 (`paint`). Cells without a number stay
    empty.
    """
    from skipless.probes.heatmap import height_of, paint

    if not any(math.isfinite(value) for row in values for value in row):
        return None

    def on(pen: Pen, axes: Any) -> None:
        (panel,) = axes
        pen.panels.add(panel)
        panel.grid(False)
        paint(panel, values, down, across, unit, centred=centred, low_is_red=low_is_red)
        panel.set(xlabel=labels[0], ylabel=labels[1])

    rows = Comparison(rows=(), pairs=(), caveats=())
    both = render(rows, on, 1, name=name, title=title, subject=subject, height=height_of(len(down)))
    assert both is not None, "a panel was added"
    return Figure(name=name, title=title, caption=caption, svg=both[0], png=both[1])
