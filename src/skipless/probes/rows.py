"""Sums of powers of the rows of a tensor, by channel and by token, in one pass over memory.

1. Rows [tokens, D]: padding left out, on a device that has float64.
2. Sums of powers 1 to 4 about 0, and from them the centred ones.
3. Where that loses digits (a mean far from 0), a second pass about the mean.

Everything is float64, whatever the input's type. Measured on a CPU this costs 3 ns an element, a
few percent of a forward pass, so a faster and less exact path is not worth having. MPS has no
float64, so there the rows are moved to the CPU. Read by moments.py, outliers.py, spectrum.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipless.errors import UserError

F64 = torch.float64
Visit = Callable[[Tensor, int], None]
"""(some rows, number of the first of them) -> None."""
_CHUNK = 1 << 16
"""Elements a chunk on a CPU: half a MiB in float64 stays in the cache (256 to 512 rows of 128
channels measured fastest)."""
_FAR = 10.0
"""|mean| over standard deviation up to which power sums about 0 keep twelve digits."""
CONSTANT = 32 * torch.finfo(F64).eps
"""Values whose standard deviation is below this times |mean| count as constant: what is left is
the rounding of the mean."""


class RowSums(NamedTuple):
    """What one pass over rows [tokens, D] gives; float64."""

    mean: Tensor
    """[D], as are the three sums of centred powers 2, 3, 4."""
    sums: tuple[Tensor, Tensor, Tensor]
    token_kurtosis: Tensor
    """Excess kurtosis of each token over its channels [tokens]; NaN where constant."""
    energy: Tensor
    """Sum of squares of each token [tokens]."""
    max_abs: Tensor
    """Of all values, a scalar."""


def check_tensor(x: Any) -> None:
    """Raise UserError unless x is a dense floating-point tensor."""
    if not isinstance(x, Tensor):
        raise UserError(f"statistics need a tensor, not {type(x).__name__}; try torch.as_tensor(x)")
    if not x.is_floating_point():
        raise UserError(f"statistics need a floating-point tensor, not {x.dtype}; try x.float()")
    if x.layout != torch.strided:
        raise UserError(f"statistics need a dense tensor, not {x.layout}; pass x.to_dense()")


def as_rows(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """x [..., D] as [tokens, D] on a device that has float64, masked tokens removed."""
    check_tensor(x)
    x = x.detach()
    # math.prod and not -1, which has no meaning where a side is 0
    rows = x.reshape(1, -1) if x.dim() < 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if mask is not None:
        if mask.numel() != rows.shape[0]:
            raise UserError(
                f"a mask of shape {tuple(mask.shape)} does not fit a tensor of shape "
                f"{tuple(x.shape)}; expected one entry per token, {tuple(x.shape[:-1])}"
            )
        rows = rows[mask.reshape(-1).to(device=rows.device, dtype=torch.bool)]
    return rows.cpu() if rows.device.type == "mps" else rows


def chunks(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows split so that a float64 copy of each part stays small."""
    size = _CHUNK if rows.device.type == "cpu" else 1 << 24
    return rows.split(max(1, size // max(1, rows.shape[1])))


def row_sums(rows: Tensor, visit: Visit | None = None) -> RowSums:
    """Sums of rows [tokens, D] in one pass over memory; `visit` sees every chunk meanwhile.

    Power sums are taken about 0 and moved to the mean, which loses (mean / sd)^4 eps: channels and
    tokens whose mean is more than `_FAR` deviations from 0 are computed again, about their mean.
    """
    n, width = rows.shape
    channels = torch.zeros(4, width, dtype=F64, device=rows.device)
    tokens = torch.empty(4, n, dtype=F64, device=rows.device)
    along = torch.ones(width, dtype=F64, device=rows.device)
    low, high = torch.aminmax(rows)
    parts = chunks(rows)
    longest = len(parts[0])
    powers = torch.empty(4, longest, width, dtype=F64, device=rows.device)
    across = torch.ones(4, 1, longest, dtype=F64, device=rows.device)
    start = 0
    for part in parts:
        end = start + len(part)
        p = powers[:, : len(part)]
        p[0].copy_(part)
        torch.mul(p[0], p[0], out=p[1])
        torch.mul(p[1], p[0], out=p[2])
        torch.mul(p[1], p[1], out=p[3])
        channels += torch.bmm(across[:, :, : len(part)], p).squeeze(1)
        tokens[:, start:end] = p @ along
        if visit is not None:
            visit(part, start)
        start = end
    return from_powers(rows, channels, tokens, torch.maximum(high, -low))


def from_powers(rows: Tensor, channels: Tensor, tokens: Tensor, largest: Tensor) -> RowSums:
    """`row_sums` from sums of powers 1 to 4 about 0, float64, by channel [4, D], token [4, n]."""
    n, width = rows.shape
    mean, m2, m3, m4, far = _central(channels, n)
    if bool(far.any()):
        _again(rows[:, far], 0, (mean, m2, m3, m4), far)
    energy = tokens[1].clone()
    row_mean, r2, r3, r4, far = _central(tokens, width)
    if bool(far.any()):
        _again(rows[far], 1, (row_mean, r2, r3, r4), far)
    kurtosis = excess(r2 / width, r4 / width, row_mean)
    return RowSums(mean, (m2, m3, m4), kurtosis, energy, largest.to(F64))


def _central(raw: Tensor, n: int) -> tuple[Tensor, ...]:
    """Power sums about 0 [4, *] as mean and centred sums, and where that lost digits [*]."""
    s1, s2, s3, s4 = raw
    mean = s1 / n
    square = mean * mean
    m2 = s2 - n * square
    m3 = s3 - 3 * mean * s2 + 2 * n * mean * square
    m4 = s4 - 4 * mean * s3 + 6 * square * s2 - 3 * n * square * square
    return mean, m2, m3, m4, (s2 != 0) & ~(m2 * _FAR**2 > n * square) & m2.isfinite()


def _again(rows: Tensor, over: int, sums: tuple[Tensor, ...], place: Tensor) -> None:
    """Set the centred sums at `place` from these rows, two passes about the mean."""
    x = rows.to(F64)
    mean = x.mean(over, keepdim=True)
    x = x - mean
    power = x * x
    found = mean.squeeze(over), power.sum(over), (x * power).sum(over), power.square().sum(over)
    for total, value in zip(sums, found, strict=True):
        total[place] = value


def excess(second: Tensor, fourth: Tensor, mean: Tensor) -> Tensor:
    """Excess kurtosis from central moments; NaN where the data are constant up to rounding."""
    constant = second <= (CONSTANT * mean) ** 2
    return torch.where(constant, torch.nan, fourth / second**2 - 3)
