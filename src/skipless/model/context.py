"""What one forward pass shares between all blocks. Built once in `Transformer.forward`.

Legend of shapes: B batch, T new tokens, S past plus new tokens, D width, H heads, G key/value
heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from skipless.model.cache import KeyValueCache


@dataclass
class ForwardContext:
    """Positions, masks, the embedding and the cache of one forward pass."""

    embedding: Tensor | None = None
    """x0 of C0 [B, T, D]: what the first block received; set once it is computed."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and signed sine of RoPE, each [T, H K] or [B, T, H K]; None without RoPE."""
    visible: Tensor | None = None
    """Bool, True where a query may see a key, [T, S] or [B, 1, T, S]; None when `is_causal` alone
    says it."""
    is_causal: bool = True
    """Only read when `visible` is None: triangular, or everything."""
    num_visible: Tensor | None = None
    """How many keys each query sees, [T] or [B, T]; only set for a length-scaled temperature."""
    cache: KeyValueCache | None = None
    tokens: Tensor | None = None
    """Bool [B, S], False on padding; None when every position is a token."""
    is_finished: bool = False
    """The first block has computed all of them (`skipless.decoding`)."""
    entropy: Tensor | None = None
    """Normalised entropy [B, T] of the newest attention sublayer, where its connection asks."""
    outside: Callable[..., Tensor] | None = None
    """Attention (layer, q, k, v) -> [B, H, T, K] by somebody else, for layers whose implementation
    is not one of ours."""
