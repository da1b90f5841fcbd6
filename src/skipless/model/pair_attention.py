"""Causal attention of each query over two texts of keys at the same positions, in O(T) memory.

The relation encoder's query t sees keys <= t of the stream and of the branch: 2 T keys, for which
fused kernels want a [T, 2 T] mask. Instead:

1. The fused kernel attends to each text alone, and gives out_i and the log-sum-exp lse_i.
2. Attention over both is out = sum_i out_i exp(lse_i - lse), lse = log(sum_i exp(lse_i)).
3. The fused backward rebuilds probabilities as exp(s - lse) and needs rowsum(grad * out). Given the
   common out and lse it is exact for each text alone; the queries' gradient is the sum of both.

Read by `relation_encoder.py`. Its oracle is masked attention over both texts at once, compared in
float64 in tests/model/test_interpolation_fused.py. Legend: B batch, T tokens, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipless.model.diagonal import backward_kernel, forward_kernel, suits

__all__ = ["pair_attention", "suits"]


class _PairAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_1, v_1, k_2, v_2, scale: float):
        out_1, lse_1, rest_1 = forward_kernel(q, k_1, v_1, True, scale)
        out_2, lse_2, rest_2 = forward_kernel(q, k_2, v_2, True, scale)
        weight = torch.sigmoid(lse_2 - lse_1).to(out_1.dtype)[..., None]
        out = torch.lerp(out_1, out_2, weight)
        ctx.save_for_backward(q, k_1, v_1, k_2, v_2, out, torch.logaddexp(lse_1, lse_2))
        ctx.rests, ctx.scale = (rest_1, rest_2), scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k_1, v_1, k_2, v_2, out, lse = ctx.saved_tensors
        grad_q, grads = None, []
        for k, v, rest in ((k_1, v_1, ctx.rests[0]), (k_2, v_2, ctx.rests[1])):
            part, *others = backward_kernel(grad, q, k, v, out, lse, rest, True, ctx.scale)
            grad_q = part if grad_q is None else grad_q.add_(part)
            grads += others
        return grad_q, *grads, None


def pair_attention(
    q: Tensor, k_1: Tensor, v_1: Tensor, k_2: Tensor, v_2: Tensor, *, scale: float
) -> Tensor:
    """softmax over keys <= t of both texts, times their values, for [B, H, T, r] tensors."""
    return _PairAttention.apply(q, k_1, v_1, k_2, v_2, scale)
