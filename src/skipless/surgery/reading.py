"""Hugging Face models from disk, whole or not at all. Read by `patch`, `prune`, `fold` and
`convert` on folders; `loading.py` is for those that are patched.

transformers draws a weight anew that the files lack, with no more than a warning. Here that stops
the loading, as do NaN and infinity among the weights.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.errors import UserError

__all__ = ["check_shapes", "model_type", "read_model"]


def model_type(folder: Path) -> str:
    """`model_type` of the folder's config.json. Raises UserError where there is none."""
    return _config(folder)["model_type"]


def read_model(folder: Path, cls: Any = None, dtype: Any = "auto") -> Any:
    """The folder's model in eval mode, in the class that its config names or in `cls`.

    Raises UserError for a folder that holds none, that lacks weights, or whose weights are not
    finite.
    """
    config = _config(folder)
    try:
        import transformers
    except ImportError:
        raise UserError(
            "transformers is not installed; install it with `pip install -e '.[hf]'`"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    if cls is None:
        names = config.get("architectures") or ["AutoModel"]
        name = str(names[0] if isinstance(names, list) else names)
        cls = getattr(transformers, name, None)
        if not hasattr(cls, "from_pretrained"):
            raise UserError(
                f"{folder} holds a {name}, which this version of transformers does not have"
            )
    else:
        name = cls.__name__
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": dtype}
    try:
        with _without_warnings():
            model, report = cls.from_pretrained(folder, **options)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the validators of configs have exceptions of their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded as {name}: {reason}") from None
    _check_whole(folder, model, report)
    return model.eval()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder} holds no config.json; name the folder of a Hugging Face model")
    try:
        config = json.loads(file.read_text())
        if isinstance(config, dict) and isinstance(config.get("model_type"), str):
            return config
    except (OSError, ValueError, RecursionError):
        pass
    raise UserError(
        f"{file} is no config of a Hugging Face model: it names no model_type; save the model anew"
    )


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers' table of missing weights stays away: one sentence says it."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def check_shapes(folder: Path, report: dict[str, Any]) -> None:
    """Raise UserError if transformers' loading `report` has a weight of another shape."""
    for key, *shapes in sorted(report["mismatched_keys"]):
        found, wanted = (list(shape) for shape in shapes)
        raise UserError(
            f"{folder} holds {key} as {found} and its config.json wants {wanted}; the two are not "
            "of one model: get both anew, or save it again"
        )


def _check_whole(folder: Path, model: nn.Module, report: dict[str, Any]) -> None:
    kind = type(model).__name__
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{folder} lacks the weight {missing[0]}{more} of a {kind}; get the whole folder, or "
            "correct its config.json"
        )
    check_shapes(folder, report)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise UserError(f"{folder} computes no numbers: {name} holds NaN or infinity; get its "
                            "weights anew")  # fmt: skip
