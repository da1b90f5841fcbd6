"""Which models write text at all. Read by `opening.py`."""

from __future__ import annotations

from typing import Any

from skipless.errors import UserError
from skipless.model import Transformer
from skipless.quant import quantization


def check_ours(name: str, model: Transformer) -> None:
    """Raise UserError for a decoder of ours that writes no text."""
    config = model.config
    if config.num_labels is not None or not config.causal:
        what = "is a classifier" if config.num_labels is not None else "sees later tokens"
        raise UserError(f"{name} {what}, and only a causal language model writes text")


def check_foreign(name: str, model: Any) -> None:
    """Raise UserError for a model of transformers that is no causal language model."""
    from skipless.surgery.reading import no_next_token

    # a range that all tokens share would let the last move those before it
    record, others = quantization(model), rounded_by_others(model)
    if record is not None:
        record.state.mode = "off"
    for module in others:
        module.quantization_enabled = False
    try:
        reason = no_next_token(model)
    finally:
        if record is not None:
            record.state.mode = "quantize"
        for module in others:
            module.quantization_enabled = True
    if reason:
        raise UserError(f"{name} is no causal language model: {reason}")


def rounded_by_others(model: Any) -> list[Any]:
    """Modules whose inputs the package compressed-tensors rounds."""
    found = ((m, getattr(m, "quantization_scheme", None)) for m in model.modules())
    return [m for m, scheme in found if getattr(scheme, "input_activations", None) is not None]
