"""Fused attention with a learned bias on the diagonal logit (I7), without a [T, T] matrix.

Identity-biased attention adds d (one number per head) to the logit of a token with itself. As a
mask that needs a gradient it would push attention off its fused kernels. Instead:

1. The fused kernel gives plain attention `out` and the log-sum-exp `lse` of each row.
2. With r = s_tt - lse and u = (e^d - 1) e^r, the biased result is out' = out + w (v_t - out),
   w = u / (1 + u), and its log-sum-exp is lse' = lse + log(1 + u).
3. The fused backward rebuilds probabilities as exp(s - lse) and needs rowsum(grad * out). Given
   out' and lse' it is exact off the diagonal; on the diagonal its probability is e^-d times the
   true p = e^(d + r) / (1 + u). The missing part p (1 - e^-d) is added by hand, in O(T K).

Read by `attention.py`. Its oracle is the eager form there, compared in float64 in
tests/model/test_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def forward_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float):
    """Plain attention, its log-sum-exp [B, H, T], and what the backward kernel wants besides."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse, ()
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1], tuple(found[2:8])


def backward_kernel(grad, q, k, v, out, lse, rest: tuple, causal: bool, scale: float):
    """Gradients of q, k and v, with probabilities exp(s - lse) and the row sums of grad * out."""
    if not rest:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )


class _DiagonalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, causal: bool, scale: float) -> Tensor:
        plain, lse, rest = forward_kernel(q, k, v, causal, scale)
        log_own = torch.linalg.vecdot(q, k).mul_(scale).to(lse.dtype).sub_(lse)
        own = log_own.exp_()  # probability of the diagonal without the bias
        d = bias.to(lse.dtype)[:, None]
        u = own * torch.expm1(d)
        weight = (u / (1 + u)).to(plain.dtype)[..., None]
        out = torch.lerp(plain, v, weight)
        ctx.save_for_backward(q, k, v, bias, out, lse + torch.log1p(u), own * d.exp() / (1 + u))
        ctx.rest, ctx.causal, ctx.scale = rest, causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, bias, out, lse, probability = ctx.saved_tensors
        grad_q, grad_k, grad_v = backward_kernel(
            grad, q, k, v, out, lse, ctx.rest, ctx.causal, ctx.scale
        )
        missing = probability * -torch.expm1(-bias.to(lse.dtype))[:, None]
        # gradient of the diagonal logit, per unit of probability: grad . v_t - grad . out'
        slope = torch.linalg.vecdot(grad, v - out).to(lse.dtype)
        along = (missing * slope * ctx.scale).to(q.dtype)[..., None]
        grad_q.addcmul_(along, k)
        grad_k.addcmul_(along, q)
        grad_v.addcmul_(missing.to(v.dtype)[..., None], grad)
        grad_bias = (probability * slope).sum(dim=(0, 2)).to(bias.dtype)
        return grad_q, grad_k, grad_v, grad_bias, None, None


def suits(q: Tensor) -> bool:
    """Whether the fused kernel takes this device and dtype, q being [B, H, T, K]."""
    if torch.compiler.is_compiling():
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.float64, torch.bfloat16)
    if q.device.type != "cuda" or q.shape[-1] % 8:  # torch pads other sizes before it asks
        return False
    cuda = torch.backends.cuda  # knows the card, too: none before Ampere has the kernel
    return cuda.can_use_flash_attention(cuda.SDPAParams(q, q, q, None, 0.0, True, False))


def diagonal_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, causal: bool, scale: float
) -> Tensor:
    """softmax(scale q k^T + diag(bias)) v, for q, k, v [B, H, T, K] and bias [H]."""
    return _DiagonalAttention.apply(q, k, v, bias, causal, scale)
