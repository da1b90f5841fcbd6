"""Each token's products with a few weight rows, its size and its spread, in one autograd function.

To normalise a token and multiply it by k rows is to multiply it and to scale k numbers. So no
normalised copy [B, T, D] is made or kept for the backward pass; x alone is, which others keep too.
Read by `interpolation.py` and `relation_encoder.py`. Legend: B batch, T tokens, D width, k rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class RowProducts:
    """What `row_products` finds, float32 or float64."""

    products: Tensor
    """x rows^T [B, T, k]."""
    square: Tensor
    """Mean over channels of x^2, [B, T, 1]."""
    spread: Tensor | None
    """Standard deviation over channels [B, T, 1], if asked for."""

    @property
    def normalised(self) -> Tensor:
        """rms_norm(x) rows^T [B, T, k], without a gain."""
        return self.products * (self.square + torch.finfo(self.square.dtype).eps).rsqrt()

    @property
    def size(self) -> Tensor:
        """Root mean square of each token [B, T], detached."""
        return self.square.detach().sqrt()[..., 0]


class _RowProducts(torch.autograd.Function):
    """d products = W dx; d square = 2 x dx / D; d spread = (x - mean) dx / (D spread)."""

    @staticmethod
    def forward(ctx, given, rows, with_spread: bool):
        width, x = given.shape[-1], given.to(rows.dtype)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width)
        mean = spread = None
        if with_spread:
            mean = x.mean(-1, keepdim=True)
            spread = torch.linalg.vector_norm(x - mean, dim=-1, keepdim=True).mul_(width**-0.5)
        ctx.save_for_backward(given, rows, mean, spread)
        return F.linear(x, rows), square, spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_square, grad_spread):
        given, rows, mean, spread = ctx.saved_tensors
        x, width, flat = given.to(rows.dtype), given.shape[-1], grad.flatten(0, -2)
        by_x = grad_square * (2 / width)
        grad_x = (flat @ rows).view(x.shape)
        if spread is not None:
            # a token without spread has no direction in which to change it
            by_spread = torch.where(spread > 0, grad_spread / (width * spread), 0.0)
            grad_x.sub_(by_spread * mean)
            by_x = by_x + by_spread
        return grad_x.addcmul_(x, by_x).to(given.dtype), flat.T @ x.flatten(0, -2), None


def row_products(x: Tensor, rows: Tensor, *, spread: bool = False) -> RowProducts:
    """Products of x [B, T, D] with `rows` [k, D], mean squares and, if asked for, deviations.

    In float32 at least, under autocast too.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return RowProducts(*_RowProducts.apply(x, rows.to(work), spread))
