"""The terminal: one console on stderr, one style of progress bar.

stdout belongs to results (tables, JSON), so that they can be piped; everything that tells how far
things are goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One plain line on stderr."""
    console.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the block says stays away: the caller says it."""
    was = console.quiet
    console.quiet = True
    try:
        yield
    finally:
        console.quiet = was


def make_progress(*, unit: str = "") -> Progress:
    """A rich Progress with bar, count, elapsed and remaining time, and a free text field."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not sys.stderr.isatty(),
    )


@contextlib.contextmanager
def progress(description: str, total: int, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show a bar for the block; yields `advance(n=1, note="")`.

    Off a terminal (a log file) it prints a line at the start and the end instead of a bar.
    """
    if not sys.stderr.isatty():
        say(f"{description} ({total} {unit})".replace(" )", ")"))
        yield lambda n=1, note="": None
        return
    with make_progress(unit=unit) as bar:
        task = bar.add_task(description, total=total, note="")
        yield lambda n=1, note="": bar.update(task, advance=n, note=note)
