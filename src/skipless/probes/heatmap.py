"""One number of every site over training as a picture: sites down, steps across.

    heatmap("runs/theirs", "kurtosis.png")

Reads the probes.jsonl of any training: our own runs', or what `ProbeLog` wrote. Read by the CLI and
`skipless.report`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.errors import UserError, suggestion
from skipless.files import atomic_path
from skipless.rundir import PROBES, RunDir

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

    Keys are those of `Probe.table`, `geometry` and `attention`, "rms" of a site (from its mean and
    standard deviation), "gradient_norms" and "gains" (of channels the mean |gain|). Raises
    UserError for no rows and for a key that no row has.
    """
    rows = read_log(path)
    found = from_rows(rows, key)
    if found is None:
        known = sorted(known_keys(rows))
        raise UserError(f"no row of {path} has {key!r}; {suggestion(key, known, noun='key')}")
    return found


def known_keys(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every key that `from_rows` finds, in order of appearance."""
    return list(dict.fromkeys(k for row in rows for _, numbers in _entries(row) for k in numbers))


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Rows with a step of PATH/probes.jsonl, or of the file itself. Raises UserError for none."""
    path = Path(path)
    folder, name = (path.parent, path.name) if path.is_file() else (path, PROBES)
    table = [r for r in RunDir(folder).read_jsonl(name) if isinstance(r.get("step"), int)]
    if not table:
        raise UserError(
            f"{path} holds no measurement over time ({PROBES} with rows of steps); train with "
            "probe.every above 0, or with a ProbeLog"
        )
    return table


def from_rows(rows: Sequence[dict[str, Any]], key: str) -> OverTime | None:
    """The number `key` of rows of the form of probes.jsonl; None where no row has it."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for place, numbers in _entries(row):
            if key in numbers:
                found.setdefault(place, {})[row["step"]] = numbers[key]
    if not found:
        return None
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height_of(len(data.places))))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    paint(axes, data.values, data.places, data.steps, key.replace("_", " "))
    axes.set_title(f"{data.key.replace('_', ' ')} by site over training")
    axes.set(xlabel="optimiser step", ylabel="site, input at the top")
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
    return out


def height_of(num_places: int) -> float:
    """Inches of a figure with so many rows."""
    return 1.6 + 0.19 * min(num_places, MAX_LABELS)


def paint(
    axes: Any,
    values: Sequence[Sequence[float]],
    down: Sequence[Any],
    across: Sequence[Any],
    unit: str,
    *,
    centred: bool = False,
    low_is_red: bool = False,
) -> None:
    """Values [down][across] as coloured cells with a bar; NaN stays empty.

    A wide range is coloured by a signed logarithm, which the bar says. `centred` gives differences
    two colours that meet at 0: red above, or below if `low_is_red`.
    """
    import numpy as np
    from matplotlib.colors import Normalize, SymLogNorm

    table = np.array(values, dtype=float)
    known = table[np.isfinite(table)]
    size = np.abs(known)
    largest = float(size.max()) if size.size else 1.0
    typical = float(np.median(size[size > 0])) if (size > 0).any() else 0.0
    wide = typical > 0 and largest / typical > SIGNED_LOG
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    if centred:
        low, high = -(largest or 1.0), largest or 1.0
    norm = SymLogNorm(typical, vmin=low, vmax=high) if wide else Normalize(low, high)
    image = axes.imshow(
        table, aspect="auto", interpolation="nearest", norm=norm,
        cmap="viridis" if not centred else "RdBu" if low_is_red else "RdBu_r",
    )  # fmt: skip
    _ticks(axes.set_yticks, down, MAX_LABELS)
    _ticks(axes.set_xticks, across, 12)
    axes.tick_params(axis="y", labelsize=7)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label(unit + (" (signed logarithm)" if wide else ""))


def _ticks(put: Any, labels: Sequence[Any], most: int) -> None:
    stride = -(-len(labels) // most)
    # a dollar in a name would start a formula
    put(range(0, len(labels), stride), [str(x).replace("$", r"\$") for x in labels[::stride]])


def _entries(row: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """(place, its numbers) of one row of probes.jsonl."""
    found = []
    for table, label in TABLES.items():
        for entry in row.get(table) or ():
            numbers = {k: float(v) for k, v in entry.items()
                       if isinstance(v, (int, float)) and not isinstance(v, bool)}  # fmt: skip
            if {"mean", "std"} <= numbers.keys():
                numbers.setdefault("rms", math.hypot(numbers["mean"], numbers["std"]))
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
