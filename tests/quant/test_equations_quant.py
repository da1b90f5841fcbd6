"""Q1-Q3, S3 and S11 recomputed in float64 numpy, independently of the package's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from skipless.quant import (
    fake_quantize,
    gaussian_clip,
    gaussian_mse,
    gaussian_sqnr,
    integer_codes,
)

RNG = np.random.default_rng(0)


def q1(x: np.ndarray, bits: int, clip: float) -> np.ndarray:
    q = 2 ** (bits - 1) - 1
    s = clip / q
    return s * np.clip(np.rint(x / s), -q, q)


def q1_asymmetric(x: np.ndarray, bits: int) -> np.ndarray:
    low, high = min(x.min(), 0), max(x.max(), 0)
    s = (high - low) / (2**bits - 1)
    zero = np.rint(-low / s)
    return s * (np.clip(np.rint(x / s) + zero, 0, 2**bits - 1) - zero)


@pytest.mark.parametrize("bits", range(2, 17))
def test_q1_symmetric_and_asymmetric(bits):
    x = RNG.normal(size=(6, 32)) + 0.3
    t = torch.from_numpy(x)
    np.testing.assert_allclose(fake_quantize(t, bits).numpy(), q1(x, bits, np.abs(x).max()),
                               rtol=0, atol=1e-14)  # fmt: skip
    np.testing.assert_allclose(
        fake_quantize(t, bits, symmetric=False).numpy(), q1_asymmetric(x, bits), rtol=0, atol=1e-14
    )
    codes = integer_codes(t, bits).codes.numpy()
    assert np.abs(codes).max() == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("symmetric", [True, False])
def test_q1_granularities(symmetric):
    x = RNG.normal(size=(5, 24))
    one = (lambda v: q1(v, 4, np.abs(v).max())) if symmetric else (lambda v: q1_asymmetric(v, 4))
    rows = np.stack([one(row) for row in x])
    groups = np.stack([np.concatenate([one(g) for g in row.reshape(3, 8)]) for row in x])
    for granularity, expected in (("token", rows), ("channel", rows), ("g8", groups)):
        y = fake_quantize(torch.from_numpy(x), 4, granularity=granularity, symmetric=symmetric)
        np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-14)
    x3 = RNG.normal(size=(2, 3, 8))  # tokens are rows of the last dimension
    y = fake_quantize(torch.from_numpy(x3), 4, granularity="token", symmetric=symmetric)
    expected = np.stack([one(row) for row in x3.reshape(6, 8)]).reshape(2, 3, 8)
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-14)
    convolution = RNG.normal(size=(4, 3, 2, 2))
    y = fake_quantize(torch.from_numpy(convolution), 4, granularity="channel", symmetric=symmetric)
    expected = np.stack([one(c.ravel()) for c in convolution]).reshape(convolution.shape)
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-14)


def test_q1_clips():
    x = RNG.standard_t(3, size=4000)
    t = torch.from_numpy(x)
    percentile = np.sort(np.abs(x))[math.ceil(0.99 * 4000) - 1]
    np.testing.assert_allclose(fake_quantize(t, 6, clip="p99").numpy(), q1(x, 6, percentile),
                               atol=1e-14)  # fmt: skip
    k_sd = min(gaussian_clip(6) * math.sqrt((x**2).mean()), np.abs(x).max())
    np.testing.assert_allclose(fake_quantize(t, 6, clip="gauss").numpy(), q1(x, 6, k_sd),
                               atol=1e-13)  # fmt: skip
    fine = np.abs(x).max() * np.geomspace(1 / 128, 1, 3000)
    best = min(((x - q1(x, 3, c)) ** 2).sum() for c in fine)
    found = ((x - fake_quantize(t, 3, clip="mse").numpy()) ** 2).sum()
    assert best * 0.9999 <= found <= best * 1.01


def test_q3_gradient_in_float64():
    x = RNG.normal(size=200) * 2
    t = torch.from_numpy(x).requires_grad_()
    weight = RNG.normal(size=200)
    (fake_quantize(t, 4, clip=1.5) * torch.from_numpy(weight)).sum().backward()
    inside = np.abs(np.rint(x / (1.5 / 7))) <= 7
    np.testing.assert_array_equal(t.grad.numpy(), weight * inside)


@pytest.mark.parametrize(
    ("bits", "clip", "sqnr"),
    [(2, 1.22, 7.2), (3, 1.95, 13.3), (4, 2.47, 18.9), (5, 2.90, 24.3), (6, 3.27, 29.7),
     (8, 3.92, 40.5), (10, 4.49, 51.5), (12, 5.01, 62.7)],
)  # fmt: skip
def test_s11_table(bits, clip, sqnr):
    assert gaussian_clip(bits) == pytest.approx(clip, abs=0.0051)
    assert gaussian_sqnr(bits) == pytest.approx(sqnr, abs=0.051)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_s11_against_adaptive_quadrature_and_another_minimiser(bits):
    def mse(clip: float) -> float:
        q = 2 ** (bits - 1) - 1
        s = clip / q
        edges = [0, *((k + 0.5) * s for k in range(q)), np.inf]
        total = 0.0
        for k, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
            part, _ = integrate.quad(lambda x, k=k: (x - k * s) ** 2 * stats.norm.pdf(x), a, b)
            total += 2 * part
        return total

    assert gaussian_mse(2.0, bits) == pytest.approx(mse(2.0), rel=1e-9)
    found = optimize.minimize_scalar(mse, bounds=(0.5, 6), method="bounded",
                                     options={"xatol": 1e-6})  # fmt: skip
    assert gaussian_clip(bits) == pytest.approx(found.x, abs=1e-4)
    assert gaussian_sqnr(bits) == pytest.approx(-10 * math.log10(found.fun), abs=1e-6)


def test_s11_absmax_is_worse_on_gaussian_values():
    x = torch.randn(512, 768, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for bits, expected in ((4, 14.2), (6, 27.1), (8, 39.4)):
        error = (x - fake_quantize(x, bits)).square().sum()
        ratio = 10 * math.log10(float(x.square().sum() / error))
        # The largest of 393,216 values moves by several tenths of a sd from draw to draw.
        assert ratio == pytest.approx(expected, abs=1.2)


def test_s11_rejects_other_widths():
    for bits in (1, 17, 4.0):
        with pytest.raises(ValueError, match="2 to 16"):
            gaussian_clip(bits)
