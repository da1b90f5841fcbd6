"""Streaming moments: equal to one-shot and to scipy, for any split, order and awkward input."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.probes import Moments, batch_moments, excess_kurtosis, max_excess_kurtosis, sqnr

F64 = torch.float64


def oracle(x: torch.Tensor) -> dict[str, np.ndarray]:
    data = x.double().numpy().reshape(-1, x.shape[-1])
    return {
        "pooled": scipy.stats.kurtosis(data, axis=None),
        "per_token": scipy.stats.kurtosis(data, axis=1).mean(),
        "per_channel": scipy.stats.kurtosis(data, axis=0),
    }


def of(moments: Moments) -> dict[str, np.ndarray]:
    return {
        "pooled": np.float64(moments.kurtosis()),
        "per_token": np.float64(moments.kurtosis_per_token()),
        "per_channel": moments.kurtosis_per_channel().numpy(),
    }


def assert_same(a: dict, b: dict, tolerance: float = 1e-10) -> None:
    for pooling in a:
        difference = np.abs(a[pooling] - b[pooling]) / np.maximum(1, np.abs(b[pooling]))
        assert np.max(difference) < tolerance, (pooling, a[pooling], b[pooling])


def data(seed: int, tokens: int, channels: int, *, offset: float = 0.0) -> torch.Tensor:
    """Heavy-tailed values, channels of different scale and mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, dtype=F64, generator=generator)
    scale = torch.rand(channels, dtype=F64, generator=generator) + 0.1
    return (x + 0.3 * x**3) * scale + torch.arange(channels, dtype=F64) / 7 + offset


@pytest.mark.parametrize("pooling", ["pooled", "per_token", "per_channel"])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
def test_one_shot_equals_scipy(pooling, dtype):
    x = data(0, 300, 24).to(dtype)
    got = excess_kurtosis(x, pooling)
    assert got.dtype == F64
    assert got.shape == ((24,) if pooling == "per_channel" else ())
    np.testing.assert_allclose(got.numpy(), oracle(x)[pooling], rtol=1e-11, atol=1e-11)


def test_leading_dimensions_are_tokens():
    x = data(1, 60, 8)
    assert_same(of(batch_moments(x.view(3, 4, 5, 8))), oracle(x), 1e-12)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 120), max_size=8),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**16),
    offset=st.sampled_from([0.0, -3.0, 1e4]),
)
def test_any_split_in_any_merge_order_equals_one_shot(cuts, order, seed, offset):
    x = data(seed, 120, 6, offset=offset)
    edges = [0, *sorted(cuts), 120]
    parts = [batch_moments(x[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    while len(parts) > 1:  # a random tree of merges
        order.shuffle(parts)
        parts.append(Moments().merge(parts.pop()).merge(parts.pop()))
    assert parts[0].count == 120
    # At a mean of 1e4 the data themselves hold only 12 digits of the deviation.
    assert_same(of(parts[0]), of(batch_moments(x)), 1e-10)
    assert_same(of(parts[0]), oracle(x), 1e-9 if offset else 1e-10)


def test_raw_power_sums_would_fail_where_central_ones_do_not():
    x = data(2, 4096, 4, offset=1e4).float().double()
    stream = Moments()
    for part in x.split(100):
        stream.update(part)
    raw = [float((x**k).mean()) for k in range(1, 5)]
    m, variance = raw[0], raw[1] - raw[0] ** 2
    fourth = raw[3] - 4 * m * raw[2] + 6 * m**2 * raw[1] - 3 * m**4
    true = float(oracle(x)["pooled"])
    assert abs(stream.kurtosis() - true) < 1e-9
    assert abs(fourth / variance**2 - 3 - true) > 0.1


def test_merging_does_not_change_the_other():
    a, b = batch_moments(data(3, 20, 5)), batch_moments(data(4, 30, 5))
    before = [s.clone() for s in (b.mean, *b.sums)]
    a.merge(b)
    a.update(data(5, 10, 5))
    assert all(torch.equal(x, y) for x, y in zip(before, (b.mean, *b.sums), strict=True))
    assert (a.count, b.count) == (60, 30)


def test_memory_does_not_grow_with_tokens():
    moments = Moments()
    for seed in range(5):
        moments.update(data(seed, 1000, 6))
    tensors = [moments.mean, *moments.sums]
    assert [t.shape for t in tensors] == [(6,)] * 4
    assert moments.count == 5000


def test_sample_bound():
    for n in (5, 64, 768):
        row = torch.zeros(1, n)
        row[0, 1] = 3.0
        bound = max_excess_kurtosis(n)
        assert bound == pytest.approx(n - 5 + 1 / (n - 1))
        assert float(excess_kurtosis(row, "per_token")) == pytest.approx(bound, rel=1e-12)
        x = torch.randn(4, n).exp() ** 4
        assert float(excess_kurtosis(x, "per_token")) <= bound
    assert max_excess_kurtosis(768) == pytest.approx(763.0013, abs=1e-4)


def test_empty():
    with pytest.raises(UserError, match=r"empty tensor of shape \(0, 4\)"):
        excess_kurtosis(torch.empty(0, 4))
    moments = batch_moments(torch.empty(0, 4))
    assert moments.count == 0 and math.isnan(moments.kurtosis())
    summary = moments.summary()
    assert summary["count"] == 0 and summary["kurtosis"] is None
    moments.update(data(0, 10, 4))
    assert moments.merge(Moments()).count == 10


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(3, 4).to_sparse(), r"pass x.to_dense\(\)"),
        ([[1.0, 2.0]], r"not list; try torch.as_tensor"),
        (np.ones((3, 4)), "not ndarray"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_dense_tensor(x, words):
    for measure in (excess_kurtosis, batch_moments, lambda x: sqnr(x, x)):
        with pytest.raises(UserError, match=words):
            measure(x)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 0), (2, 3, 0)])
def test_tensors_without_entries_have_no_moments(shape):
    assert batch_moments(torch.ones(shape)).count == 0
    with pytest.raises(UserError, match="empty tensor of shape"):
        excess_kurtosis(torch.ones(shape))


def test_one_token_and_one_value():
    x = torch.tensor([[1.0, 2.0, 4.0, 9.0]])
    moments = batch_moments(x)
    assert_same({"pooled": moments.kurtosis()}, {"pooled": oracle(x)["pooled"]})
    assert moments.kurtosis_per_token() == pytest.approx(moments.kurtosis())
    assert moments.kurtosis_per_channel().isnan().all()
    assert torch.isnan(excess_kurtosis(torch.tensor(3.0)))
    assert excess_kurtosis(torch.tensor([1.0, 2.0, 4.0, 9.0])).item() == pytest.approx(
        moments.kurtosis()
    )


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4 + 0.1, -3e-5])
def test_constant_input_has_no_kurtosis(value):
    x = torch.full((70, 9), value)
    for pooling in ("pooled", "per_token", "per_channel"):
        assert excess_kurtosis(x, pooling).isnan().all()
    stream = Moments()
    for part in x.split(13):
        stream.update(part)
    assert math.isnan(stream.kurtosis()) and stream.token_count == 0


def test_constant_tokens_are_left_out_of_the_token_mean():
    x = data(6, 10, 8)
    padded = torch.cat([x, torch.full((5, 8), 2.5, dtype=F64)])
    assert float(excess_kurtosis(padded, "per_token")) == pytest.approx(
        float(excess_kurtosis(x, "per_token")), abs=1e-12
    )


def test_nonfinite_values_are_counted_and_left_out():
    x = data(7, 50, 6)
    broken = x.clone()
    broken[3, 2], broken[3, 4], broken[20, 0] = math.nan, math.inf, -math.inf
    keep = torch.ones(50, dtype=torch.bool)
    keep[[3, 20]] = False
    moments = batch_moments(broken)
    assert moments.nonfinite == 3 and moments.count == 48
    assert_same(of(moments), of(batch_moments(x[keep])), 1e-12)
    assert excess_kurtosis(broken).isnan()
    assert excess_kurtosis(broken, "per_channel").shape == (6,)
    nothing = batch_moments(torch.full((4, 3), math.nan))
    assert nothing.count == 0 and nothing.nonfinite == 12
    assert math.isnan(nothing.summary()["mean"])  # measured and broken, not "not measured"


def test_huge_float32_values_do_not_overflow():
    x = torch.randn(100, 8) * 1e37
    assert batch_moments(x).nonfinite == 0
    assert float(excess_kurtosis(x)) == pytest.approx(float(excess_kurtosis(x / 1e37)), abs=1e-5)


def test_padding_mask():
    x = data(8, 12, 5).view(3, 4, 5)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert_same(of(batch_moments(x, mask)), of(batch_moments(x[mask])), 1e-13)
    with pytest.raises(UserError, match=r"mask of shape \(3, 3\)"):
        batch_moments(x, mask[:, :3])


def test_wrong_types_and_widths():
    with pytest.raises(UserError, match="int64"):
        batch_moments(torch.arange(6).view(2, 3))
    with pytest.raises(UserError, match="5 and of 6 channels"):
        batch_moments(data(0, 9, 5)).merge(batch_moments(data(0, 9, 6)))
    with pytest.raises(UserError, match="did you mean 'per_channel'"):
        excess_kurtosis(torch.ones(2, 2), "per_chanel")


def test_input_is_not_changed_and_needs_no_gradient():
    x = data(9, 40, 5).requires_grad_()
    before = x.detach().clone()
    batch_moments(x)
    assert torch.equal(x, before) and x.grad_fn is None


def test_summary_against_numpy():
    x = data(10, 200, 7, offset=2.0)
    a = x.numpy()
    s = batch_moments(x).summary()
    energy = (a**2).mean(0)
    expected = {
        "count": 200, "channels": 7, "mean": a.mean(), "std": a.std(),
        "skewness": scipy.stats.skew(a, axis=None), "max_abs": np.abs(a).max(),
        "max_over_std": np.abs(a).max() / a.std(),
        "kurtosis_per_channel_max": scipy.stats.kurtosis(a, axis=0).max(),
        "kurtosis_per_channel_mean": scipy.stats.kurtosis(a, axis=0).mean(),
        "channel_energy": 7 * (energy**2).sum() / energy.sum() ** 2,
    }  # fmt: skip
    for key, value in expected.items():
        assert s[key] == pytest.approx(value, rel=1e-10), key


def test_state_dict_round_trip(tmp_path):
    a = batch_moments(data(11, 30, 4))
    torch.save(a.state_dict(), tmp_path / "m.pt")
    b = Moments.from_state_dict(torch.load(tmp_path / "m.pt"))
    assert a.summary() == b.summary()
    assert Moments.from_state_dict(Moments().state_dict()).count == 0
    with pytest.raises(UserError, match="unknown entry 'x'"):
        Moments.from_state_dict({"x": 1})


def test_large_tensor_is_chunked_without_a_change(monkeypatch):
    x = data(12, 500, 9)
    whole = of(batch_moments(x))
    monkeypatch.setattr("skipless.probes.rows._CHUNK", 100)
    assert_same(of(batch_moments(x)), whole, 1e-12)
