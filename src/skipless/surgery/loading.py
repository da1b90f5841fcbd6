"""Patched models from disk: `load` restores what `saving.py` wrote.

The connections are put in between building the class and reading the weights, so that the gains are
read like every other weight. transformers only warns of weights that are missing (it draws them
anew), left over or of another shape; here each of these stops the loading.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text
from skipless.model import Connection
from skipless.packages import need
from skipless.surgery.patching import patch_as
from skipless.surgery.reading import check_layers, check_shapes
from skipless.surgery.records import RECORD
from skipless.surgery.saving import INDEX, MODEL_TYPE, PREFIX, saving_class
from skipless.surgery.sources import class_name, is_run

__all__ = ["load"]


def load(directory: str | os.PathLike, **options: Any) -> Any:
    """The patched model that `save_pretrained` wrote, in eval mode.

    `options` go to transformers' `from_pretrained` (dtype, device_map, attn_implementation). Raises
    UserError for a folder that holds no patched model, and for one that is damaged: a weight or a
    gain missing, left over, of the wrong shape, or a file that cannot be read.
    """
    if not isinstance(directory, str | os.PathLike):
        raise UserError(f"load takes the path of a folder, and got {directory!r}")
    path = Path(directory)
    settings = _read_config(path)
    rows, model_type = settings.pop(RECORD), settings.pop("skipless_model_type")
    need("transformers")
    import transformers

    name = class_name(settings)
    cls: Any = getattr(transformers, name, None)
    if not hasattr(cls, "from_pretrained"):
        raise UserError(f"{path} holds a {name or 'model of no class'}, which this version of "
                        "transformers does not have")  # fmt: skip

    def __init__(self, *args, **kwargs):
        cls.__init__(self, *args, **kwargs)
        patch_as(self, rows)
        self.__class__ = patching  # from_pretrained looks at the class it was called on

    patching = type(cls)(cls.__name__, (cls,), {
        "__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
    })  # fmt: skip
    options = {"ignore_mismatched_sizes": True, **options}
    with tempfile.TemporaryDirectory(prefix="skipless-load-") as staging:
        _stage(path, Path(staging), settings | {"model_type": model_type})
        try:
            model, report = patching.from_pretrained(staging, output_loading_info=True, **options)
        except UserError as error:
            raise UserError(f"{path} cannot be patched as its config.json says: {error}") from None
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # the validators of configs have exceptions of their own
            reason = " ".join(str(error).split()).replace(staging, str(path))
            raise UserError(f"{path} cannot be loaded as {name}: {reason}") from error
    _check_whole(path, model, report)
    model.__class__ = saving_class(cls)
    model.config._name_or_path = str(path)
    for module in model.modules():
        if isinstance(module, Connection):
            module.load_state_dict(module.state_dict())  # C7 keeps a copy of its buffer's value
    return model


def _check_whole(path: Path, model: Any, report: dict[str, Any]) -> None:
    """Raise UserError unless the files held just the weights that the model has."""
    for key in sorted(report["missing_keys"], key=lambda key: ("_connection." not in key, key)):
        noun = "gain" if "_connection." in key else "weight"
        raise UserError(f"{path} lacks the {noun} {key}; the folder is incomplete")
    for key in sorted(key for key in report["unexpected_keys"] if "_connection." in key):
        raise UserError(
            f"{path} holds the gain {key}, which its config.json does not name; the two are not of "
            "one model: save it again"
        )
    check_layers(path, model, report["unexpected_keys"])
    check_shapes(path, report)


def _read_config(path: Path) -> dict[str, Any]:
    """config.json of a patched folder, its record checked as far as its form goes."""
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(
            f"{path} is no folder; give the one that save_pretrained wrote, and download it first "
            "if it lies on a hub (huggingface_hub.snapshot_download)"
        )
    if not file.is_file():
        raise UserError(f"{path} holds no config.json; give the folder that save_pretrained wrote")
    settings = parse_json(read_text(file), where=str(file))
    if not isinstance(settings, dict):
        raise UserError(f"{file} holds no settings but a {type(settings).__name__}; save it again")
    if is_run(settings):
        raise UserError(f"{path} is a run and no patched model; skipless.train.load_run reads it")
    if settings.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{path} holds an unpatched {settings.get('model_type')} model; load it with "
            "transformers' from_pretrained"
        )
    rows = settings.get(RECORD)
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise UserError(f"{file} does not say under {RECORD} what is patched; save the model again")
    if not isinstance(settings.get("skipless_model_type"), str):
        raise UserError(f"{file} lacks skipless_model_type, the model's own type; save it again")
    return settings


def _is_row(row: Any) -> bool:
    """Whether `row` is of the form that `records.record` gives."""
    if not isinstance(row, dict) or not isinstance(row.get("connection"), dict):
        return False
    places = row.get("at")
    return isinstance(places, list) and all(isinstance(name, str) for name in places)


def _stage(path: Path, staging: Path, settings: dict[str, Any]) -> None:
    """The folder as transformers names things: a new config beside links to the weights."""
    found = False
    for source in sorted(path.iterdir()):
        if source.name == "config.json" or not source.is_file():
            continue
        name = source.name.removeprefix(PREFIX)
        found |= name.endswith(".safetensors")
        try:
            os.symlink(source.resolve(), staging / name)
        except OSError:  # Windows without the right to link
            (staging / name).write_bytes(source.read_bytes())
    if not found:
        raise UserError(f"{path} holds no {PREFIX}*.safetensors; the folder is incomplete")
    index = path / f"{PREFIX}{INDEX}"
    if index.is_file():
        for shard in parse_json(read_text(index), where=str(index))["weight_map"].values():
            if not (staging / shard).exists():
                raise UserError(f"{path} lacks {PREFIX}{shard}; the folder is incomplete")
    (staging / "config.json").write_text(json.dumps(settings))
