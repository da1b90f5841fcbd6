"""The short table for the terminal. Read by the command line and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipless.report.cells import show
from skipless.report.comparing import compare
from skipless.report.load import load_runs
from skipless.report.tables import Comparison
from skipless.report.verdict import headline_schemes, verdict


def summary_table(comparison: Comparison) -> Any:
    """A rich Table: loss, gap, loss increase at the headline schemes, kurtosis, R_N."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    schemes = headline_schemes(comparison)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold")
    error = f"R_N {comparison.error_scheme}" if comparison.error_scheme else "R_N"
    for heading in ("held-out loss", "gap", *(f"+{s}" for s in schemes), "mean |g|", error):
        table.add_column(heading, justify="right", no_wrap=True)
    gaps = {pair.row.label: pair.gap for pair in comparison.pairs}
    for row in comparison.rows:
        error = "" if row.standard_error is None or row.diverged else f" ± {row.standard_error:.3f}"
        mark = f" (not finished: {row.unfinished})" if row.unfinished else ""
        table.add_row(
            Text(row.label + mark),  # Text, not str: a label in brackets is no markup
            show(row.loss) + (error if row.loss is not None else ""),
            show(gaps.get(row.label), "+.1%"),
            *(show(row.increase(s), "+.3f") for s in schemes),
            show(row.kurtosis, ".2f"),
            show(row.error, ".2f"),
        )
    return table


def print_table(run_dirs: Sequence[str | Path], *, file: Any = None) -> None:
    """Print the table and the verdict in short to stdout (or `file`).

    Columns with + are the loss increase in nats at block scope, mean |g| the pooled kurtosis of
    the middle third. Raises UserError for what is no run directory.
    """
    from rich.console import Console

    console = Console(file=file, highlight=False)
    if not console.is_terminal:  # a log file has no width to fit into
        console.width = 120
    comparison = compare(load_runs(run_dirs))
    console.print(summary_table(comparison))
    if counted := comparison.held_out_tokens:
        console.print(f"Held-out loss in nats, the mean over {counted} tokens.")
    for statement in verdict(comparison):
        if statement.topic == "In short":
            console.print(" ".join(statement.sentences), markup=False)
