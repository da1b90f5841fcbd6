"""Streaming central moments of a tensor: kurtosis in three poolings, channel energy (S1, S2).

Numbered steps, for one batch x of shape [..., D] (last dimension = channels, the rest = tokens):
1. Tokens that are padding, or hold a NaN or an infinity, are left out; the latter are counted.
2. Per channel: mean and the sums of the 2nd, 3rd and 4th powers of the centred values. One pass
   takes powers about 0 and moves them to the mean; where that loses digits, a second one does not.
3. Per token: the excess kurtosis over its channels, kept as a sum and a count.
4. Batches, processes and layers are merged with the pairwise formulas of Pebay (2008, SAND2008-
   6212, eq. 2.1); pooled moments come from the channels' with the same formulas.

Arithmetic: everything is float64, whatever the input's type. Measured on a CPU this costs 3 ns an
element, a few percent of a forward pass, so a faster and less exact path is not worth having. The
device is the tensor's own; MPS has no float64, so there the rows are moved to the CPU.

State is four vectors [D] and six scalars, independent of the number of tokens. Read by probe.py,
statistics.py and geometry.py.
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
_CONSTANT = 32 * torch.finfo(F64).eps
"""Values whose standard deviation is below this times |mean| count as constant: what is left is
the rounding of the mean."""


class Moments:
    """Central moments of everything seen so far; empty at first.

    `update(x)` adds a batch [..., D] of any floating type, `merge(other)` another accumulator.
    Numbers that do not exist (no token, constant data) are NaN.
    """

    def __init__(self) -> None:
        self.count = 0
        """Tokens in the moments."""
        self.nonfinite = 0
        """NaN or infinite values seen; their tokens are not in the moments."""
        self.mean: Tensor | None = None
        """Float64 [D], as are the sums of centred powers."""
        self.sums: tuple[Tensor, Tensor, Tensor] | None = None
        self.token_kurtosis_sum = 0.0
        self.token_count = 0
        """Tokens that have a kurtosis: those whose channels are not all equal."""
        self.max_abs = 0.0

    @property
    def num_channels(self) -> int:
        """D, or 0 before the first batch."""
        return 0 if self.mean is None else self.mean.numel()

    def update(self, x: Tensor, mask: Tensor | None = None) -> Moments:
        """Add a batch [..., D]; `mask` [...] is True at tokens to keep. Returns self."""
        return self.merge(batch_moments(x, mask))

    def merge(self, other: Moments) -> Moments:
        """Add what `other` has seen (left as it is). Any order gives the same within rounding."""
        self.nonfinite += other.nonfinite
        if other.count == 0:
            return self
        if self.count == 0:
            self.count, self.mean, self.sums = other.count, other.mean, other.sums
        else:
            if self.num_channels != other.num_channels:
                raise UserError(
                    f"moments of {self.num_channels} and of {other.num_channels} channels cannot "
                    "be merged; measure tensors of different width separately"
                )
            self.mean, self.sums = _merged(self, other)
            self.count += other.count
        self.token_kurtosis_sum += other.token_kurtosis_sum
        self.token_count += other.token_count
        self.max_abs = max(self.max_abs, other.max_abs)
        return self

    def pooled(self) -> tuple[int, float, float, float, float]:
        """(n, mean, M2, M3, M4) over all tokens and channels; M_k = sum of centred k-th powers."""
        if self.count == 0:
            return 0, math.nan, math.nan, math.nan, math.nan
        mean, (m2, m3, m4) = self._known()
        grand = mean.mean()
        d, n = mean - grand, self.count
        total2 = (m2 + n * d**2).sum()
        total3 = (m3 + 3 * d * m2 + n * d**3).sum()
        total4 = (m4 + 4 * d * m3 + 6 * d**2 * m2 + n * d**4).sum()
        numbers = torch.stack([grand, total2, total3, total4]).tolist()
        return n * self.num_channels, *numbers

    def kurtosis(self) -> float:
        """Excess kurtosis over all tokens and channels (S1, pooled)."""
        n, mean, m2, _, m4 = self.pooled()
        if n == 0 or m2 <= n * (_CONSTANT * mean) ** 2:
            return float("nan")
        return n * m4 / m2**2 - 3

    def kurtosis_per_token(self) -> float:
        """Mean over tokens of the excess kurtosis over channels (S1); constant tokens have none."""
        return self.token_kurtosis_sum / self.token_count if self.token_count else float("nan")

    def kurtosis_per_channel(self) -> Tensor:
        """Excess kurtosis over tokens of each channel (S1), float64 [D]; NaN where constant."""
        if self.count == 0:
            return torch.empty(0, dtype=F64)
        mean, (m2, _, m4) = self._known()
        return _excess(m2 / self.count, m4 / self.count, mean)

    def channel_energy(self) -> float:
        """S2 = D sum s_j^2 / (sum s_j)^2 with s_j the mean square of channel j; in [1, D]."""
        if self.count == 0:
            return float("nan")
        mean, (m2, _, _) = self._known()
        energy = mean**2 + m2 / self.count
        total = float(energy.sum())
        return float(self.num_channels * (energy**2).sum()) / total**2 if total else float("nan")

    def std(self) -> float:
        """Standard deviation over all tokens and channels, population form."""
        n, _, m2, _, _ = self.pooled()
        return (m2 / n) ** 0.5 if n else float("nan")

    def summary(self) -> dict[str, float | int | None]:
        """The numbers of a table row; None is "not defined", NaN "no finite value was seen"."""
        n, mean, m2, m3, _ = self.pooled()
        std = (m2 / n) ** 0.5 if n else float("nan")
        channels = self.kurtosis_per_channel()
        channels = channels[channels.isfinite()]
        numbers = {
            "mean": mean,
            "std": std,
            "skewness": n**0.5 * m3 / m2**1.5 if n and m2 > 0 else float("nan"),
            "max_abs": self.max_abs if n else float("nan"),
            "max_over_std": self.max_abs / std if n and std > 0 else float("nan"),
            "kurtosis": self.kurtosis(),
            "kurtosis_per_token": self.kurtosis_per_token(),
            "kurtosis_per_channel_mean": float(channels.mean()) if len(channels) else float("nan"),
            "kurtosis_per_channel_max": float(channels.max()) if len(channels) else float("nan"),
            "channel_energy": self.channel_energy(),
        }
        broken = self.count == 0 and self.nonfinite > 0
        clean = {k: v if v == v or broken else None for k, v in numbers.items()}
        return {
            "count": self.count,
            "channels": self.num_channels,
            "nonfinite": self.nonfinite,
            **clean,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, as CPU tensors and numbers; safe to pickle, send or save."""
        state = dict(vars(self))
        if self.count:
            mean, sums = self._known()
            state["mean"], state["sums"] = mean.cpu(), tuple(s.cpu() for s in sums)
        return state

    def _known(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean and sums, which any token has set."""
        assert self.mean is not None and self.sums is not None, f"of {self.count} tokens"
        return self.mean, self.sums

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Moments:
        """The inverse of `state_dict`."""
        moments = cls()
        for key, value in state.items():
            if key not in vars(moments):
                raise UserError(f"unknown entry {key!r} in the state of Moments")
            setattr(moments, key, tuple(value) if key == "sums" and value is not None else value)
        return moments


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

    def moments(self) -> Moments:
        """The same as an accumulator."""
        known = ~self.token_kurtosis.isnan()
        total = torch.where(known, self.token_kurtosis, 0.0).sum()
        numbers = torch.stack([total, known.sum().to(F64), self.max_abs]).tolist()
        moments = Moments()
        moments.count, moments.mean, moments.sums = len(self.energy), self.mean, self.sums
        moments.token_kurtosis_sum, moments.max_abs = numbers[0], numbers[2]
        moments.token_count = int(numbers[1])
        return moments


def batch_moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Moments of one batch [..., D]; `mask` [...] is True at tokens to keep.

    Raises UserError for a tensor that is not floating, or a mask of another shape.
    """
    rows = as_rows(x, mask)
    moments = Moments()
    if rows.numel() == 0:
        return moments
    found = row_sums(rows)
    # Any NaN or infinity makes a fourth power sum NaN or infinite (float64 holds the fourth power
    # of every finite float32), so that the usual case pays one small check.
    if not torch.isfinite(found.sums[2]).all():
        broken = ~torch.isfinite(rows)
        moments.nonfinite = int(broken.sum())
        rows = rows[~broken.any(dim=1)]
        if rows.shape[0] == 0:
            return moments
        found = row_sums(rows)
    return moments.merge(found.moments())


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
    excess = _excess(r2 / width, r4 / width, row_mean)
    return RowSums(mean, (m2, m3, m4), excess, energy, largest.to(F64))


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


def _excess(second: Tensor, fourth: Tensor, mean: Tensor) -> Tensor:
    """Excess kurtosis from central moments; NaN where the data are constant up to rounding."""
    constant = second <= (_CONSTANT * mean) ** 2
    return torch.where(constant, torch.nan, fourth / second**2 - 3)


def _merged(a: Moments, b: Moments) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Pebay's pairwise formulas for mean, M2, M3, M4."""
    (mean, (a2, a3, a4)), (other, others) = a._known(), b._known()
    na, nb, n = a.count, b.count, a.count + b.count
    b2, b3, b4 = (s.to(mean.device) for s in others)
    d = other.to(mean.device) - mean
    mean = mean + d * (nb / n)
    m2 = a2 + b2 + d**2 * (na * nb / n)
    m3 = a3 + b3 + d**3 * (na * nb * (na - nb) / n**2) + 3 * d * (na * b2 - nb * a2) / n
    m4 = (
        a4 + b4
        + d**4 * (na * nb * (na * na - na * nb + nb * nb) / n**3)
        + 6 * d**2 * (na * na * b2 + nb * nb * a2) / n**2
        + 4 * d * (na * b3 - nb * a3) / n
    )  # fmt: skip
    return mean, (m2, m3, m4)
