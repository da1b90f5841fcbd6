"""Patched models from disk: `load` restores what `saving.py` wrote.

The connections are put in between building the class and reading the weights, so that the gains are
read like every other weight.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.model import Connection
from skipless.surgery.patching import patch_as
from skipless.surgery.records import RECORD
from skipless.surgery.saving import MODEL_TYPE, PREFIX, saving_class

__all__ = ["load"]


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
        name = source.name.removeprefix(PREFIX)
        found |= name.endswith(".safetensors")
        try:
            os.symlink(source.resolve(), staging / name)
        except OSError:  # Windows without the right to link
            (staging / name).write_bytes(source.read_bytes())
    if not found:
        raise UserError(f"{path} holds no {PREFIX}*.safetensors; the folder is incomplete")
    (staging / "config.json").write_text(json.dumps(settings))
