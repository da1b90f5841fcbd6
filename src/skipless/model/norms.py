"""Normalisation layers by name: RMSNorm and LayerNorm, and the identity for "none".

Read by `block.py` and `transformer.py`. RMSNorm: x / sqrt(mean(x^2) + eps) * weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import ModelConfig


class _RMSNormCPU(torch.autograd.Function):
    """RMSNorm in few passes over memory, for float32 and float64 on the CPU.

    torch has no fused kernel there: at [1024, 128] its forward and backward take 660 us, these 270
    (one thread). With s = rstd and D channels: dw = sum_t s (g x), and
    dx = s g w - x s^3 (w . g x) / D.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd, weight)
        return (x * rstd).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, rstd, weight = ctx.saved_tensors
        width = x.shape[-1]
        product = torch.mul(grad, x, out=torch.empty_like(x))
        rows = product.view(-1, width)
        grad_weight = torch.mv(rows.t(), rstd.view(-1))
        along = torch.mv(rows, weight).view(rstd.shape).mul_(rstd.pow(3)).div_(-width)
        grad_x = torch.mul(grad, weight, out=product).mul_(rstd).addcmul_(x, along)
        return grad_x, grad_weight, None


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
        weight = self.weight.to(x.dtype)  # fused kernels want one dtype, and sum in float32
        wide = x.dtype in (torch.float32, torch.float64)
        if x.device.type == "cpu" and wide and not torch.compiler.is_compiling():
            return _RMSNormCPU.apply(x.contiguous(), weight, self.eps)
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm that `config.norm` names."""
    kinds = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}
    return kinds[config.norm](config.hidden_size, eps=config.norm_eps)
