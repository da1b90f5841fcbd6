"""Checkpoints: one mechanism (torch.distributed.checkpoint) for one process and many.

    checkpoint/step-00000100/
        __0_0.distcp ...  tensors: "model.<name>" and "optimizer.<parameter name>.<key>"
        .metadata         shapes and offsets of every tensor, by torch
        state.json        step, tokens, seconds; the optimiser's settings and everything in its
                          state that is no tensor
        manifest.json     size and CRC-32 of every file

A checkpoint is written under a temporary name and renamed when complete, so a folder called
`step-*` is whole or was damaged later; the manifest tells. Restoring starts with the newest and
goes back to the one before if it is damaged, saying so. Sharded tensors are kept by their global
shape. Read by loop.py and load.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from skipless.errors import UserError, first_line
from skipless.files import remove, write_atomic
from skipless.log import say
from skipless.train.distributed import World
from skipless.train.manifest import (
    MANIFEST,
    METADATA,
    STATE,
    checksums,
    read_object,
    verify,
)
from skipless.train.states import (
    empty_slots,
    group_settings,
    load_optimizer,
    model_tensors,
    optimizer_state,
)

UNUSABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError,
)  # fmt: skip
"""What reading a damaged checkpoint may raise; not KeyboardInterrupt, nor want of memory."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come, and what its loop still owes."""

    step: int = 0
    """Finished optimiser steps."""
    tokens: int = 0
    seconds: float = 0.0
    """Training time so far, over all resumptions."""
    pending: dict[str, Any] = field(default_factory=dict)
    """Measurements of the last step that cannot be repeated from the weights alone."""


def found(directory: str | Path) -> list[Path]:
    """All checkpoints in `directory`, newest first."""
    return sorted(Path(directory).glob("step-*"), reverse=True)


def save(
    directory: str | Path,
    position: Position,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    keep: int,
) -> Path:
    """Write one checkpoint, then delete all but the newest `keep`. Every rank must call it.

    Raises UserError when the disk refuses; earlier checkpoints are then untouched.
    """
    directory = Path(directory)
    final = directory / f"step-{position.step:08d}"
    temporary = directory / f".step-{position.step:08d}.tmp"
    try:
        world.first(lambda: _make_empty(temporary))
        tensors, skeletons = optimizer_state(model, optimizer)
        with _quiet():
            dcp.save(
                {**model_tensors(model), **tensors},
                checkpoint_id=temporary,
                no_dist=not world.is_distributed,
            )
        merged: dict[str, Any] = {}
        for name, part in (item for p in world.gather(skeletons) for item in p.items()):
            # A whitened matrix has its state on one rank and a bare step count on the others.
            merged[name] = {**merged.get(name, {}), **part}
        state = {
            "step": position.step,
            "tokens": position.tokens,
            "seconds": position.seconds,
            "pending": position.pending,
            "world_size": world.size,
            "optimizer": {"groups": group_settings(model, optimizer), "parameters": merged},
        }
        mine = world.agree(lambda: checksums(temporary.glob(f"__{world.rank}_*")))
        sums = {name: s for part in world.gather(mine) for name, s in part.items()}
        world.first(lambda: _complete(temporary, final, state, sums))
    except BaseException as error:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _translated(error, final) from error
    world.first(lambda: _prune(directory, keep))
    return final


def restore(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
) -> Position | None:
    """Load the newest usable checkpoint into `model` and `optimizer` (None: model only).

    Returns its Position, or None when there is no checkpoint. A damaged one is reported and the
    one before is taken. Raises UserError when there are some and none can be read.
    """
    folders = world.first(lambda: found(directory))
    for folder in folders:
        try:
            world.first(lambda folder=folder: verify(folder))
            state = world.first(lambda folder=folder: read_object(folder / STATE))
            position = _position(state)
            world.agree(lambda f=folder, s=state: _read(f, s, model, optimizer, world))
        except UNUSABLE as error:
            if world.is_main:
                say(f"checkpoint {folder} cannot be used ({error}); trying the one before")
            continue
        return position
    if folders:
        raise UserError(
            f"none of the {len(folders)} checkpoints in {directory} can be read; restore one from "
            "a copy or start anew with --fresh"
        )
    return None


def read_model(folder: str | Path, model: nn.Module) -> Position:
    """Load the weights of this one checkpoint into `model`. Raises UserError if it is damaged."""
    folder = Path(folder)
    try:
        verify(folder)
        state = read_object(folder / STATE)
        position = _position(state)
        _read(folder, state, model, None, World())
    except UNUSABLE as error:
        raise UserError(f"checkpoint {folder} cannot be used ({error}); take another") from None
    return position


def _read(
    folder: Path,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
) -> None:
    """Load one checkpoint in place."""
    wanted = model_tensors(model)
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    absent = sorted(set(wanted) - set(stored))
    if absent:
        raise RuntimeError(f"it lacks {absent[0]} and {len(absent) - 1} more")
    slots: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        slots = empty_slots(stored, state["optimizer"]["parameters"], model, optimizer)
    with _quiet():
        try:
            dcp.load({**wanted, **slots}, checkpoint_id=folder, no_dist=not world.is_distributed)
        except BaseException as error:
            cause = _cause(error)
            raise RuntimeError(f"{type(cause).__name__}: {cause}") from error
    if optimizer is not None:
        load_optimizer(state["optimizer"], slots, model, optimizer)


def _make_empty(folder: Path) -> None:
    for stale in folder.parent.glob(".step-*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(parents=True)


def _complete(temporary: Path, final: Path, state: dict[str, Any], sums: dict[str, Any]) -> None:
    """Add the two JSON files and give the folder its real name."""
    write_atomic(temporary / STATE, json.dumps(state))
    sums |= checksums([temporary / METADATA, temporary / STATE])
    write_atomic(temporary / MANIFEST, json.dumps(sums, indent=1))
    remove(final)  # a damaged one of the same step that restore() passed over
    temporary.rename(final)


def _prune(directory: Path, keep: int) -> None:
    for old in found(directory)[max(1, keep) :]:
        with contextlib.suppress(OSError):
            remove(old)


def _position(state: dict[str, Any]) -> Position:
    numbers = [state.get(key) for key in ("step", "tokens", "seconds")]
    whole = all(isinstance(n, int) and n >= 0 for n in numbers[:2])
    if not whole or not isinstance(numbers[2], (int, float)):
        raise RuntimeError(f"its {STATE} does not tell how far it is")
    if not isinstance(state.get("pending"), dict):
        raise RuntimeError(f"its {STATE} lacks what the last step left")
    return Position(**{k: state[k] for k in ("step", "tokens", "seconds", "pending")})


def _cause(error: BaseException) -> BaseException:
    """The first real failure inside torch's CheckpointException, else the error itself."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _translated(error: BaseException, final: Path) -> BaseException:
    """A failure to write as one sentence; interrupts and user errors stay what they are."""
    cause = _cause(error)
    if isinstance(cause, (OSError, RuntimeError)):
        seen: BaseException | None = cause
        while seen is not None and not getattr(seen, "strerror", None):
            seen = seen.__cause__ or seen.__context__  # torch's writer fails once more on closing
        reason = getattr(seen, "strerror", None) or first_line(cause)
        return UserError(
            f"cannot write checkpoint {final}: {reason}; earlier checkpoints are untouched, so "
            "free space and run the same command again to resume"
        )
    return cause


@contextlib.contextmanager
def _quiet():
    """Silence torch's notes about single-process saving and its own deprecations."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message=".*torch.distributed.*")
        yield
