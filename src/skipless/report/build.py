"""Run directories in, one report out: HTML, JSON and PNG files, each written atomically.

Reads files only and never a model, so a report can be made on another machine than the runs, while
they still train, or from parts. Start here to follow a report through the room:
load -> tables -> verdict, plots -> html.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from skipless.errors import UserError
from skipless.files import to_strict_json, write_atomic
from skipless.jsonable import parse_json, read_text
from skipless.report.comparing import compare
from skipless.report.html import machine, page
from skipless.report.load import load_runs
from skipless.report.plots import draw_all
from skipless.report.verdict import verdict
from skipless.report.zero_shot import task_numbers
from skipless.rundir import CONFIG, RunDir

TITLE = "Transformers with and without skip connections"


def build_report(
    run_dirs: Sequence[str | Path], out_html: str | Path, *, title: str = TITLE
) -> Path:
    """Compare run directories in one self-contained HTML file and return its path.

    Beside `report.html` go `report.json` (every number of the tables) and `report-NAME.png`, one a
    figure; the HTML is written last. Runs that differ in nothing but the seed become one row.
    Missing parts of a run are named in the report. Raises UserError for what is no run directory,
    for an `out_html` that is no .html file or would land among the files of a run, and when the
    disk refuses.
    """
    out = check_out(out_html)
    runs = load_runs(run_dirs)
    comparison = compare(runs)
    statements = verdict(comparison)
    figures, without = draw_all(comparison)
    command = shlex.join(["skipless", "report", *(str(r.path) for r in runs), "--out", str(out)])
    numbers = {
        "title": title,
        "verdict": [asdict(s) for s in statements],
        **comparison.to_dict(),
        "tasks": {row.label: found for row in comparison.rows if (found := task_numbers(row))},
        "figures": [f.name for f in figures],
        "figures_without_numbers": without,
        "machines": {str(run.path): machine(run) for run in runs},
        "command": command,
    }
    for figure in figures:
        write_atomic(out.with_name(f"{out.stem}-{figure.name}.png"), figure.png)
    write_atomic(out.with_suffix(".json"), to_strict_json(numbers, indent=1) + "\n")
    text = page(comparison, statements, figures, without, title=title, command=command)
    return write_atomic(out, text)


def check_out(out_html: str | Path) -> Path:
    """`out_html` as a path. Raises UserError where writing the report would replace other files."""
    out = Path(out_html)
    if out.suffix != ".html" or out.is_dir():
        raise UserError(
            f"the report is to be written to {str(out_html)!r}; give a file that ends in .html, "
            "such as report.html"
        )
    for folder in out.resolve().parents:
        if (folder / CONFIG).exists() and RunDir(folder).is_ours():
            raise UserError(
                f"{out} is inside the run directory {folder}; write the report beside it, for "
                f"example to {folder.parent / 'report.html'}"
            )
    beside = out.with_suffix(".json")
    if beside.exists() and not _is_report(beside):
        raise UserError(
            f"{beside} would be replaced by the numbers of the report and is not one of ours; "
            "give the report another name"
        )
    return out


def _is_report(path: Path) -> bool:
    try:
        numbers = parse_json(read_text(path), where=str(path))
    except UserError:
        return False
    kinds = {"verdict", "figures", "command"}, {"maps", "moves", "losses"}
    return isinstance(numbers, dict) and any(kind <= numbers.keys() for kind in kinds)
