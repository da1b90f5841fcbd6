"""Uniform quantisation, simulated: values on the grid of b-bit integers, kept in floating point.

    1. range    the clip of each group of values: absmax, percentile, MSE-best, Gaussian, or given
    2. scale    s = clip / (2^(b-1) - 1); asymmetric: s = (high - low) / (2^b - 1), zero point z
    3. codes    q = clamp(round(x / s)); asymmetric codes are stored with the zero point taken
                off, so that in both cases simulated = codes * s exactly
    4. gradient straight through inside the range, zero outside (Q3)

A group is the whole tensor, one row (`channel` of a weight [out, in, ...], `token` of an
activation [..., channels]) or n neighbours of the last dimension (`g<n>`). float16 and bfloat16
compute in float32 and return in their dtype. Equations Q1, Q3. Read by `quant.apply`, which
decides what to call it on; the choice of a range is in `quant.ranges`.

Edge values: an all-zero group stays zero; a constant one is exact under absmax; an empty tensor
comes back empty; a NaN or infinity turns its whole group into NaN under a dynamic range, and under
a given range NaN stays NaN and infinity saturates. Nothing non-finite becomes a plausible number
unseen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skipless.errors import UserError, suggestion
from skipless.quant.ranges import find_range
from skipless.scheme import check_groups

Clip = str | float | Tensor | tuple[Tensor, Tensor]
GRANULARITIES = ("tensor", "channel", "token", "g<n>")


class Codes(NamedTuple):
    """Integer codes and the scale that brings them back: value = codes * scale."""

    codes: Tensor
    """int32, shape of the input; asymmetric codes have the zero point taken off."""
    scale: Tensor
    """Broadcasts against `codes`."""

    def dequantize(self) -> Tensor:
        """codes * scale in the scale's dtype: what `fake_quantize` returns."""
        return self.codes.to(self.scale.dtype) * self.scale


def fake_quantize(
    x: Tensor,
    bits: int,
    *,
    granularity: str = "tensor",
    symmetric: bool = True,
    clip: Clip = "absmax",
) -> Tensor:
    """Round `x` to b-bit integers and back (Q1); same shape and dtype, always a fresh tensor.

    `clip` is "absmax", "p<percent>", "mse", "gauss", or the range itself: a positive number or
    tensor (symmetric), a pair (low, high) that encloses 0 (asymmetric), a scalar or of the groups'
    shape with last dimension 1. A symmetric clip tensor that requires a gradient gets one
    (learned clip). Raises UserError for widths outside 2..16, an unknown granularity or clip, a
    group size that does not divide the last dimension, or an integer tensor.
    """
    return simulate(x, bits, granularity, symmetric, clip)[0]


def simulate(
    x: Tensor, bits: int, granularity: str, symmetric: bool, clip: Clip
) -> tuple[Tensor, Tensor]:
    """`fake_quantize` and the scale it used (NaN or infinite where a dynamic group was)."""
    grouped, whole = _prepare(x, bits, granularity)
    if x.numel() == 0:
        return x.clone(), grouped.new_ones(())
    learned = symmetric and isinstance(clip, Tensor) and clip.requires_grad
    if torch.is_grad_enabled() and (x.requires_grad or learned):
        with torch.set_grad_enabled(learned):
            step, bounds, _ = quantizer(grouped.detach(), bits, symmetric, clip, whole)
        out = _StraightThrough.apply(grouped, step, *bounds)
    else:
        step, bounds, bounded = quantizer(grouped, bits, symmetric, clip, whole)
        out = _round(grouped, step, None if bounded else bounds).mul_(step)
    return out.reshape(x.shape).to(x.dtype), step


def integer_codes(
    x: Tensor,
    bits: int,
    *,
    granularity: str = "tensor",
    symmetric: bool = True,
    clip: Clip = "absmax",
) -> Codes:
    """The integers behind `fake_quantize(x, bits, ...)` and their scale (Q1).

    For float32 and float64 input `.dequantize()` equals the simulation exactly; for 16-bit
    floats after rounding to their dtype. With granularity channel or g<n> both have the grouped
    shape [out, in] or [..., groups, n]. Raises UserError for non-finite values, which no integer
    represents.
    """
    grouped, whole = _prepare(x.detach(), bits, granularity)
    if x.numel() == 0:
        return Codes(grouped.to(torch.int32), grouped.new_ones(()))
    if not bool(torch.isfinite(grouped).all()):
        raise UserError("the tensor holds NaN or infinity, which no integer code represents")
    step, bounds, _ = quantizer(grouped, bits, symmetric, clip, whole)
    return Codes(_round(grouped, step, bounds).to(torch.int32), step)


def clip_range(
    x: Tensor,
    bits: int,
    *,
    granularity: str = "tensor",
    symmetric: bool = True,
    clip: str = "absmax",
) -> Tensor | tuple[Tensor, Tensor]:
    """The range `fake_quantize` would choose: a clip, or (low, high) when asymmetric (Q1).

    Raises UserError for an empty tensor, and as `fake_quantize` does.
    """
    if x.numel() == 0:
        raise UserError(f"the tensor is empty ({list(x.shape)}) and has no range; give values")
    grouped, whole = _prepare(x.detach(), bits, granularity)
    return find_range(grouped, bits, symmetric, clip, whole)


def quantizer(
    x: Tensor, bits: int, symmetric: bool, clip: Clip, whole: bool
) -> tuple[Tensor, tuple, bool]:
    """(scale, (smallest, largest code), whether no code can leave them) for grouped values."""
    tiny = torch.finfo(x.dtype).tiny  # the smallest scale: below it numbers lose their digits
    given = find_range(x, bits, symmetric, clip, whole) if isinstance(clip, str) else clip
    if symmetric:
        if isinstance(given, tuple):
            raise UserError("clip is a pair (low, high); a symmetric range is one positive number")
        if not isinstance(given, Tensor):
            if not 0 < given < math.inf:
                raise UserError(f"clip is {given!r}; a positive finite number was expected")
            given = x.new_tensor(given)
        largest = 2 ** (bits - 1) - 1
        # |x| <= absmax, so x / s rounds to at most `largest`: the clamp can be saved.
        bounded = isinstance(clip, str) and clip == "absmax"
        given = given.to(x.device, x.dtype)  # a learned range stays where the optimiser has it
        return given.clamp_min(tiny * largest) / largest, (-largest, largest), bounded
    if not isinstance(given, tuple):
        raise UserError(f"clip is {given!r}; an asymmetric range is a pair of tensors (low, high)")
    low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in given)
    levels = 2**bits - 1
    step = (high / levels - low / levels).clamp_min(tiny)
    zero = (-low / step).round_()
    return step, (-zero, levels - zero), False


def grid(
    x: Tensor, bits: int, granularity: str, symmetric: bool, clip: Clip
) -> tuple[Tensor, Tensor | int, Tensor | int, torch.Size]:
    """(scale, smallest code, largest code, grouped shape) that `integer_codes` would use for `x`.

    Asymmetric codes with the zero point taken off, as there; all broadcast to the grouped shape.
    """
    grouped, whole = _prepare(x.detach(), bits, granularity)
    step, (low, high), _ = quantizer(grouped, bits, symmetric, clip, whole)
    return step, low, high, grouped.shape


def _prepare(x: Tensor, bits: int, granularity: str) -> tuple[Tensor, bool]:
    """(view whose last dimension is one group, whether the whole tensor is one group)."""
    if not isinstance(bits, int) or not 2 <= bits <= 16:
        raise UserError(f"bits is {bits!r}; a whole number from 2 to 16 was expected")
    if not x.is_floating_point():
        raise UserError(f"the tensor is {x.dtype}; floating-point values were expected")
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if granularity == "tensor" or x.dim() == 0:
        return x, True
    if granularity == "token":
        return x, False
    if granularity == "channel":
        return (x.flatten(1), False) if x.dim() > 1 else (x, True)
    if granularity[:1] == "g" and granularity[1:].isdigit() and int(granularity[1:]):
        size, width = int(granularity[1:]), x.shape[-1]
        check_groups(size, {"": width})
        return x.unflatten(-1, (-1, size)), False
    raise UserError(
        f"granularity is {granularity!r}; {suggestion(granularity, GRANULARITIES, noun='value')}"
    )


def _round(x: Tensor, step: Tensor, bounds: tuple | None) -> Tensor:
    """round(x / s), clamped; one fresh tensor, the rest in place."""
    codes = (x / step).round_()
    return codes if bounds is None else codes.clamp_(*bounds)


class _StraightThrough(torch.autograd.Function):
    """Q1 forward; backward the identity where the code is inside the range, 0 outside (Q3).

    The scale's gradient, for learned clips: q - x/s inside, the bound outside.
    """

    @staticmethod
    def forward(ctx, x: Tensor, step: Tensor, low, high) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.bounds = (low, high)
        return _round(x, step, (low, high)).mul_(step)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, step = ctx.saved_tensors
        low, high = ctx.bounds
        codes = (x / step).round_()
        inside = (codes >= low) & (codes <= high)
        grad_step = None
        if ctx.needs_input_grad[1]:
            slope = codes.clamp_(low, high) - (x / step) * inside
            grad_step = (grad * slope).sum_to_size(step.shape)
        return grad * inside, grad_step, None, None
