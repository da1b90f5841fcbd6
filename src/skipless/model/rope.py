"""Rotary position embedding: queries and keys turn by an angle that grows with position.

Channel i pairs with channel i + K/2 (the Hugging Face layout, so weights copy over), the angle is
position * theta^(-2i/K). Read by `transformer.py` (tables) and `attention.py` (rotation).
Source: RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTables:
    """Cosine and sine by position, computed once per length, device and dtype.

    Rows repeat the K numbers of a head `num_heads` times, so that whole rows are multiplied at
    once; the sine of the first half of a head's channels carries the minus of the rotation. No
    nn.Module and no buffers: tables in a module would be garbage after `to_empty`.
    """

    def __init__(self, head_dim: int, theta: float, num_heads: int = 1):
        self.head_dim, self.theta, self.num_heads = head_dim, theta, num_heads
        self._stored: tuple[tuple, Tensor, Tensor] | None = None

    def at(self, positions: Tensor, num_positions: int, dtype: torch.dtype):
        """Cosine and signed sine at `positions`, an int64 [T] or [B, T] below `num_positions`.

        Returns two tensors of `dtype`, [T, H K] or [B, T, H K].
        """
        key = (positions.device, dtype)
        if self._stored is None or self._stored[0] != key or len(self._stored[1]) < num_positions:
            # float64 angles: at position 10^5 float32 is off by 0.004 rad
            exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            place = torch.arange(num_positions, dtype=torch.float64)
            angle = torch.outer(place, self.theta**-exponent)
            cos = angle.cos().repeat(1, 2 * self.num_heads)
            sin = torch.cat((-angle.sin(), angle.sin()), dim=1).repeat(1, self.num_heads)
            cos, sin = (t.to(device=positions.device, dtype=dtype) for t in (cos, sin))
            self._stored = (key, cos, sin)
        _, cos, sin = self._stored
        return cos[positions], sin[positions]


class _Rotate(torch.autograd.Function):
    """x cos + swap_halves(x) sin, in place on the swapped copy.

    A rotation's gradient is the rotation by the opposite angle, so backward is forward with -sin.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        turned[..., :half] = x[..., half:]
        turned[..., half:] = x[..., :half]
        turned.flatten(-2).mul_(sin).addcmul_(x.flatten(-2), cos)
        return turned

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` [B, T, H, K] by tables of `RotaryTables.at` for H heads or more."""
    width = x.shape[-2] * x.shape[-1]
    return _Rotate.apply(x, cos[..., :width].to(x.dtype), sin[..., :width].to(x.dtype))
