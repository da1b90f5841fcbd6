"""Planted outliers are found, and told apart: a giant token is no heavy channel."""

import math

import pytest
import torch

import skipless
from skipless.diagnose import diagnose
from skipless.diagnose.anatomy import anatomy, bits_for, gaussian_divergence, weighted_kurtosis
from skipless.probes.outliers import Outliers
from skipless.quant import fake_quantize, gaussian_sqnr


def stream(result):
    (row,) = [r for r in result.sites if r["site"] == "embedding:output"]
    return row


def test_a_giant_token_is_named_and_is_no_channel(planted, ids, words):
    row = stream(diagnose(planted(giant=400.0), ids, "W8A8", tokenizer=words, layers=False))
    found = row["anatomy"]
    assert found["num_channels"] == 0
    assert found["num_tokens"] == 8 and not found["all_extreme"]
    for token in found["tokens"]:
        assert (token["position"], token["channel"], token["id"]) == (0, 5, 0)
        assert token["value"] == 400.0 and token["text"] == "<0>"
    assert sorted(t["sequence"] for t in found["tokens"]) == list(range(8))
    assert found["energy_tokens"] > 0.99
    assert row["kurtosis"] > 100 and abs(found["kurtosis_without_tokens"]) < 0.5
    assert found["kurtosis_without_channels"] == pytest.approx(row["kurtosis"], rel=1e-3)


def test_a_heavy_channel_is_named_and_makes_no_token(planted, ids, words):
    row = stream(diagnose(planted(heavy=30.0), ids, "W8A8", tokenizer=words, layers=False))
    found = row["anatomy"]
    assert [c["channel"] for c in found["channels"]] == [11] and found["num_channels"] == 1
    assert found["num_tokens"] == 0
    assert found["channels"][0]["level"] == pytest.approx(30.0)
    assert found["energy_channels"] > 0.9
    assert abs(found["kurtosis_without_channels"]) < 0.5 < row["kurtosis"]


@pytest.mark.parametrize("channel", [5, 11])
def test_both_at_once_are_told_apart(channel, planted, ids, words):
    """Also where the giant stands in the heavy channel."""
    model = planted(giant=8000.0, heavy=30.0, channel=channel)
    found = stream(diagnose(model, ids, "W8A8", tokenizer=words, layers=False))["anatomy"]
    assert [c["channel"] for c in found["channels"]] == [11]
    assert found["num_tokens"] == 8 and {t["channel"] for t in found["tokens"]} == {channel}
    assert abs(found["kurtosis_without_both"]) < 0.5


def test_plain_values_have_neither_and_look_gaussian(planted, ids):
    row = stream(skipless.diagnose(planted(), ids, "W8A8", layers=False))
    found = row["anatomy"]
    assert found["num_tokens"] == found["num_channels"] == 0
    assert found["kl_gaussian"] < 0.05


def test_bits_for_a_target_are_the_fewest():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator)
    weights = torch.ones(400, dtype=torch.float64)
    for target in (10.0, 30.0, 60.0):
        bits = bits_for(x, weights, target)
        found = {}
        for b in (bits - 1, bits):
            if b >= 2:
                q = fake_quantize(x, b).double()
                ratio = ((q - x).square().sum(1) / x.double().square().sum(1)).mean()
                found[b] = -10 * math.log10(float(ratio))
        assert found[bits] >= target and found.get(bits - 1, -1) < target
        assert bits - 1 <= next(b for b in range(2, 17) if gaussian_sqnr(b) >= target) <= bits
    x[0] = 0.0
    x[0, 0] = 1e9  # one value leaves nothing for the others
    assert bits_for(x, weights, 60.0) is None


def test_weighted_kurtosis_and_divergence_are_those_of_repeated_rows():
    from scipy.stats import kurtosis

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 9, generator=generator) ** 3
    weights = torch.randint(1, 5, (60,), generator=generator)
    repeated = x.repeat_interleave(weights, 0)
    wanted = kurtosis(repeated.double().numpy(), None)
    assert weighted_kurtosis(x, weights.double()) == pytest.approx(wanted, rel=1e-9)
    ones = torch.ones(len(repeated), dtype=torch.float64)
    assert gaussian_divergence(x, weights.double()) == pytest.approx(
        gaussian_divergence(repeated, ones), rel=1e-9
    )
    assert gaussian_divergence(repeated, ones) > 0.2  # far from a Gaussian
    assert gaussian_divergence(torch.ones(3, 3), ones[:3]) is None


def test_nothing_comes_of_nothing():
    assert anatomy(Outliers((8,))) == {}
    seen = Outliers((8,))
    seen.update(torch.zeros(4, 3))
    assert anatomy(seen) == {}
