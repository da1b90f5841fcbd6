"""How a row looks in every figure: hue by connection, line and marker by optimiser.

Residual rows are warm, residual-free rows cool, mixed ones grey-green; the two hue families differ
for every common colour blindness (orange against blue). Colours come in a light and a dark
version: an SVG is drawn in stand-in colours that are replaced by CSS variables, so the page
follows the reader's light or dark mode; a PNG is drawn in the light ones on a white ground.
Read by plots and html.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipless.report.load import RESIDUAL, RESIDUAL_FREE
from skipless.report.tables import Row

# (light, dark) by family, in the order the rows take them; checked for 3:1 contrast on the page's
# grounds (#ffffff, #14171c).
PALETTE = {
    RESIDUAL: (
        ("#c2570c", "#ff9a4d"),
        ("#8f2d1d", "#ff7d6b"),
        ("#b07d00", "#f2c14e"),
        ("#a63d6a", "#ff8fb8"),
        ("#6b4423", "#d9a679"),
        ("#d1495b", "#ffb3a7"),
    ),
    RESIDUAL_FREE: (
        ("#1f5fbf", "#74a9ff"),
        ("#00818f", "#4fd4e3"),
        ("#5b3fb5", "#b3a1ff"),
        ("#3b8fd6", "#a9d2ff"),
        ("#0b3d91", "#8fb8ff"),
        ("#3f7f8c", "#8ee0d8"),
    ),
    "mixed": (
        ("#4d7a3a", "#9fd486"),
        ("#6b6b6b", "#b8b8b8"),
        ("#7d8a2e", "#d3de7a"),
        ("#9a5fb0", "#d9a8ec"),
        ("#0f7f6b", "#5fd9c1"),
        ("#a85a3a", "#f0b090"),
        ("#3d6f8e", "#97cbe8"),
        ("#2f7d32", "#7fdc84"),
        ("#8a6d00", "#e6cf6a"),
        ("#5a5f2c", "#c0c78a"),
        ("#c04a86", "#ff9ccb"),
        ("#7a5c8e", "#c9b2dd"),
    ),
}

# (dashes or line style, marker) by optimiser.
STROKES = {
    "AdamW": ((0, (1.2, 1.4)), "s"),
    "KL-Shampoo": ("-", "o"),
    "Muon": ((0, (5, 2)), "^"),
    "SOAP": ((0, (6, 1.5, 1, 1.5)), "D"),
    "Shampoo": ((0, (3, 1, 1, 1, 1, 1)), "v"),
    "KL-SOAP": ((0, (9, 2)), "P"),
}

# Stand-ins for ink, quiet ink, grid, band: colours no palette uses, each a CSS variable.
INK = {
    "ink": ("#1c2127", "#e6e9ee"),
    "quiet": ("#5d6672", "#9aa4b2"),
    "grid": ("#dfe3e8", "#323842"),
    "band": ("#eef1f5", "#1f242c"),
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colour pair, line and marker of one row, and its CSS variable."""

    light: str
    dark: str
    variable: str
    line: Any
    """What matplotlib takes as linestyle."""
    marker: str


def looks(rows: Sequence[Row]) -> dict[str, Look]:
    """{row label: Look}; rows of a family take its colours in order, round and round."""
    taken: dict[str, int] = {}
    found = {}
    for index, row in enumerate(rows):
        shades = PALETTE[row.family]
        light, dark = shades[taken.get(row.family, 0) % len(shades)]
        taken[row.family] = taken.get(row.family, 0) + 1
        line, marker = STROKES.get(row.optimizer, ("-", "o"))
        found[row.label] = Look(
            light=light, dark=dark, variable=f"--row-{index}", line=line, marker=marker
        )
    return found


def stand_ins(rows: Sequence[Row]) -> dict[str, str]:
    """{CSS variable: a colour used nowhere else} for drawing SVGs that follow the page."""
    names = [f"--{name}" for name in INK] + [look.variable for look in looks(rows).values()]
    return {name: f"#0{index + 256:03x}f3" for index, name in enumerate(names)}


def css_variables(rows: Sequence[Row]) -> tuple[str, str]:
    """Declarations of all colours, (light, dark), for the page's stylesheet."""
    pairs = [(f"--{name}", *both) for name, both in INK.items()]
    pairs += [(look.variable, look.light, look.dark) for look in looks(rows).values()]
    light = "".join(f"{name}:{value};" for name, value, _ in pairs)
    dark = "".join(f"{name}:{value};" for name, _, value in pairs)
    return light, dark
