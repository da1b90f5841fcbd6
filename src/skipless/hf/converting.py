"""Our decoder as transformers has it, and back: the same modules under other names.

    made = from_transformer(model)    # a `skipless.model.Transformer`
    again = to_transformer(made)

Read by `exporting.py`, by the room that writes text and by the command line.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from skipless.errors import UserError
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import SkiplessForCausalLM, SkiplessForSequenceClassification
from skipless.model import Transformer
from skipless.quant import quantization

__all__ = ["from_transformer", "inner_name", "to_transformer"]

_HEADS = re.compile(r"\*|(lm_head|score)(\W|$)")
"""Names that are the same in both, and patterns that fit any beginning."""
_BODY = "model."
"""In front of the names of all but the head."""


def from_transformer(model: Transformer, *, tokenizer: Any = None, **settings: Any) -> Any:
    """`model` as transformers has it, in eval mode, with copies of its weights.

    `settings` go into the config, such as eos_token_id; `tokenizer`, one of ours, gives the token
    that ends texts and pads, as its `for_transformers` does. Raises UserError for a quantised
    model.
    """
    _check_unrounded(model)
    end = getattr(tokenizer, "eos_id", None)
    if end is not None:
        writes = {"eos_token_id": end} if model.config.num_labels is None else {}
        settings = {"pad_token_id": end, **writes, **settings}
    config = SkiplessConfig.from_model_config(model.config, **settings)
    cls = SkiplessForCausalLM if model.config.num_labels is None else (
        SkiplessForSequenceClassification
    )  # fmt: skip
    with torch.device("meta"):
        made = cls(config)
    weights = {
        inner_name(name): value.detach().clone() for name, value in model.state_dict().items()
    }
    made.load_state_dict(weights, assign=True)
    made.tie_weights()
    return made.eval()


def inner_name(name: str) -> str:
    """What transformers calls the tensor, module or site that our decoder calls `name`; of a
    pattern too, so that it names the same."""
    return name if _HEADS.match(name) else _BODY + name


def to_transformer(model: SkiplessForCausalLM) -> Transformer:
    """`model` as our own decoder, in eval mode, on the same memory.

    Raises UserError for a quantised model.
    """
    _check_unrounded(model)
    with torch.device("meta"):
        made = Transformer(model.config.to_model_config())
    weights = {name.removeprefix(_BODY): value for name, value in model.state_dict().items()}
    made.load_state_dict(weights, assign=True)
    made.tie_weights()
    return made.eval()


def _check_unrounded(model: Any) -> None:
    if quantization(model) is not None:
        raise UserError(
            "the model is quantised, and its rounded weights would be taken for its own; call "
            "restore(model) first, or skipless.export.save_quantized to write it as it is"
        )
