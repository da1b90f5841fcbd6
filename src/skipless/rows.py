"""Several runs side by side: a process a row, as many at a time as there are cores.

Two small models in two processes of one thread use two cores better than one model on both. The
parent only starts the rows, reads the lines they append to metrics.jsonl and draws the progress.
Ctrl-C is passed on: each row saves a checkpoint, and the same command continues. Used by `demo` and
`sweep`.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from skipless.errors import UserError
from skipless.files import make_directory
from skipless.log import make_progress, say
from skipless.rundir import CONFIG, RunDir, json_row

MEASURE_SHARE = 0.15
"""Measuring a row takes about this share of training it (8 layers of width 128)."""
POLL_SECONDS = 0.3
MOST_BARS = 12
LINE_SECONDS = 20.0
"""Off a terminal a line of progress is printed this often."""


@dataclass
class Row:
    """One training process and how far it is."""

    recipe: str
    directory: Path
    num_steps: int
    arguments: tuple[str, ...] = ("--measure",)
    process: subprocess.Popen | None = None
    step: int = 0
    loss: float = float("nan")
    error: str = ""
    _offset: int = 0
    _inode: int = 0
    _partial: bytes = field(default=b"", repr=False)

    @property
    def log(self) -> Path:
        """What the process prints."""
        return self.directory.with_name(self.directory.name + ".log")

    def remove(self) -> None:
        """Delete the run all but its settings, by which the directory stays known as ours; not
        while a process holds it."""
        run = RunDir(self.directory)
        if run.path.is_dir() and run.is_ours():
            with run.lock():
                run.clear(keep=(CONFIG,))
        self.log.unlink(missing_ok=True)

    def start(self) -> None:
        """Start (or resume) the run in a process of its own."""
        command = [sys.executable, "-m", "skipless", "train", self.recipe,
                   "--out", str(self.directory), *self.arguments]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        make_directory(self.log.parent)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it once, through _stop
            )

    def read_progress(self) -> None:
        """Take in the lines appended since the last look."""
        try:
            with open(self.directory / "metrics.jsonl", "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._offset, self._partial = 0, b""  # rewritten or cut by a resume
                self._inode = found.st_ino
                file.seek(self._offset)
                text = self._partial + file.read()
                self._offset = file.tell()
        except OSError:  # not there yet, or just being replaced
            return
        *lines, self._partial = text.split(b"\n")
        for row in map(json_row, lines):  # a line that is damaged is no progress
            if row and "loss" in row and isinstance(row.get("step"), int):
                loss = row["loss"]
                self.step = row["step"]
                self.loss = loss if isinstance(loss, (int, float)) else float("nan")

    @property
    def shown_loss(self) -> str:
        """The loss for a line of progress; empty before the first."""
        return f"loss {self.loss:.3f}" if math.isfinite(self.loss) else ""

    @property
    def done(self) -> float:
        """Steps done, the measuring counted as further steps."""
        measured = sum((self.directory / f"{n}.json").exists() for n in ("eval", "quant", "probe"))
        return self.step + measured / 3 * MEASURE_SHARE * self.num_steps

    def finish(self) -> None:
        """Note why the process failed, if it did."""
        self.read_progress()
        if self.process is not None and self.process.returncode:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            self.error = lines[-1] if lines else f"exit code {self.process.returncode}"


def check_jobs(jobs: int | None) -> None:
    """Raise UserError for a number of processes below 1; to be called before texts are prepared."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1")


def train_rows(rows: list[Row], jobs: int | None = None) -> None:
    """Run all rows, `jobs` at a time (None: one a core, at most 4). Failures are noted in `error`,
    not raised."""
    check_jobs(jobs)
    jobs = max(1, min(4, os.cpu_count() or 1)) if jobs is None else jobs
    waiting, running = list(rows), []
    total = sum(row.num_steps * (1 + MEASURE_SHARE) for row in rows)
    last_line = time.monotonic()
    try:
        with make_progress(unit="steps") as bar:
            whole = bar.add_task(f"all {len(rows)} rows", total=round(total), note="")
            tasks = {}
            while waiting or running:
                while waiting and len(running) < jobs:
                    row = waiting.pop(0)
                    row.start()
                    running.append(row)
                    name = row.directory.name
                    tasks[name] = bar.add_task(name, total=row.num_steps, note="")
                time.sleep(POLL_SECONDS)
                for row in list(running):
                    row.read_progress()
                    note = "measuring" if row.step >= row.num_steps else row.shown_loss
                    task = tasks[row.directory.name]
                    bar.update(task, completed=row.step, note=note)
                    if row.process is not None and row.process.poll() is not None:
                        row.finish()
                        running.remove(row)
                        note = "failed" if row.error else "done"
                        # bars of many finished rows would push the running ones off the screen
                        bar.update(task, note=note, visible=len(rows) <= MOST_BARS)
                bar.update(whole, completed=round(sum(row.done for row in rows)))
                if bar.disable and time.monotonic() - last_line > LINE_SECONDS:
                    last_line = time.monotonic()
                    say(_line(rows, running, total))
    except KeyboardInterrupt:
        _stop(running)
        say("stopped; every row kept its last checkpoint")
        raise
    finally:
        _stop(running)  # whatever went wrong here: no row lives on unseen


def _line(rows: list[Row], running: list[Row], total: float) -> str:
    share = sum(row.done for row in rows) / total
    now = ", ".join(
        f"{row.recipe} {row.step}/{row.num_steps} {row.shown_loss}".rstrip() for row in running
    )
    return f"{share:4.0%}  {now}"


def _stop(running: list[Row]) -> None:
    """Let the rows save and end; whoever takes longer than 30 s is ended, and all are at once when
    interrupted again."""
    processes = [row.process for row in running if row.process is not None]
    try:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # saves like Ctrl-C, also where Ctrl-C is ignored (nohup)
        until = time.monotonic() + 30
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
