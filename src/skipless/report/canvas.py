"""The frame around every figure: colours, canvas, legend, and SVG that fits into a page.

Figures are drawn without pyplot and its global state. Each is drawn twice, as PNG in light colours
on white, and as SVG in stand-in colours that become CSS variables (style.py), so that the page's
figures follow light and dark mode. Read by plots.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from skipless.report.load import RunData
from skipless.report.measures import Curve
from skipless.report.style import INK, Look, looks, stand_ins
from skipless.report.tables import Comparison, Row

WIDTH, HEIGHT = 9.4, 3.7  # inches of a figure with two panels
ALPHA_SEEDS = 0.55  # further seeds of a row are drawn thinner


@dataclass(frozen=True)
class Series:
    """A line that stands for no run: a label, a family of colours, a stroke by name."""

    label: str
    family: str
    optimizer: str


def series_rows(series: Sequence[Series]) -> Comparison:
    """Series as the rows of a comparison: the canvas reads label, family and stroke of each."""
    return Comparison(rows=cast("tuple[Row, ...]", tuple(series)), pairs=(), caveats=())


class Pen:
    """Draws rows on axes in their colours; remembers which rows appeared, and that anything did."""

    def __init__(self, comparison: Comparison, colours: dict[str, str]) -> None:
        self.comparison = comparison
        self.colours = colours  # CSS variable -> colour to draw with
        self.looks = looks(comparison.rows)
        self.drawn: dict[str, Look] = {}
        self.panels: set[Any] = set()
        self.yardsticks: dict[str, Any] = {}

    def color(self, look: Look) -> str:
        return self.colours[look.variable]

    def curves(
        self,
        axes: Any,
        of: Callable[[RunData], Curve],
        *,
        markers: bool = True,
        alpha: float = 1.0,
        width: float = 1.7,
    ) -> None:
        """One line a run; seeds of a row share its colour."""
        for row in self.comparison.rows:
            for index, run in enumerate(row.runs):
                xs, ys = of(run)
                if not any(map(math.isfinite, ys)):
                    continue
                first = index == 0
                self.line(
                    axes,
                    row,
                    xs,
                    ys,
                    markers=markers,
                    width=width if first else width / 2,
                    alpha=alpha if first else alpha * ALPHA_SEEDS,
                )

    def line(
        self,
        axes: Any,
        row: Row,
        xs: list[float],
        ys: list[float],
        *,
        markers: bool = True,
        alpha: float = 1.0,
        width: float = 1.7,
    ) -> None:
        """One line of one row; not-finite values are gaps."""
        look = self.looks[row.label]
        self.drawn[row.label] = look
        self.panels.add(axes)
        axes.plot(
            xs,
            ys,
            color=self.color(look),
            linestyle=look.line,
            linewidth=width,
            alpha=alpha,
            marker=look.marker if markers else None,
            markersize=4.2,
            markeredgewidth=0,
            solid_capstyle="round",
        )

    def yardstick(self, axes: Any, level: float, name: str) -> None:
        """A quiet level line, named in the legend after the rows."""
        color = self.colours["--quiet"]
        self.yardsticks[name] = axes.axhline(level, color=color, linewidth=1.2, linestyle=":")


def render(
    comparison: Comparison,
    draw: Callable[[Pen, Any], None],
    num_panels: int,
    *,
    name: str,
    title: str,
    subject: str = "",
    height: float = HEIGHT,
) -> tuple[str, bytes] | None:
    """(SVG text for a page, PNG bytes) of what `draw(pen, axes)` draws; None if it drew nothing.

    The page has title and `subject`, which model is shown, in its text; a PNG is passed on alone
    and has both on top. `height` in inches, without title and legend.
    """
    above = title if not subject else f"{title}: {_cut(subject, 60)}"
    light = {f"--{ink}": both[0] for ink, both in INK.items()}
    light |= {look.variable: look.light for look in looks(comparison.rows).values()}
    png = _draw(comparison, draw, num_panels, light, "png", height, above)
    if png is None:
        return None
    colours = stand_ins(comparison.rows)
    svg = _draw(comparison, draw, num_panels, colours, "svg", height)
    assert svg is not None, f"{name} was drawn once already"
    return _inline(svg.decode(), name, title, colours), png


def _draw(
    comparison: Comparison,
    draw: Callable[[Pen, Any], None],
    panels: int,
    colours: dict[str, str],
    form: str,
    height: float,
    title: str = "",
) -> bytes | None:
    """Draw on a fresh canvas, without pyplot and its global state. None: nothing to show."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    ink, grid = colours["--ink"], colours["--grid"]
    settings: dict[Any, Any] = {  # matplotlib lists its hundreds of keys as one literal type
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.edgecolor": grid,
        "xtick.color": grid,
        "ytick.color": grid,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "axes.grid": True,
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "svg.fonttype": "path",
        "svg.hashsalt": "skipless",
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots(1, panels, squeeze=False)[0]
        pen = Pen(comparison, colours)
        draw(pen, axes)
        if not pen.panels:
            return None
        _tidy(canvas, [panel for panel in axes if panel in pen.panels], axes)
        _legend(canvas, pen, height)
        if title:
            canvas.set_size_inches(WIDTH, canvas.get_figheight() + 0.3)
            canvas.suptitle(_plain_text(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        buffer = io.BytesIO()
        options = {"dpi": 160, "facecolor": "white"} if form == "png" else {"transparent": True}
        canvas.savefig(buffer, format=form, **options)
        return buffer.getvalue()


def _tidy(canvas: Any, used: list[Any], axes: Any) -> None:
    """Take away panels without a line, give the others the width; layers are whole numbers."""
    from matplotlib.gridspec import GridSpec
    from matplotlib.ticker import MaxNLocator

    for panel in axes:
        if panel not in used:
            canvas.delaxes(panel)
    if len(used) < len(axes):
        grid = GridSpec(1, len(used), figure=canvas)
        for index, panel in enumerate(used):
            panel.set_subplotspec(grid[index])
    for panel in used:
        locator = panel.xaxis.get_major_locator()
        if "layer" in panel.get_xlabel() and isinstance(locator, MaxNLocator):
            locator.set_params(integer=True)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _plain_text(text: str) -> str:
    """Without what matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def _legend(canvas: Any, pen: Pen, height: float) -> None:
    from matplotlib.lines import Line2D

    order = [row.label for row in pen.comparison.rows if row.label in pen.drawn]
    handles = [
        Line2D(
            [],
            [],
            color=pen.color(look),
            linestyle=look.line,
            marker=look.marker,
            markersize=4.2,
            markeredgewidth=0,
            linewidth=1.7,
        )
        for look in map(pen.drawn.__getitem__, order)
    ]
    labels = [_plain_text(_cut(label, 44)) for label in order]
    handles += pen.yardsticks.values()
    labels += pen.yardsticks
    if not labels:
        return
    columns = min(len(labels), 4 if max(map(len, labels)) <= 30 else 3)
    rows = -(-len(labels) // columns)
    canvas.set_size_inches(WIDTH, height + 0.19 * rows)
    canvas.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        handlelength=3.4,
        columnspacing=1.8,
    )


def _inline(svg: str, name: str, title: str, colours: dict[str, str]) -> str:
    """Make an SVG fit to stand in a page: no header, own ids, CSS variables, a name to read out."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    for variable, colour in colours.items():
        svg = svg.replace(colour, f"var({variable})")
    head = f'<svg role="img" aria-label="{title}" '
    svg = re.sub(r'<svg width="[^"]*" height="[^"]*" ', head, svg, count=1)
    svg = re.sub(r'<svg height="[^"]*" ', head, svg, count=1)
    return re.sub(r"\n\s*", "\n", svg)
