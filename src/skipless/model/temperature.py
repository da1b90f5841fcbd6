"""Attention temperature (T1): logits are tau_l / sqrt(K) * Q K^T.

A constant tau goes into the attention function's `scaling`, so fused kernels still run. A learned
or length-scaled tau multiplies Q, so that it has a gradient and may differ by position. Read by
`attention.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig


class AttentionTemperature(nn.Module):
    """tau_l = beta^-l (T1), constant, or learned from there per layer [1] or per head [H].

    Length-scaled: times log(visible keys) / log(max_position_embeddings); a query that sees one
    key gets 0, which changes nothing, since its softmax has one entry.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        settings = config.temperature
        self.start = settings.beta**-layer
        self.log_train_length = math.log(max(config.max_position_embeddings, 2))
        self.length_scaled = settings.length_scaled
        sizes = {"constant": 0, "learned_layer": 1, "learned_head": config.num_attention_heads}
        size = sizes[settings.kind]
        self.tau = nn.Parameter(torch.empty(size)) if size else None
        self.base = config.head_dim**-0.5
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """tau_l = beta^-l."""
        if self.tau is not None:
            nn.init.constant_(self.tau, self.start)

    @property
    def scaling(self) -> float:
        """The constant factor of the logits: tau_l / sqrt(K), or 1 / sqrt(K) when tau is
        learned."""
        return self.base if self.tau is not None else self.start * self.base

    def query_factor(self, num_visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What multiplies the queries [B, H, T, K] of `dtype`, broadcastable; None for a constant
        tau.

        `num_visible` [T] or [B, T]: keys each query sees, needed when length-scaled.
        """
        factor = None if self.tau is None else self.tau.view(-1, 1, 1)
        if self.length_scaled:
            assert num_visible is not None, "a length-scaled temperature counts visible keys"
            # logarithms in float32 at least: bfloat16 cannot tell 257 keys from 256
            visible = num_visible.to(torch.promote_types(dtype, torch.float32))
            ratio = (visible.log() / self.log_train_length)[..., None, :, None]
            factor = ratio if factor is None else factor * ratio
        return None if factor is None else factor.to(dtype)

    def extra_repr(self) -> str:
        kind = "constant" if self.tau is None else f"learned {list(self.tau.shape)}"
        return f"{kind}, start={self.start:.4g}, length_scaled={self.length_scaled}"
