"""The float32 head of one new token: half of what is read from memory at batch 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skipless.quant.integers.fused import dense

MOST_ROWS = 4  # beyond, torch's product reads the weight no oftener


class FusedHead(nn.Linear):
    """An nn.Linear whose product of a few rows asks memory early; made by `fuse`."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        weight = self.weight
        if (
            rows > MOST_ROWS or torch.is_grad_enabled() or input.device.type != "cpu"
            or input.dtype != torch.float32 or weight.dtype != torch.float32
            or weight.device.type != "cpu" or not weight.is_contiguous()
            or input.shape[-1] != self.in_features
            or torch.is_autocast_enabled("cpu")
        ):  # fmt: skip
            return super().forward(input)
        return dense(input, weight, self.bias)
