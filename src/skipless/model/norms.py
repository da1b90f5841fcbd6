"""Normalisation layers by name: RMSNorm and LayerNorm, and the identity for "none".

Read by `block.py` and `transformer.py`. RMSNorm: x / sqrt(mean(x^2) + eps) * weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean over channels of x^2 + eps) * weight. Source: arXiv 1910.07467."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # the fused kernel wants one dtype, and computes in float32 inside
        return F.rms_norm(x, (self.hidden_size,), self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm that `config.norm` names."""
    kinds = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}
    return kinds[config.norm](config.hidden_size, eps=config.norm_eps)
