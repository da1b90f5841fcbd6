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

    No nn.Module and no buffers: tables in a module would be garbage after `to_empty`.
    """

    def __init__(self, head_dim: int, theta: float):
        self.head_dim, self.theta = head_dim, theta
        self._stored: tuple[tuple, Tensor, Tensor] | None = None

    def at(self, positions: Tensor, num_positions: int, dtype: torch.dtype):
        """Cosine and sine at `positions`, an int64 [T] or [B, T] below `num_positions`.

        Returns two tensors of `dtype`, [T, 1, K] or [B, T, 1, K]; the second half of the channels
        repeats the first.
        """
        key = (positions.device, dtype)
        if self._stored is None or self._stored[0] != key or len(self._stored[1]) < num_positions:
            # float64 angles: at position 10^5 float32 is off by 0.004 rad
            exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            place = torch.arange(num_positions, dtype=torch.float64)
            angle = torch.outer(place, self.theta**-exponent).repeat(1, 2)
            cos = angle.cos().to(device=positions.device, dtype=dtype)
            sin = angle.sin().to(device=positions.device, dtype=dtype)
            self._stored = (key, cos, sin)
        _, cos, sin = self._stored
        return cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)


class _Rotate(torch.autograd.Function):
    """x cos + rotate_half(x) sin in three passes and one allocation.

    A rotation's gradient is the rotation by the opposite angle, so backward is forward with -sin.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        turned = x * cos
        turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(x[..., :half], sin[..., :half])
        return turned

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` [B, T, H, K] by the tables of `RotaryTables.at`."""
    return _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype))
