"""Unpatched Hugging Face models from disk, whole or not at all; `loading.py` reads patched ones.

transformers draws a weight anew that the files lack and leaves out layers that the config does not
count, with no more than a warning. It loads a masked language model as a causal one without a word.
Here each of these stops the loading, as do NaN and infinity among the weights. Read by `patch`,
`prune` and `convert` on folders.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.errors import UserError
from skipless.packages import not_installed
from skipless.pretrained.beside import check_beside
from skipless.surgery.checking import check_finite
from skipless.surgery.sources import class_name, read_config

__all__ = [
    "check_layers",
    "check_shapes",
    "check_whole",
    "no_next_token",
    "read_language_model",
    "read_model",
    "without_warnings",
]


def read_model(folder: Path, cls: Any = None, dtype: Any = "auto") -> Any:
    """The folder's model in eval mode, in the class that its config names or in `cls`.

    Raises UserError for a folder that holds none, whose weights are not all those of the config,
    and for weights that are not finite.
    """
    config = read_config(folder)
    check_beside(folder)
    transformers = _transformers()
    if cls is None:
        name = class_name(config) or "AutoModel"
        cls = getattr(_own_classes(config) or transformers, name, None)
        if not hasattr(cls, "from_pretrained"):
            raise UserError(
                f"{folder} holds a {name}, which this version of transformers does not have"
            )
    else:
        name = cls.__name__
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": dtype}
    try:
        with without_warnings():
            model, report = cls.from_pretrained(folder, **options)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the validators of configs have exceptions of their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded as {name}: {reason}") from None
    check_whole(folder, model, report)
    check_finite(model, str(folder))
    return model.eval()


def read_language_model(folder: Path) -> Any:
    """The unpatched causal language model of `folder`, in fp32 and eval mode.

    Raises UserError as `read_model` does, for a class without a head for the next token, and for a
    model whose tokens see later ones: its loss of the next token would be a number about nothing.
    """
    config = read_config(folder)
    transformers = _transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = class_name(config)
    if _own_classes(config) is not None:
        raise UserError(
            f"{folder} holds a {name}, made of a run of ours; name the run itself, whose skips "
            "are changed there"
        )
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if causal is None:
        raise UserError(_refusal(folder, f"{name or 'it'} predicts no next token"))
    if name not in ("", *([causal] if isinstance(causal, str) else causal)):
        raise UserError(_refusal(folder, f"{name} predicts no next token, as {causal} does"))
    model = read_model(folder, transformers.AutoModelForCausalLM, torch.float32)
    reason = no_next_token(model)
    if reason:
        raise UserError(_refusal(folder, reason))
    return model


@torch.no_grad()
def no_next_token(model: Any) -> str:
    """Why a loss of the next token says nothing about `model`; "" where it does.

    Decided by what it computes: its logits are one row a token id, as wide as the vocabulary, and
    another last token changes no earlier row (to 1e-4 of the largest logit).
    """
    name = type(model).__name__
    config = model.config
    if model.main_input_name != "input_ids" or getattr(config, "is_encoder_decoder", False):
        return f"{name} predicts no next token"
    size = getattr(config, "vocab_size", None)
    if size is None:  # two towers, of which none writes
        return f"{name} predicts no next token"
    ids = torch.arange(min(size, 8), device=next(model.parameters()).device)[None]
    other = ids.clone()
    other[:, -1] = 0
    first, second = (getattr(model(input_ids=x), "logits", None) for x in (ids, other))
    if first is None or second is None or first.shape[:2] != ids.shape or first.shape[-1] < size:
        return f"{name} predicts no next token"
    change = (first[:, :-1] - second[:, :-1]).abs().max()
    if not change <= 1e-4 * first.abs().max():
        return f"{name} sees the token that it would have to predict"
    return ""


def check_shapes(folder: Path | str, report: dict[str, Any]) -> None:
    """Raise UserError if transformers' loading `report` has a weight of another shape."""
    for key, *shapes in sorted(report["mismatched_keys"]):
        found, wanted = (list(shape) for shape in shapes)
        raise UserError(
            f"{folder} holds {key} as {found} and its config.json wants {wanted}; the two are not "
            "of one model: get both anew, or save it again"
        )


def check_layers(folder: Path | str, model: nn.Module, unexpected: Iterable[str]) -> None:
    """Raise UserError if the weights left over, `unexpected`, are layers beyond the config's
    number."""
    base = getattr(model, "base_model_prefix", "")
    lists = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):  # files of a body and of a whole model differ
            lists |= dict.fromkeys((name, f"{base}.{name}", name.removeprefix(f"{base}.")), module)
    held: dict[str, int] = {}
    for key in unexpected:
        for number in re.finditer(r"\.(\d+)\.", key):
            name, index = key[: number.start()], int(number[1])
            if name in lists and index >= len(lists[name]):
                held[name] = max(held.get(name, 0), index + 1)
    for name, count in held.items():
        raise UserError(
            f"{folder} holds {count} layers in {name} and its config.json counts "
            f"{len(lists[name])}, so the rest would be left out; correct config.json, or get both "
            "anew"
        )


def check_whole(folder: Path | str, model: nn.Module, report: dict[str, Any]) -> None:
    """Raise UserError unless transformers' loading `report` says that the files hold every weight
    of `model`, in its shape, and no layer beyond."""
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{folder} lacks the weight {missing[0]}{more} of a {type(model).__name__}; get the "
            "whole folder, or correct its config.json"
        )
    check_layers(folder, model, report["unexpected_keys"])
    check_shapes(folder, report)


def _transformers() -> Any:
    """The module, which does not draw its progress bars."""
    try:
        import transformers
    except ImportError:
        raise not_installed("transformers") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _own_classes(config: dict[str, Any]) -> Any:
    """The room of our own models, which it makes known, where the config is of one; else None."""
    if config["model_type"] != "skipless":
        return None
    import skipless.hf

    return skipless.hf


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Keep transformers' table of missing weights away: one sentence says it."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _refusal(folder: Path, reason: str) -> str:
    return (
        f"{folder} is no causal language model: {reason}; in Python, prune and convert take other "
        "models with loss="
    )
