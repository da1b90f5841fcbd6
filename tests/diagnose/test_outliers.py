"""Streaming outliers: what one pass keeps is what all rows at once would give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.probes import sqnr
from skipless.probes.outliers import Noise, Outliers, _keys, decibels
from skipless.quant import fake_quantize


def rows(n=700, width=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator) * torch.rand(n, 1, generator=generator)
    x[3, 4] = 90.0
    return x


def test_noise_is_that_of_rounding_directly():
    x = rows()
    seen = Outliers((4, 8))
    seen.update(x)
    for bits in (4, 8):
        q = fake_quantize(x, bits)
        assert seen.noise[bits].sqnr == pytest.approx(sqnr(x, q), abs=1e-3)
        ratio = (q - x).double().square().sum(1) / x.double().square().sum(1)
        by_token = -10 * math.log10(float(ratio.mean()))
        assert seen.noise[bits].token_sqnr == pytest.approx(by_token, abs=1e-3)
    # the giant hides what happens to all the others
    assert seen.noise[4].sqnr > seen.noise[4].token_sqnr + 3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 5))
def test_batches_and_merging_keep_what_one_pass_keeps(sizes, seed):
    x = rows(sum(sizes), 6, seed) if sum(sizes) > 4 else torch.ones(sum(sizes), 6)
    whole = Outliers(num_extreme=5, num_sampled=11)
    whole.update(x)
    parts, start = [], 0
    for size in sizes:
        part = Outliers(num_extreme=5, num_sampled=11)
        part.update(x[start : start + size], first=start)
        parts.append(part)
        start += size
    merged = parts[-1]
    for part in parts[:-1]:
        merged.merge(part)
    for kept in ("extreme", "sample"):
        ours, theirs = getattr(whole, kept), getattr(merged, kept)
        assert sorted(ours.order.tolist()) == sorted(theirs.order.tolist())
    assert merged.count == len(x)
    assert set(merged.sample.number.tolist()) == set(whole.sample.number.tolist())


def test_weighted_rows_stand_for_all_tokens():
    x = rows(6000)
    seen = Outliers()
    seen.update(x)
    kept, weights, number = seen.rows()
    assert float(weights.sum()) == pytest.approx(6000)
    assert torch.equal(kept, x[number])
    assert 3 in number.tolist()[:32] and float(weights[number.tolist().index(3)]) == 1.0
    energy = float(weights @ kept.double().square().sum(1))
    assert energy == pytest.approx(float(x.double().square().sum()), rel=0.2)


def test_keys_are_spread_evenly_and_the_sample_is_not_the_beginning():
    keys = _keys(torch.arange(50_000)).double() / 2**63
    assert abs(float(keys.mean())) < 0.02 and float(keys.std()) == pytest.approx(3**-0.5, abs=0.01)
    seen = Outliers()
    seen.update(rows(5000))
    assert 1500 < float(seen.sample.number.double().mean()) < 3500


def test_broken_and_masked_tokens_are_left_out():
    x = rows(50)
    x[7, 2], x[9] = math.nan, math.inf
    mask = torch.ones(50, dtype=torch.bool)
    mask[3] = False
    seen = Outliers((8,))
    moments = seen.update(x, mask)
    assert seen.count == moments.count == 47 and moments.nonfinite == 1 + x.shape[1]
    assert {3, 7, 9}.isdisjoint(seen.extreme.number.tolist())
    assert Outliers((8,)).update(x[7:8]).count == 0
    assert Outliers((8,)).update(x[:0]).count == 0


def test_zeros_have_no_noise():
    seen = Outliers((8,))
    seen.update(torch.zeros(4, 3))
    assert math.isnan(seen.noise[8].sqnr) and seen.noise[8].token_sqnr == math.inf
    assert decibels(0.0, 1.0) == math.inf and decibels(1.0, 0.0) == -math.inf
    assert math.isnan(Noise().sqnr)


def test_other_widths_are_not_merged():
    with pytest.raises(UserError, match="widths"):
        Outliers((8,)).merge(Outliers((4,)))


@pytest.mark.parametrize("mean", [0.0, 3.0, 300.0, 1e4])
def test_sums_about_zero_and_about_the_mean_agree(mean):
    """Channels and tokens whose mean is far from 0 are computed again: nothing is lost."""
    from scipy.stats import kurtosis

    from skipless.probes.rows import row_sums

    x = rows(300).double()
    x[:, ::2] += mean
    found = row_sums(x)
    m2, _, m4 = found.sums
    assert torch.allclose(
        300 * m4 / m2**2 - 3, torch.tensor(kurtosis(x.numpy(), 0)), rtol=1e-9, atol=1e-9
    )
    assert torch.allclose(
        found.token_kurtosis, torch.tensor(kurtosis(x.numpy(), 1)), rtol=1e-9, atol=1e-9
    )
    assert torch.allclose(found.mean, x.mean(0), rtol=1e-12)
