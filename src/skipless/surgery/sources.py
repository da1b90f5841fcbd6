"""What a command names: the folder of a model, what its config.json says, the tokenizer in it.

Nothing here reads weights; `reading.py` and `loading.py` do. Read by them and by every command that
takes a folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipless.config import DataConfig
from skipless.data import PreparedData, prepare
from skipless.errors import UserError, suggestion
from skipless.files import atomic_path
from skipless.pretrained import HEADER, MODELS, fetch_model
from skipless.pretrained.quantised import refuse_packed

__all__ = [
    "class_name", "copy_tokenizer", "find_folder", "is_run", "model_type", "prepare_text",
    "read_config", "seen_tokens",
]  # fmt: skip

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".h5", ".msgpack")


def find_folder(model: str) -> Path:
    """The folder that `model` names: itself, or a fetched model of the catalog.

    Raises UserError for no such name, and for a folder of packed integers.
    """
    path = Path(model)
    if path.is_dir():
        refuse_packed(path)
        return path
    if model in MODELS.names():
        return fetch_model(model)
    raise UserError(
        f"{model} is neither a folder nor a named model; "
        f"{suggestion(model, MODELS.names(), noun='model')}"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder, patched or not.

    Raises UserError where there is none, or none of a Hugging Face model: a run says how it becomes
    one.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder} holds no config.json; name the folder of a Hugging Face model")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    if is_run(config):
        raise UserError(
            f"{folder} is a run and no Hugging Face model; `skipless fold {folder} --out FOLDER` "
            "makes one of it, if its sublayers have skips"
        )
    if isinstance(config, dict) and isinstance(config.get("model_type"), str):
        return config
    raise UserError(
        f"{file} is no config of a Hugging Face model: it names no model_type; save the model anew"
    )


def is_run(config: Any) -> bool:
    """Whether what a config.json holds are the settings of a run (`skipless train`)."""
    return isinstance(config, dict) and "train" in config and "model_type" not in config


def model_type(folder: Path) -> str:
    """`model_type` of the folder's config.json. Raises UserError as `read_config` does."""
    return read_config(folder)["model_type"]


def class_name(config: dict[str, Any]) -> str:
    """The class of transformers that a config names; "" where it names none."""
    names = config.get("architectures") or [""]
    return str(names[0] if isinstance(names, list) else names)


def seen_tokens(folder: Path) -> int | None:
    """How many tokens the folder's model sees, where its config says so."""
    config = read_config(folder)
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) and found > 0 else None


def copy_tokenizer(folder: Path, target: Path) -> None:
    """Copy every file but weights from `folder` to `target`: tokenizer, processor, template.

    What `target` holds already was written anew and stays.
    """
    for file in folder.iterdir():
        copied = file.is_file() and not file.name.endswith((*_WEIGHTS, HEADER))
        if copied and not (target / file.name).exists():
            with atomic_path(target / file.name) as temporary:
                shutil.copy2(file, temporary)  # a torn file would be taken for a whole one


def prepare_text(tokenizer: Path, text: Sequence[str], vocab_size: int) -> PreparedData:
    """`text` (named sources, files, folders) cut with the fast tokenizer in the file `tokenizer`.

    Raises UserError where that file is missing, and for text that cannot be had.
    """
    if not tokenizer.is_file():
        raise UserError(
            f"{tokenizer.parent} holds no {tokenizer.name}; save the model's fast tokenizer there"
        )
    return prepare(DataConfig(sources=tuple(text), tokenizer=str(tokenizer)), vocab_size)
