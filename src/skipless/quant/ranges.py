"""The range that a group of values is quantised over: absmax, percentile, MSE, Gauss (Q1, S11).

Symmetric ranges are one clip, asymmetric ones a pair (low, high) that encloses 0, so that zero is
always exact. No choice goes beyond the values themselves (a range wider than absmax only wastes
codes), and none collapses to zero on a tensor that is not all zero. A NaN or infinity in a group
makes its range NaN whatever the choice, also where a percentile would have passed over it. Read
by `quant.fake`.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

import torch
from torch import Tensor

from skipless.errors import UserError, suggestion
from skipless.quant.gaussian import gaussian_clip

# Shares of absmax tried for "mse": quarter octaves down to 1/128, then eighths between the
# neighbours of the best. 2-bit Gaussian weights of 10^6 values want about 1/4.
_COARSE = tuple(2.0 ** (-j / 4) for j in range(29))
_FINE = tuple(2.0 ** (j / 32) for j in range(-7, 8))


def find_range(
    x: Tensor, bits: int, symmetric: bool, clip: str, whole: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The range of every group of `x`: last dimension kept as 1, or a scalar when `whole`.

    `x` is floating point, grouped so that one group is the last dimension. Raises UserError for
    an unknown `clip`.
    """
    if symmetric:
        largest = _absmax(x, whole)
        if clip == "absmax":
            return largest
        values = x.reshape(1, -1) if whole else x
        if clip == "gauss":
            share = (values / _nonzero(largest)).square_().mean(-1, keepdim=True).sqrt_()
            found = largest * (share * gaussian_clip(bits)).clamp_max(1.0)
        elif clip == "mse":
            found = largest * _best_share(values, bits, -largest, largest, symmetric)
        elif percent := _percent(clip):
            found = _kth(values.abs(), percent)
        else:
            _unknown(clip)
        found = found.reshape(largest.shape)
        found = torch.where(found > 0, found, largest)
        return found + 0 * largest  # NaN and infinity reach every choice

    low, high = _extremes(x, whole)
    if clip == "absmax":
        return low, high
    values = x.reshape(1, -1) if whole else x
    if clip == "gauss":
        span = _nonzero(torch.maximum(-low, high))
        scaled = values / span
        mean = scaled.mean(-1, keepdim=True)
        reach = gaussian_clip(bits) * (scaled - mean).square_().mean(-1, keepdim=True).sqrt_()
        new_low, new_high = span * (mean - reach), span * (mean + reach)
    elif clip == "mse":
        share = _best_share(values, bits, low, high, symmetric)
        new_low, new_high = low * share, high * share
    elif percent := _percent(clip):
        new_low, new_high = -_kth(-values, percent), _kth(values, percent)
    else:
        _unknown(clip)
    poison = 0 * low + 0 * high
    new_low = torch.maximum(new_low.reshape(low.shape).clamp_max(0), low) + poison
    new_high = torch.minimum(new_high.reshape(high.shape).clamp_min(0), high) + poison
    collapsed = (new_high - new_low) == 0
    return torch.where(collapsed, low, new_low), torch.where(collapsed, high, new_high)


def _absmax(x: Tensor, whole: bool) -> Tensor:
    if not whole:
        return x.abs().amax(-1, keepdim=True)
    low, high = torch.aminmax(x)  # one pass and no temporary
    return torch.maximum(-low, high)


def _extremes(x: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    if whole:
        low, high = torch.aminmax(x)
    else:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return low.clamp_max(0), high.clamp_min(0)


def _nonzero(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _percent(clip: str) -> float | None:
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", clip) if isinstance(clip, str) else None
    return float(match[1]) if match and 0 < float(match[1]) <= 100 else None


def _kth(values: Tensor, percent: float) -> Tensor:
    """The smallest value that at least `percent` % of the group do not exceed."""
    count = values.shape[-1]
    k = min(count, max(1, math.ceil(count * percent / 100)))
    return values.kthvalue(k, dim=-1, keepdim=True).values


def _best_share(values: Tensor, bits: int, low: Tensor, high: Tensor, symmetric: bool) -> Tensor:
    """The share of the full range with the least squared error, per group, by two grids."""
    levels = 2**bits - (2 if symmetric else 1)
    width = _nonzero(high / levels - low / levels)
    half = levels // 2
    best_share = torch.ones_like(width)
    best_error = torch.full_like(width, math.inf)

    def attempt(share: Tensor) -> None:
        step = width * share
        bounds = (-half, half)
        if not symmetric:
            zero = (-low / width).round()
            bounds = (-zero, levels - zero)
        codes = (values / step).round_().clamp_(*bounds)
        # Relative to the range, so that neither tiny nor huge values leave float32.
        error = (codes.mul_(share).sub_(values / width)).square_().mean(-1, keepdim=True)
        better = error.reshape(width.shape) < best_error
        best_error.copy_(torch.where(better, error.reshape(width.shape), best_error))
        best_share.copy_(torch.where(better, share, best_share))

    for share in _COARSE:
        attempt(torch.full_like(width, share))
    middle = best_share.clone()
    for factor in _FINE:
        attempt((middle * factor).clamp_max(1.0))
    return best_share


def _unknown(clip: str) -> NoReturn:
    known = ("absmax", "p99.9", "mse", "gauss")
    raise UserError(f"clip is {clip!r}; {suggestion(str(clip), known, noun='value')}")
