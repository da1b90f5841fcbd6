"""Patched models on disk: `save_pretrained` and `load`.

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
from pathlib import Path
from typing import Any

from torch import nn

from skipless.errors import UserError
from skipless.model import Connection
from skipless.surgery.patching import RECORD, connections, patch_as, record
from skipless.surgery.rewriting import saving_class

__all__ = ["load", "save_pretrained"]

MODEL_TYPE = "skipless-patched"
_PREFIX = "skipless-"
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


def load(directory: str | os.PathLike, **options: Any) -> Any:
    """The patched model that `save_pretrained` wrote, in eval mode.

    `options` go to transformers' `from_pretrained` (dtype, device_map, attn_implementation). Raises
    UserError for a folder that holds no patched model, and for one whose gains are missing.
    """
    path = Path(directory)
    settings = _read_config(path)
    rows, model_type = settings.pop(RECORD), settings.pop("skipless_model_type")
    import transformers

    name = (settings.get("architectures") or [""])[0]
    cls = getattr(transformers, name, None)
    if cls is None:
        raise UserError(f"{path} holds a {name or 'model of no class'}, which this version of "
                        "transformers does not have")  # fmt: skip

    def __init__(self, *args, **kwargs):
        cls.__init__(self, *args, **kwargs)
        patch_as(self, rows)
        self.__class__ = patching  # from_pretrained looks at the class it was called on

    patching = type(cls)(cls.__name__, (cls,), {
        "__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
    })  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="skipless-load-") as staging:
        _stage(path, Path(staging), settings | {"model_type": model_type})
        model, report = patching.from_pretrained(staging, output_loading_info=True, **options)
    missing = sorted(key for key in report["missing_keys"] if "_connection." in key)
    if missing:
        raise UserError(f"{path} lacks the gain {missing[0]}; the folder is incomplete")
    model.__class__ = saving_class(cls)
    model.config._name_or_path = str(path)
    for module in model.modules():
        if isinstance(module, Connection):
            module.load_state_dict(module.state_dict())  # C7 keeps a copy of its buffer's value
    return model


def _count(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Connections of each kind; names differ between a model and its body, which share a config."""
    counts: dict[str, int] = {}
    for row in rows:
        kind = row["connection"]["kind"]
        counts[kind] = counts.get(kind, 0) + len(row["at"])
    return counts


def _move(staging: Path, target: Path, rows: list[dict[str, Any]]) -> None:
    """Rename weights, mark the config; the config goes last and replaces an old one at once."""
    for old in target.glob(_PREFIX + "*"):
        old.unlink()
    for source in sorted(staging.iterdir()):
        if source.name == "config.json":
            continue
        name = source.name
        if name.startswith("model") and ".safetensors" in name:
            name = _PREFIX + name
        os.replace(source, target / name)
    config = json.loads((staging / "config.json").read_text())
    config["skipless_model_type"] = config["model_type"]
    config["model_type"] = MODEL_TYPE
    config[RECORD] = rows
    written = staging / "marked.json"
    written.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(written, target / "config.json")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{path} holds no config.json; give the folder that save_pretrained wrote")
    try:
        settings = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON ({error})") from None
    if settings.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{path} holds an unpatched {settings.get('model_type')} model; load it with "
            "transformers' from_pretrained"
        )
    return settings


def _stage(path: Path, staging: Path, settings: dict[str, Any]) -> None:
    """The folder as transformers names things: a new config beside links to the weights."""
    found = False
    for source in sorted(path.iterdir()):
        if source.name == "config.json" or not source.is_file():
            continue
        name = source.name.removeprefix(_PREFIX)
        found |= name.endswith(".safetensors")
        try:
            os.symlink(source.resolve(), staging / name)
        except OSError:  # Windows without the right to link
            (staging / name).write_bytes(source.read_bytes())
    if not found:
        raise UserError(f"{path} holds no {_PREFIX}*.safetensors; the folder is incomplete")
    (staging / "config.json").write_text(json.dumps(settings))
