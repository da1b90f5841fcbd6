"""The MLP sublayer: up, activation, down; SwiGLU adds a gate. No biases.

The activation is a module of its own, so that probes and quantisers see its output. Read by
`block.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig


class SquaredReLU(nn.Module):
    """max(x, 0)^2. Source: Primer, arXiv 2109.08668."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "relu2": SquaredReLU, "swiglu": nn.SiLU}
"""By `ModelConfig.hidden_act`; gelu is the erf form, swiglu the SiLU of its gate."""


class MLP(nn.Module):
    """y = act(x W_U) W_D, or (silu(x W_G) * x W_U) W_D for swiglu; [B, T, D] to [B, T, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, inner = config.hidden_size, config.mlp_width
        self.gate_proj = (
            nn.Linear(width, inner, bias=False) if config.hidden_act == "swiglu" else None
        )
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]()
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
