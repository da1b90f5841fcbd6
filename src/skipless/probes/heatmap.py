"""One number of every site over training as a picture: sites down, steps across.

    heatmap("runs/theirs", "kurtosis.png")

Reads the probes.jsonl of any training: our own runs', or what `ProbeLog` wrote. Read by the CLI.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.errors import UserError, suggestion
from skipless.rundir import RunDir, atomic_path

PROBES = "probes.jsonl"
TABLES = {"sites": "site", "geometry": "module", "attention": "module"}
"""Lists of a row, and the key that names a place in each."""
MAX_LABELS = 60
SIGNED_LOG = 30.0
"""Largest over median absolute value from which on the colours follow a signed logarithm."""


@dataclass(frozen=True, kw_only=True)
class OverTime:
    """One number by place and step."""

    key: str
    places: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    """[place][step]; NaN where not measured."""


def over_time(path: str | Path, key: str = "kurtosis") -> OverTime:
    """The number `key` out of PATH/probes.jsonl (or the file itself), places in the model's order.

    Keys are those of `Probe.table`, `geometry` and `attention`, "gradient_norms" and "gains" (of
    channels the mean |gain|). Raises UserError for no rows and for a key that no row has.
    """
    path = Path(path)
    folder, name = (path.parent, path.name) if path.is_file() else (path, PROBES)
    table = [r for r in RunDir(folder).read_jsonl(name) if isinstance(r.get("step"), int)]
    if not table:
        raise UserError(
            f"{path} holds no measurement over time ({PROBES} with rows of steps); train with "
            "probe.every above 0, or with a ProbeLog"
        )
    found: dict[str, dict[int, float]] = {}
    known: set[str] = set()
    for row in table:
        for place, numbers in _entries(row):
            known |= numbers.keys()
            if key in numbers:
                found.setdefault(place, {})[row["step"]] = numbers[key]
    if not found:
        raise UserError(
            f"no row of {path} has {key!r}; {suggestion(key, sorted(known), noun='key')}"
        )
    steps = tuple(sorted({step for values in found.values() for step in values}))
    return OverTime(
        key=key, places=tuple(found), steps=steps,
        values=tuple(tuple(v.get(s, math.nan) for s in steps) for v in found.values()),
    )  # fmt: skip


def heatmap(path: str | Path, out: str | Path, key: str = "kurtosis") -> Path:
    """Draw `over_time(path, key)` as a PNG; returns the path written.

    A wide range is coloured by a signed logarithm, which the bar says. Raises UserError as
    `over_time` does, and for an `out` that does not end in .png.
    """
    out = Path(out)
    if out.suffix != ".png":
        raise UserError(f"{out} does not end in .png; a heat map is written as PNG")
    data = over_time(path, key)
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure

    values = np.array(data.values, dtype=float)
    known = np.abs(values[np.isfinite(values)])
    typical, largest = (float(np.median(known)), float(known.max())) if known.size else (0.0, 0.0)
    wide = typical > 0 and largest / typical > SIGNED_LOG
    norm = SymLogNorm(linthresh=typical, vmin=values[np.isfinite(values)].min(),
                      vmax=values[np.isfinite(values)].max()) if wide else None  # fmt: skip
    figure = Figure(figsize=(9, 1.6 + 0.19 * min(len(data.places), MAX_LABELS)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm)
    _label(axes, data)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(key.replace("_", " ") + (" (signed logarithm)" if wide else ""))
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    return out


def _label(axes: Any, data: OverTime) -> None:
    axes.set_title(f"{data.key.replace('_', ' ')} by site over training")
    axes.set(xlabel="optimiser step", ylabel="site, input at the top")
    _ticks(axes.set_yticks, data.places, MAX_LABELS)
    _ticks(axes.set_xticks, [str(step) for step in data.steps], 12)
    axes.tick_params(axis="y", labelsize=7)


def _ticks(put: Any, labels: Sequence[str], most: int) -> None:
    stride = -(-len(labels) // most)
    put(range(0, len(labels), stride), [str(label) for label in labels[::stride]])


def _entries(row: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """(place, its numbers) of one row of probes.jsonl."""
    found = []
    for table, label in TABLES.items():
        for entry in row.get(table) or ():
            numbers = {k: float(v) for k, v in entry.items()
                       if isinstance(v, (int, float)) and not isinstance(v, bool)}  # fmt: skip
            found.append((str(entry.get(label)), numbers))
    for key in ("gradient_norms", "gains"):
        for place, value in (row.get(key) or {}).items():
            size = _size(value)
            if size is not None:
                found.append((str(place), {key: size}))
    return found


def _size(value: Any) -> float | None:
    if isinstance(value, list):
        sizes = [s for v in value if (s := _size(v)) is not None]
        single = sizes[0] if len(sizes) == 1 else None
        return (
            single if single is not None else sum(map(abs, sizes)) / len(sizes) if sizes else None
        )
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
