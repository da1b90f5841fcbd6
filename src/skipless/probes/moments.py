"""Streaming central moments of a tensor: kurtosis in three poolings, channel energy (S1, S2).

1. Tokens that are padding, or hold a NaN or an infinity, are left out; the latter are counted.
2. A batch [..., D] (last dimension = channels, the rest = tokens) becomes sums of powers about its
   mean, by channel and by token (rows.py).
3. By channel these are kept as they are; of the tokens, the excess kurtosis as a sum and a count.
4. Batches, processes and layers are merged with the pairwise formulas of Pebay (2008, SAND2008-
   6212, eq. 2.1); pooled moments come from the channels' with the same formulas.

State is four vectors [D] and six scalars, independent of the number of tokens. Read by probe.py,
statistics.py and geometry.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.probes.rows import CONSTANT, F64, RowSums, as_rows, excess, row_sums


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

    @classmethod
    def of(cls, sums: RowSums) -> Moments:
        """The moments of the rows behind these sums."""
        known = ~sums.token_kurtosis.isnan()
        total = torch.where(known, sums.token_kurtosis, 0.0).sum()
        numbers = torch.stack([total, known.sum().to(F64), sums.max_abs]).tolist()
        moments = cls()
        moments.count, moments.mean, moments.sums = len(sums.energy), sums.mean, sums.sums
        moments.token_kurtosis_sum, moments.max_abs = numbers[0], numbers[2]
        moments.token_count = int(numbers[1])
        return moments

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
        if n == 0 or m2 <= n * (CONSTANT * mean) ** 2:
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
        return excess(m2 / self.count, m4 / self.count, mean)

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
    return moments.merge(Moments.of(found))


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
