"""The main job from end to end: prepare, train every row, measure, report."""

from __future__ import annotations

import time
from pathlib import Path

from skipless import recipes
from skipless.config import RunConfig
from skipless.errors import UserError
from skipless.log import say
from skipless.rows import Row, check_jobs, train_rows


def run_demo(
    *, fast: bool = False, fresh: bool = False, out: str | None = None, jobs: int | None = None
) -> Path:
    """Run (or resume) the demo and return the path of the report.

    `jobs` rows train at a time (None: one a core, at most 4). Raises UserError when every row
    failed; single failures are told and left out of the report.
    """
    from skipless.recipes.demo import FAST_ROWS, ROWS
    from skipless.report.build import check_out

    check_jobs(jobs)  # before --fresh takes anything away
    base = Path(out or ("runs/demo-fast" if fast else "runs/demo"))
    names = FAST_ROWS if fast else ROWS
    began = time.monotonic()
    check_out(base / "report.html")
    rows = [Row(name, base / name, recipes.get(name).train.num_steps) for name in names]
    if fresh:
        for row in rows:
            row.remove()
    prepare_data(recipes.get(names[0]))
    # The last row, whose optimiser takes the published steps, takes longest: begun last, it would
    # leave the other cores idle.
    train_rows(rows[-1:] + rows[:-1], jobs)
    failed = [row for row in rows if row.error]
    for row in failed:
        say(f"{row.recipe} failed: {row.error} (log: {row.log})")
    if len(failed) == len(rows):
        raise UserError(f"no row of the demo finished; the first said: {failed[0].error}")

    from skipless.report import build_report, print_table

    good = [row.directory for row in rows if not row.error]
    report = build_report(good, base / "report.html")
    print_table(good)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"\n{report}  ({minutes} min {seconds} s)")
    return report


def prepare_data(config: RunConfig) -> None:
    """Download and tokenise once, before the rows look for it side by side."""
    from skipless.data import prepare

    data = prepare(config.data, config.model.vocab_size)
    if data.fallback_reason:
        say(f"NOTE: {data.fallback_reason}")
    for note in data.notes:
        say(f"NOTE: {note}")
