"""Attention through transformers' attention interface: flex, flash and what users register.

"sdpa" and "eager" are computed by our own layers, bit for bit as without transformers; every other
`attn_implementation` is looked up in transformers' registry and handed queries, keys and values
after RoPE, the layer's scaling, and a mask of the form registered for it. Read by `modeling.py`.

Legend: B batch, T new tokens, S past plus new tokens, H heads, G key/value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from skipless.errors import UserError

__all__ = ["OWN", "outside"]

OWN = ("sdpa", "eager")
"""Implementations that are computed here."""


def outside(
    config: Any, attention_mask: Tensor | None, shape: tuple[int, int], past: int, like: Tensor
) -> Callable[..., Tensor]:
    """Attention (layer, q, k, v) -> [B, H, T, K] as `config._attn_implementation` computes it.

    `attention_mask` [B, S] is 0 on padding, `shape` is (B, T), `like` has the dtype and device of
    the stream. Raises UserError for a layer with an identity bias (I7), which no mask of theirs
    carries.
    """
    name = config._attn_implementation
    attend: Any = ALL_ATTENTION_FUNCTIONS[name]
    mask = _mask(config, attention_mask, shape, past, like)

    def run(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer.identity_bias is not None:
            raise UserError(
                f"attn_implementation {name!r} has no place for the identity bias of this model; "
                "load it with attn_implementation 'sdpa' or 'eager'"
            )
        layer.num_key_value_groups = layer.num_heads // layer.num_key_value_heads
        layer.is_causal = config.causal
        out, _ = attend(
            layer, q, k, v, mask, scaling=layer.temperature.scaling,
            dropout=layer.dropout if layer.training else 0.0, is_causal=config.causal,
        )  # fmt: skip
        return out.transpose(1, 2)

    return run


def _mask(
    config: Any, attention_mask: Tensor | None, shape: tuple[int, int], past: int, like: Tensor
) -> Any:
    """What the implementation wants for a mask; a registered function makes it, or sdpa's."""
    batch, num_new = shape
    known = ALL_MASK_ATTENTION_FUNCTIONS
    # A function that somebody registered without one for masks would else overlook padding.
    make: Any = known[
        config._attn_implementation if config._attn_implementation in known else OWN[0]
    ]
    if attention_mask is not None:
        attention_mask = attention_mask.to(device=like.device, dtype=torch.bool)
    return make(
        batch_size=batch, q_length=num_new, kv_length=past + num_new, q_offset=past, kv_offset=0,
        mask_function=causal_mask_function if config.causal else bidirectional_mask_function,
        attention_mask=attention_mask, allow_is_causal_skip=config.causal,
        allow_is_bidirectional_skip=not config.causal, dtype=like.dtype, config=config,
        use_vmap=False, device=like.device,
    )  # fmt: skip
