"""Patched models to disk: `save_pretrained`. `loading.py` reads what is written here.

A patched folder holds what transformers writes, under names that only `load` looks for: weights as
`skipless-*.safetensors` and a config of model type `skipless-patched`. transformers would read the
usual names, drop the connections with a mere warning and return a model that computes something
else; with these, every plain `from_pretrained` (Auto classes or the model's own) stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from skipless.errors import UserError
from skipless.locking import try_lock
from skipless.outputs import staging_folder
from skipless.surgery.records import RECORD, connections, record
from skipless.surgery.rewriting import namesake, reducer

__all__ = ["INDEX", "MODEL_TYPE", "PREFIX", "is_pretrained", "save_pretrained", "saving_class"]

MODEL_TYPE = "skipless-patched"
PREFIX = "skipless-"
INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model*.safetensors", INDEX)
_PATIENCE = 600.0  # seconds that one process waits for another's renaming


def save_pretrained(model: nn.Module, directory: str | os.PathLike, **options: Any) -> Path:
    """Write a patched model so that `load` restores it; returns the folder.

    `options` are those of transformers' `save_pretrained`. `model.save_pretrained(directory)` does
    the same (so Trainer's checkpoints do). Raises UserError for a model that is not patched, for a
    folder that holds an unpatched model, for `push_to_hub` (upload the folder instead), and when
    the disk refuses; what was in the folder is then untouched.
    """
    if not connections(model):
        raise UserError(
            f"{type(model).__name__} is not patched; its own save_pretrained is all it needs"
        )
    save = getattr(model, "save_pretrained", None)
    if save is None:
        name, inner = type(model).__name__, getattr(model, "module", None)
        hint = (
            "the model inside (model.module)"
            if hasattr(inner, "save_pretrained")
            else "its state_dict"
        )
        raise UserError(f"{name} is no transformers model; save {hint}")
    save(directory, **options)
    return Path(directory)


def save_patched(
    model: Any,
    plain_save: Callable[..., None],
    directory: str | os.PathLike,
    *args: Any,
    **options: Any,
) -> None:
    """What `model.save_pretrained` runs while patched; arguments as transformers', whose own
    method is `plain_save`. Every rank of a sharded model calls it; one of them writes."""
    if not str(directory).strip():
        raise UserError("the folder to save to is empty; name one, such as 'patched'")
    target = Path(directory)
    if options.pop("push_to_hub", False):
        raise UserError("a patched model is not pushed while saving; save it, upload the folder")
    if options.get("distributed_checkpoint"):
        raise UserError("a patched model is saved as safetensors only; leave out "
                        "distributed_checkpoint")  # fmt: skip
    rows = record(model)
    recorded = getattr(model.config, RECORD, None)
    if recorded is not None and _count(recorded) != _count(rows):
        raise UserError(
            f"model.config.{RECORD} names other connections than the model has: half of a patch "
            "was lost; unpatch(model) and patch again"
        )
    plain = [path for pattern in _WEIGHTS for path in target.glob(pattern)]
    if plain:
        raise UserError(
            f"{plain[0]} belongs to an unpatched model, which would be loaded instead of the "
            "patched one; save to another folder"
        )
    # The original format renames by patterns ("mlp." in Mixtral) that would catch "mlp_connection".
    options["save_original_format"] = False
    present = target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with staging_folder(target) as staging:
            plain_save(model, staging, *args, **options)
            if (staging / "config.json").is_file():
                _mark(staging, rows)
                with _alone(target):
                    _move(staging, target)
    except BaseException as error:
        if not present:
            with contextlib.suppress(OSError):
                target.rmdir()  # made for nothing; stays if another process writes into it
        if isinstance(error, RuntimeError) and "shared tensors" in str(error):
            names = " and ".join(sorted(re.findall(r"'([^']+)'", str(error).split("]")[0])))
            raise UserError(
                f"the model cannot be saved: {names} are one tensor, which its class does not "
                "declare as tied, so transformers refuses; give each a weight of its own"
            ) from error
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"the model cannot be saved to {target}: {reason}; free space, fix the permission or "
            "name another folder"
        ) from error


def is_pretrained(module: nn.Module) -> bool:
    """Whether `module` is a transformers model; wrappers have a `save_pretrained` of their own
    kind."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


@cache
def saving_class(cls: type) -> type:
    """A subclass of a PreTrainedModel class whose `save_pretrained` keeps the patch."""

    def save_pretrained(self, save_directory, *args, **kwargs):
        return save_patched(self, cls.save_pretrained, save_directory, *args, **kwargs)

    save_pretrained.__doc__ = cls.save_pretrained.__doc__
    return namesake(cls, {
        "save_pretrained": save_pretrained, "_skipless_saver": True,
        "__reduce_ex__": reducer(saving_class, cls),
    })  # fmt: skip


def _count(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Connections of each kind; names differ between a model and its body, which share a config."""
    counts: dict[str, int] = {}
    for row in rows:
        kind = row["connection"]["kind"]
        counts[kind] = counts.get(kind, 0) + len(row["at"])
    return counts


def _mark(staging: Path, rows: list[dict[str, Any]]) -> None:
    """Weights and config under the names that only `load` looks for."""
    for pattern in _WEIGHTS:
        for source in staging.glob(pattern):
            source.rename(source.with_name(PREFIX + source.name))
    config = json.loads((staging / "config.json").read_text())
    config["skipless_model_type"] = config["model_type"]
    config["model_type"] = MODEL_TYPE
    config[RECORD] = rows
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _move(staging: Path, target: Path) -> None:
    """Put the new files in place of the old. The config goes first and comes last: where that is
    cut short, `load` refuses the folder instead of mixing two models."""
    (target / "config.json").unlink(missing_ok=True)
    for old in target.glob(PREFIX + "*"):
        old.unlink()
    for source in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(source, target / source.name)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold `folder` against other processes that save into it, without leaving a file there."""
    if os.name == "nt":  # a folder cannot be opened
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not try_lock(handle):
            if time.monotonic() > deadline:
                raise UserError(f"another process has been writing {folder} for {_PATIENCE:.0f} s; "
                                "end it, or name another folder")  # fmt: skip
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)
