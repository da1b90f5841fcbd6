"""The files of a report, each written under a temporary name and renamed.

    diagnosis.json    every number, written last: a folder that has it is finished
    sites.csv         a line a site; layers.csv, weights.csv, alternatives.csv alike
    NAME.png          the figures
    index.html        one page that needs no other file

Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipless.diagnose.page import page
from skipless.diagnose.parts import RESULT
from skipless.diagnose.plots import draw
from skipless.diagnose.result import Diagnosis
from skipless.files import to_strict_json, write_atomic
from skipless.report.csv_text import csv_text
from skipless.report.plots import Figure

PAGE = "index.html"


def write(result: Diagnosis, out: Path) -> Path:
    """Write all files into the folder `out`; returns the page's path."""
    figures, without = draw(result)
    text = page(result, figures, without)
    return write_files(out, RESULT, figures, tables(result), text, result.to_dict())


def write_files(
    out: Path, name: str, figures: Sequence[Figure], tables: dict[str, list[dict[str, Any]]],
    text: str, numbers: dict[str, Any],
) -> Path:  # fmt: skip
    """Figures, tables that have rows, the page and all numbers under `name`, which comes last and
    so tells that the folder is whole; returns the page's path."""
    for figure in figures:
        write_atomic(out / f"{figure.name}.png", figure.png)
    for title, rows in tables.items():
        if rows:
            write_atomic(out / f"{title}.csv", csv_text(rows))
    path = write_atomic(out / PAGE, text)
    write_atomic(out / name, to_strict_json(numbers, indent=1) + "\n")
    return path


def tables(result: Diagnosis) -> dict[str, list[dict[str, Any]]]:
    """The flat tables: numbers by scheme get a column a scheme, lists and nested parts are cut to
    what fits a cell."""
    return {
        "sites": [_site(row) for row in result.sites],
        "weights": [_flat(row, ("remedies",)) for row in result.weights],
        "layers": result.layers,
        "alternatives": result.alternatives,
        "depth": result.depth,
        "attention": [_flat(row, ("entropy_per_head",)) for row in result.attention],
        "gradients": (result.gradients or {}).get("sites", []),
        "weight_gradients": (result.gradients or {}).get("weights", []),
    }


def _site(row: dict[str, Any]) -> dict[str, Any]:
    found = row["anatomy"]
    flat = _flat(row, ("anatomy", "remedies", "remedy"))
    for key, value in found.items():
        if not isinstance(value, list):
            flat[key] = value
    flat["outlier_channels"] = " ".join(str(c["channel"]) for c in found.get("channels", []))
    flat["outlier_tokens"] = " ".join(
        f"{t['sequence']}:{t['position']}" for t in found.get("tokens", [])
    )
    for scheme, remedy in row["remedy"].items():
        flat[f"remedy {scheme}"] = None if remedy is None else remedy["remedy"]
        flat[f"remedy gain {scheme}"] = None if remedy is None else remedy["gain"]
    return flat


def _flat(row: dict[str, Any], leave: Sequence[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key in leave:
            continue
        if isinstance(value, dict):
            flat |= {f"{key} {inner}": number for inner, number in value.items()}
        else:
            flat[key] = value
    return flat
