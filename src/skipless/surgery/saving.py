"""Patched models to disk: `save_pretrained`. `loading.py` reads what is written here.

A patched folder holds what transformers writes, under names that only `load` looks for: weights as
`skipless-*.safetensors` and a config of model type `skipless-patched`. transformers would read the
usual names, drop the connections with a mere warning and return a model that computes something
else; with these, every plain `from_pretrained` (Auto classes or the model's own) stops.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from skipless.errors import UserError
from skipless.surgery.records import RECORD, connections, record
from skipless.surgery.rewriting import namesake, reducer

__all__ = ["MODEL_TYPE", "PREFIX", "save_pretrained", "saving_class"]

MODEL_TYPE = "skipless-patched"
PREFIX = "skipless-"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def save_pretrained(model: nn.Module, directory: str | os.PathLike, **options: Any) -> Path:
    """Write a patched model so that `load` restores it; returns the folder.

    `options` are those of transformers' `save_pretrained`. `model.save_pretrained(directory)` does
    the same (so Trainer's checkpoints do). Raises UserError for a model that is not patched, for a
    folder that holds an unpatched model, and for `push_to_hub` (upload the folder instead).
    """
    if not connections(model):
        raise UserError(
            f"{type(model).__name__} is not patched; its own save_pretrained is all it needs"
        )
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise UserError(f"{type(model).__name__} is no transformers model; save its state_dict")
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
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".saving-") as staging:
        plain_save(model, staging, *args, **options)
        if (Path(staging) / "config.json").is_file():
            _move(Path(staging), target, rows)


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


def _move(staging: Path, target: Path, rows: list[dict[str, Any]]) -> None:
    """Rename weights, mark the config; the config goes last and replaces an old one at once."""
    for old in target.glob(PREFIX + "*"):
        old.unlink()
    for source in sorted(staging.iterdir()):
        if source.name == "config.json":
            continue
        name = source.name
        if name.startswith("model") and ".safetensors" in name:
            name = PREFIX + name
        os.replace(source, target / name)
    config = json.loads((staging / "config.json").read_text())
    config["skipless_model_type"] = config["model_type"]
    config["model_type"] = MODEL_TYPE
    config[RECORD] = rows
    written = staging / "marked.json"
    written.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(written, target / "config.json")
