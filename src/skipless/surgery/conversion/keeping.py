"""The folder of a conversion: its record, its checkpoints, and what is in them.

    folder/convert.json       what was measured (results.py), written after every stage
    folder/checkpoint/        the weights a stage starts from; gone at the end
    folder/partial/           weights and optimiser within a stage that was interrupted
    folder/skipless-*, config.json     the model, for `load`

Read by `converting.py` and `stages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.errors import UserError
from skipless.files import remove
from skipless.rundir import CHECKPOINTS, LOCK, RunDir
from skipless.surgery.conversion.results import RECORD_FILE, Conversion, Stage
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.train import checkpoint
from skipless.train.checkpoint import Position
from skipless.train.distributed import World

__all__ = ["PARTIAL", "Keeper", "Progress", "check_folder", "keeping"]

PARTIAL = "partial"


@dataclass(kw_only=True)
class Progress:
    """What the work so far has cost, and the measurements of the stage that is under way."""

    tokens: int = 0
    seconds: float = 0.0
    """Over all resumptions."""
    norms: list[float] = field(default_factory=list)
    """Gradient norms of the stage's steps."""
    fitted: float | None = None
    """Held-out loss after the stage's fit."""


def check_folder(path: Path, config: ConversionConfig, source: dict[str, Any]) -> None:
    """Raise UserError unless `path` is free, or holds an unfinished conversion of these settings.

    Nothing is changed.
    """
    if not path.exists() or (path.is_dir() and not {p.name for p in path.iterdir()} - {LOCK}):
        return
    found = RunDir(path).read_json(RECORD_FILE) if path.is_dir() else None
    if found is None:
        raise UserError(f"{path} exists already; name a folder that does not")
    old = Conversion.from_dict(found, where=f"{path / RECORD_FILE}: ")
    if old.finished:
        raise UserError(
            f"{path} holds a finished conversion ({old.describe()}); name another folder"
        )
    before = {**old.settings.to_dict(), **old.source}
    after = {**config.to_dict(), **source}
    for key in after:
        if before.get(key) != after[key]:
            raise UserError(
                f"{path} holds a conversion with other settings ({key} is {before.get(key)!r} "
                f"there and {after[key]!r} here); continue it with its own, or name another folder"
            )


@contextmanager
def keeping(
    folder: str | Path | None, config: ConversionConfig, source: dict[str, Any]
) -> Iterator[Keeper]:
    """The Keeper of `folder`, held against other processes; of nothing without a folder.

    Raises UserError as `check_folder` does.
    """
    if folder is None:
        yield Keeper(None, config)
        return
    run = RunDir(folder)
    check_folder(run.path, config, source)
    made = not run.path.exists()
    with run.lock():
        check_folder(run.path, config, source)  # another process may have been here meanwhile
        try:
            yield Keeper(run, config)
        finally:
            if made and [entry.name for entry in run.path.iterdir()] == [LOCK]:
                with suppress(OSError):  # Windows does not remove what is open
                    remove(run.path)  # nothing was kept: a mistake was told first


class Keeper:
    """Writes and reads a conversion's folder; without one it keeps nothing."""

    def __init__(self, run: RunDir | None, config: ConversionConfig) -> None:
        self._run = run
        self._points = config.steps_per_stage + 1  # of a stage where a checkpoint may be

    @property
    def path(self) -> Path | None:
        """The folder."""
        return self._run.path if self._run is not None else None

    def record(self) -> Conversion | None:
        """What was measured in former calls; None at the first."""
        found = self._run.read_json(RECORD_FILE) if self._run is not None else None
        return None if found is None else Conversion.from_dict(found)

    def write(self, state: Conversion) -> None:
        """Replace the record."""
        if self._run is not None:
            self._run.write_json(RECORD_FILE, state.to_dict())

    def save(
        self,
        name: str,
        stage: int,
        done: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        rows: tuple[Stage, ...],
    ) -> None:
        """A checkpoint of `done` steps of a stage: CHECKPOINTS of its start, PARTIAL within it.

        One of a start outdates the other kind.
        """
        if self._run is None:
            return
        at = Position(
            step=stage * self._points + done, tokens=progress.tokens, seconds=progress.seconds,
            pending={"norms": progress.norms, "fitted": progress.fitted,
                     "stages": [row.to_dict() for row in rows]},
        )  # fmt: skip
        checkpoint.save(self._run / name, at, model, optimizer, World(), keep=1)
        if name == CHECKPOINTS:
            remove(self._run / PARTIAL)

    def newest(self, name: str) -> tuple[int, int] | None:
        """Stage and finished steps of the newest checkpoint; None where there is none."""
        found = checkpoint.found(self._run / name) if self._run is not None else []
        return divmod(int(found[0].name.rpartition("-")[2]), self._points) if found else None

    def restore(
        self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Progress, tuple[Stage, ...]]:
        """Read the newest checkpoint into model and optimiser; returns what else was saved."""
        assert self._run is not None, "`newest` found a checkpoint"
        at = checkpoint.restore(self._run / name, model, optimizer, World())
        assert at is not None, "`newest` found a checkpoint"
        progress = Progress(
            tokens=at.tokens, seconds=at.seconds, norms=at.pending["norms"],
            fitted=at.pending["fitted"],
        )  # fmt: skip
        return progress, tuple(Stage.from_dict(row) for row in at.pending["stages"])

    def clear(self) -> None:
        """Remove the checkpoints; the conversion is finished."""
        if self._run is not None:
            for name in (CHECKPOINTS, PARTIAL):
                remove(self._run / name)

    def how_to_go_on(self) -> str:
        """What is to be known after Ctrl-C."""
        if self._run is None:
            return "the conversion had no folder, so nothing was kept"
        return f"all is in {self._run.path}; the same command goes on from there"
