"""Outlier anatomy of one tensor: which channels, which tokens, what share, what without (S1, S11).

    level of a channel  median over sampled tokens of |x|: what it is on most tokens
    outlier channel     level above FACTOR times the median level of the channels: heavy on every
                        token, so persistent
    excess of a value   |x| over the level of its channel (at least the median level)
    outlier token       largest excess above FACTOR times the median of that over sampled tokens

A channel that is huge on one token alone is no outlier channel: its median is ordinary. A token is
no outlier for being as large as its channels are on every token. So the two are told apart, also
where the giant value of a token stands in a channel that is heavy everywhere. Everything is
estimated on the kept rows (`probes.outliers`), extreme tokens exactly.
Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipless.diagnose.remedies import token_ratio
from skipless.probes.moments import F64
from skipless.probes.outliers import Outliers
from skipless.quant import fake_quantize, gaussian_sqnr

FACTOR = 6.0
"""The threshold of LLM.int8, there in absolute size, here over what is usual in the tensor."""
MAX_NAMED = 16
NUM_BINS = 64


def anatomy(outliers: Outliers, *, target_db: float = 30.0) -> dict[str, Any]:
    """The numbers of one tensor; lists are the strongest first, at most MAX_NAMED of them, all by
    number alone in all_channels and all_tokens.

    channels [{channel, level, share}], num_channels; tokens [{number, value, channel, times}],
    num_tokens (`all_extreme`: every kept extreme token is one, so that there may be more);
    energy_tokens: share of the energy; energy_channels: of what outlier tokens leave;
    kurtosis_without_tokens,
    _channels, _both, pooled (S1); kl_gaussian in nats; bits_for_target and gaussian_bits: widths
    that reach `target_db`, every token counting alike, one scale a tensor.
    """
    rows, weights, numbers = outliers.rows()
    if rows.numel() == 0 or not bool(rows.any()):
        return {}
    level, usual, heavy, peak, usual_peak, giant, value = _find(rows, _sampled(outliers))
    energy = rows.double().square()
    total = float((weights @ energy).sum())
    num_extreme = 0 if outliers.extreme is None else len(outliers.extreme.number)
    strength = rows.abs().gather(1, value[:, None]).squeeze(1)
    named = [int(i) for i in torch.argsort(strength, descending=True) if giant[i]]
    channels = [int(j) for j in torch.argsort(level, descending=True) if heavy[j]]
    by_channel, ordinary = weights @ energy, weights[~giant] @ energy[~giant]
    return {
        "num_channels": len(channels),
        "all_channels": channels,
        "all_tokens": [int(numbers[i]) for i in named],
        "channels": [
            {"channel": j, "level": float(level[j]), "times": float(level[j]) / usual,
             "share": float(by_channel[j]) / total}
            for j in channels[:MAX_NAMED]
        ],
        "num_tokens": len(named),
        "all_extreme": bool(giant[:num_extreme].all()) and num_extreme > 0,
        "tokens": [
            {"number": int(numbers[i]), "channel": int(value[i]),
             "value": float(rows[i, int(value[i])]), "times": float(peak[i]) / usual_peak}
            for i in named[:MAX_NAMED]
        ],
        "energy_channels": float(ordinary[heavy].sum()) / (float(ordinary.sum()) or 1.0),
        "energy_tokens": float((weights[giant] @ energy[giant]).sum()) / total,
        "kurtosis_without_tokens": weighted_kurtosis(rows[~giant], weights[~giant]),
        "kurtosis_without_channels": weighted_kurtosis(rows[:, ~heavy], weights),
        "kurtosis_without_both": weighted_kurtosis(rows[~giant][:, ~heavy], weights[~giant]),
        "kl_gaussian": gaussian_divergence(rows, weights),
        "target_db": target_db,
        "bits_for_target": bits_for(rows, weights, target_db),
        "gaussian_bits": next((b for b in range(2, 17) if gaussian_sqnr(b) >= target_db), None),
    }  # fmt: skip


class _Found(NamedTuple):
    """Outliers among rows [n, D]; the words are those on top of this file."""

    level: Tensor
    """[D]."""
    usual: float
    """The median level."""
    heavy: Tensor
    """[D], True for outlier channels."""
    peak: Tensor
    """[n], the largest excess of a token."""
    usual_peak: float
    giant: Tensor
    """[n], True for outlier tokens."""
    value: Tensor
    """[n], the channel of the largest value that makes a token an outlier."""


def _find(rows: Tensor, sampled: Tensor) -> _Found:
    level = sampled.abs().median(0).values
    usual = float(level.median())
    if usual == 0:  # most values are exact zeros, as behind a ReLU
        level = sampled.abs().mean(0)
        usual = float(level.median()) or float(level.mean())
    scale = level.clamp_min(usual)
    excess = rows.abs() / scale
    peak = excess.amax(1)
    usual_peak = float((sampled.abs() / scale).amax(1).median())
    giant = peak > FACTOR * usual_peak if usual_peak > 0 else torch.zeros_like(peak).bool()
    # Of the values that make a token an outlier the largest is named, not the largest excess.
    value = rows.abs().masked_fill(excess <= FACTOR * usual_peak, 0.0).argmax(1)
    return _Found(level, usual, level > FACTOR * usual, peak, usual_peak, giant, value)


def weighted_kurtosis(rows: Tensor, weights: Tensor) -> float | None:
    """Pooled excess kurtosis (S1) of rows [n, D] with weights [n]; None where not defined."""
    if rows.numel() == 0:
        return None
    x, w = rows.double(), (weights / weights.sum())[:, None] / rows.shape[1]
    centred = x - (w * x).sum()
    square = centred.square()
    variance = float((w * square).sum())
    return float((w * square.square()).sum()) / variance**2 - 3 if variance > 0 else None


def gaussian_divergence(rows: Tensor, weights: Tensor) -> float | None:
    """KL(x || N(mean, sd)) in nats over 64 bins to which the Gaussian gives equal shares.

    Between 0 and log 64 = 4.16. None for constant values.
    """
    x = rows.double()
    w = (weights / weights.sum())[:, None].expand_as(x) / x.shape[1]
    mean = (w * x).sum()
    deviation = (w * (x - mean).square()).sum().sqrt()
    if not float(deviation) > 0:
        return None
    inner = torch.arange(1, NUM_BINS, dtype=F64) / NUM_BINS
    edges = torch.special.ndtri(inner) * deviation + mean
    bins = torch.bucketize(x.flatten(), edges)
    share = torch.zeros(NUM_BINS, dtype=F64).index_add_(0, bins, w.flatten())
    return float(torch.special.xlogy(share, share * NUM_BINS).sum())


def bits_for(rows: Tensor, weights: Tensor, target_db: float) -> int | None:
    """The fewest bits, one absmax scale a tensor, with `token_sqnr` >= target; None above 16."""
    low, high = 2, 17
    while low < high:  # the ratio grows with the width
        middle = (low + high) // 2
        found = token_ratio(rows, fake_quantize(rows, middle), weights)[1] if middle < 17 else 0.0
        if middle == 17 or not math.isnan(found) and found >= target_db:
            high = middle
        else:
            low = middle + 1
    return low if low <= 16 else None


def _sampled(outliers: Outliers) -> Tensor:
    """The uniform sample alone, float32 [n, D]."""
    assert outliers.sample is not None, "there are rows"
    return outliers.sample.rows.float()
