"""The causal language model of a Hugging Face folder, for the commands that measure its loss.

transformers loads a masked language model as a causal one without a word, and draws a head that the
folder lacks anew; a loss per token would be a number about nothing. Here both are refused. Read by
`slimming.py` and `converting_text.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.errors import UserError
from skipless.surgery.reading import model_type, read_model

__all__ = ["load_language_model", "no_next_token"]


def load_language_model(folder: Path) -> Any:
    """The unpatched causal language model of `folder`, in fp32 and eval mode.

    Raises UserError as `read_model` does, for a class without a head for the next token, and for a
    model whose tokens see later ones.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise UserError(
            "transformers is not installed; install it with `pip install -e '.[hf]'`"
        ) from None
    kind, name = model_type(folder), _class_name(folder)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if causal is None:
        raise UserError(_refusal(folder, f"{name or 'it'} predicts no next token"))
    if name not in ("", *([causal] if isinstance(causal, str) else causal)):
        raise UserError(_refusal(folder, f"{name} predicts no next token, as {causal} does"))
    model = read_model(folder, AutoModelForCausalLM, torch.float32)
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
    ids = torch.arange(min(size, 8), device=_device(model))[None]
    other = ids.clone()
    other[:, -1] = 0
    first, second = (getattr(model(input_ids=x), "logits", None) for x in (ids, other))
    if first is None or second is None or first.shape[:2] != ids.shape or first.shape[-1] < size:
        return f"{name} predicts no next token"
    change = (first[:, :-1] - second[:, :-1]).abs().max()
    if not change <= 1e-4 * first.abs().max():
        return f"{name} sees the token that it would have to predict"
    return ""


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _class_name(folder: Path) -> str:
    """What the config names; "" where it names none."""
    config = json.loads((folder / "config.json").read_text())
    return (config.get("architectures") or [""])[0]


def _refusal(folder: Path, reason: str) -> str:
    return (
        f"{folder} is no causal language model: {reason}; in Python, prune and convert take other "
        "models with loss="
    )
