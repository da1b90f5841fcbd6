"""fake_quantize (Q1, Q3): grid, error bound, edge values, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.quant import (
    clip_range,
    fake_quantize,
    gaussian_clip,
    gaussian_sqnr,
    integer_codes,
)

CLIPS = ["absmax", "p99.9", "mse", "gauss"]
GRANULARITIES = ["tensor", "channel", "token", "g8"]


def gaussian(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sqnr(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(10 * torch.log10(x.square().sum() / (x - y).square().sum()))


arrays = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=8, max_size=64
).map(lambda v: torch.tensor(v[: len(v) // 8 * 8]).view(-1, 8))


@given(arrays, st.integers(2, 16), st.sampled_from(GRANULARITIES), st.booleans())
@settings(deadline=None, max_examples=150)
def test_error_is_at_most_half_a_step_under_absmax(x, bits, granularity, symmetric):
    options = {"granularity": granularity, "symmetric": symmetric}
    codes, step = integer_codes(x, bits, **options)
    y = fake_quantize(x, bits, **options)
    bound = (step.double() / 2).expand(codes.shape).reshape(x.shape)
    slack = 1e-6 * x.double().abs() + 1e-37  # float32 rounding of the value itself
    assert bool(((x.double() - y.double()).abs() <= bound + slack).all())
    span = codes.amax(-1) - codes.amin(-1) if granularity != "tensor" else codes.max() - codes.min()
    assert int(span.max()) <= 2**bits - 1
    if symmetric:
        assert int(codes.abs().max()) <= 2 ** (bits - 1) - 1


@given(arrays, st.integers(2, 16), st.sampled_from(GRANULARITIES), st.booleans(),
       st.sampled_from(CLIPS))  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_simulation_is_codes_times_scale_exactly(x, bits, granularity, symmetric, clip):
    options = {"granularity": granularity, "symmetric": symmetric, "clip": clip}
    found = integer_codes(x, bits, **options)
    simulated = fake_quantize(x, bits, **options)
    assert found.codes.dtype == torch.int32
    assert torch.equal(found.dequantize().reshape(x.shape), simulated)
    assert bool(torch.isfinite(simulated).all())


@given(arrays, st.integers(2, 12), st.sampled_from(GRANULARITIES))
@settings(deadline=None, max_examples=100)
def test_quantising_twice_changes_nothing(x, bits, granularity):
    once = fake_quantize(x, bits, granularity=granularity)
    twice = fake_quantize(once, bits, granularity=granularity)
    # The codes are the same; the scale may move by one float32 rounding.
    assert torch.allclose(once, twice, rtol=3e-7, atol=0)


@given(arrays, st.integers(2, 16))
@settings(deadline=None, max_examples=50)
def test_symmetric_ranges_are_odd_functions(x, bits):
    assert torch.equal(fake_quantize(-x, bits), -fake_quantize(x, bits))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_more_bits_give_a_better_ratio_on_gaussian_values(clip, symmetric):
    x = gaussian(64, 256)
    limit = 16 if clip in ("absmax", "mse") else 8  # a fixed clip loses the tail at any width
    ratios = [
        sqnr(x, fake_quantize(x, bits, clip=clip, symmetric=symmetric)) for bits in range(2, limit)
    ]
    if clip == "p99.9":
        ratios = ratios[:4]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("clip", ["gauss", "mse"])
def test_gaussian_values_reach_the_yardstick(bits, clip):
    x = gaussian(512, 768)
    ratio = sqnr(x, fake_quantize(x, bits, clip=clip))
    assert abs(ratio - gaussian_sqnr(bits)) < 0.3


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
class TestEdgeValues:
    def test_zero_stays_zero(self, clip, symmetric, granularity):
        x = torch.zeros(4, 16)
        y = fake_quantize(x, 4, clip=clip, symmetric=symmetric, granularity=granularity)
        assert torch.equal(y, x)

    def test_empty_stays_empty(self, clip, symmetric, granularity):
        x = torch.zeros(0, 16)
        y = fake_quantize(x, 4, clip=clip, symmetric=symmetric, granularity=granularity)
        assert y.shape == x.shape

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_one_bad_value_spoils_its_group_and_no_other(self, clip, symmetric, granularity, bad):
        x = gaussian(4, 16)
        x[1, 3] = bad
        y = fake_quantize(x, 4, clip=clip, symmetric=symmetric, granularity=granularity)
        spoilt = torch.zeros(4, 16, dtype=torch.bool)
        if granularity == "tensor":
            spoilt[:] = True
        elif granularity == "g8":
            spoilt[1, :8] = True
        else:
            spoilt[1] = True
        assert torch.equal(y.isnan(), spoilt)

    @pytest.mark.parametrize("scale", [1e-35, 1e36])
    def test_tiny_and_huge_values_keep_their_ratio(self, clip, symmetric, granularity, scale):
        x = gaussian(4, 64)
        options = {"clip": clip, "symmetric": symmetric, "granularity": granularity}
        small = sqnr(x, fake_quantize(x * scale, 8, **options).double() / scale)
        assert abs(small - sqnr(x, fake_quantize(x, 8, **options))) < 0.5


@pytest.mark.parametrize("value", [-3.7, 2.5e-7, 1e20])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_constant_is_exact(value, symmetric):
    x = torch.full((3, 8), value)
    for bits in (2, 8, 16):
        assert torch.allclose(fake_quantize(x, bits, symmetric=symmetric), x, rtol=2e-7)


def test_percentile_of_mostly_zeros_does_not_wipe_out_the_rest():
    x = torch.zeros(10_000)
    x[0] = 5.0
    assert fake_quantize(x, 8, clip="p99.9")[0] == 5.0
    assert fake_quantize(x, 8, clip="p99.9", symmetric=False)[0] == 5.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_return_as_they_came(dtype):
    x = gaussian(16, 32, dtype=dtype)
    y = fake_quantize(x, 6)
    assert y.dtype == dtype
    expected = fake_quantize(x.double(), 6)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-15}[dtype]
    assert torch.allclose(y.double(), expected, atol=tolerance)


def test_float16_values_near_its_limit_do_not_overflow():
    x = torch.tensor([65504.0, -60000.0, 3.0], dtype=torch.float16)
    for clip in CLIPS:
        assert bool(torch.isfinite(fake_quantize(x, 8, clip=clip)).all()), clip


def test_given_ranges_clip_and_saturate():
    x = torch.tensor([-9.0, -0.4, 0.26, 9.0, math.inf])
    assert fake_quantize(x, 3, clip=1.5).tolist() == [-1.5, -0.5, 0.5, 1.5, 1.5]
    low, high = torch.tensor(-1.0), torch.tensor(2.0)
    expected = [-1.0, 0.0, 0.0, 2.0, 2.0]
    assert fake_quantize(x, 2, clip=(low, high), symmetric=False).tolist() == expected
    assert fake_quantize(torch.tensor([math.nan, 1.0]), 4, clip=1.0).isnan().tolist() == [1, 0]


def test_a_given_range_equal_to_the_dynamic_one_gives_the_same():
    x = gaussian(8, 64)
    for symmetric in (True, False):
        for clip in CLIPS:
            found = clip_range(x, 5, symmetric=symmetric, clip=clip)
            given_range = fake_quantize(x, 5, symmetric=symmetric, clip=found)
            assert torch.equal(given_range, fake_quantize(x, 5, symmetric=symmetric, clip=clip))


def test_gradient_is_straight_through_inside_and_zero_outside():
    x = torch.tensor([-5.0, -0.9, 0.1, 0.6, 3.0], requires_grad=True)
    y = fake_quantize(x, 4, clip=1.0)
    assert torch.equal(y.detach(), fake_quantize(x.detach(), 4, clip=1.0))
    y.backward(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert x.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 0.0]
    for granularity in GRANULARITIES:  # nothing is outside its own largest value
        z = gaussian(4, 16).requires_grad_()
        fake_quantize(z, 3, granularity=granularity).sum().backward()
        assert torch.equal(z.grad, torch.ones(4, 16))


def test_a_learned_clip_gets_its_gradient():
    x = gaussian(1000, dtype=torch.float64)
    clip = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (fake_quantize(x, 4, clip=clip) - x).square().mean().backward()
    # Between jumps of the codes Q = clip * q / q_max: compare with that difference quotient.
    s, q = 1 / 7, (x * 7).round().clamp(-7, 7)
    inside = (x * 7).round().abs() <= 7
    slope = (q - x / s * inside) / 7
    expected = (2 * (q * s - x) * slope).mean()
    assert clip.grad.item() == pytest.approx(expected.item(), rel=1e-9)
    before = (fake_quantize(x, 4, clip=1.0) - x).square().mean()
    for _ in range(200):
        clip.grad = None
        (fake_quantize(x, 4, clip=clip) - x).square().mean().backward()
        clip.data -= 2 * clip.grad
    after = (fake_quantize(x, 4, clip=clip.detach()) - x).square().mean()
    assert after < before / 4
    assert abs(clip.item() - gaussian_clip(4)) < 0.5


def test_bfloat16_gradient_has_its_dtype():
    x = gaussian(4, 8, dtype=torch.bfloat16).requires_grad_()
    fake_quantize(x, 4).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and bool((x.grad == 1).all())


def test_input_is_left_alone():
    x = gaussian(4, 8)
    kept = x.clone()
    fake_quantize(x, 4)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: fake_quantize(x, 1), "bits is 1"),
        (lambda x: fake_quantize(x, 17), "bits is 17"),
        (lambda x: fake_quantize(x, 4, granularity="g5"), "5 does not divide the 16.*g4"),
        (lambda x: fake_quantize(x, 4, granularity="row"), "granularity is 'row'"),
        (lambda x: fake_quantize(x, 4, clip="p0"), "clip is 'p0'"),
        (lambda x: fake_quantize(x, 4, clip="max"), "'absmax'"),
        (lambda x: fake_quantize(x, 4, clip=0.0), "positive"),
        (lambda x: fake_quantize(x, 4, clip=(x.min(), x.max())), "one positive number"),
        (lambda x: fake_quantize(x, 4, clip=1.0, symmetric=False), "pair"),
        (lambda x: fake_quantize(x.int(), 4), "floating-point"),
        (lambda x: integer_codes(x / 0, 4), "NaN or infinity"),
        (lambda x: clip_range(x[:0], 4), r"empty \(\[0, 16\]\) and has no range"),
    ],
)
def test_bad_calls(call, says):
    with pytest.raises(UserError, match=says):
        call(gaussian(4, 16))
