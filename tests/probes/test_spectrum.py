"""Spectra and sketches: exact where narrow, close where wide, mergeable in any order."""

import math

import pytest
import torch

from skipless.errors import UserError
from skipless.probes import (
    JoinGeometry,
    Sketch,
    effective_rank,
    join_geometry,
    principal_angle,
    spectrum_share,
    token_similarity,
)

F64 = torch.float64


def matrix(tokens: int, spectrum: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = len(spectrum)
    basis = torch.linalg.qr(torch.randn(width, width, dtype=F64, generator=generator)).Q
    return (torch.randn(tokens, width, dtype=F64, generator=generator) * spectrum) @ basis.T


def power(width: int, exponent: float) -> torch.Tensor:
    return torch.arange(1, width + 1, dtype=F64) ** -exponent


def test_effective_rank_and_share_of_known_spectra():
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([5.0, 0, 0])) == pytest.approx(1)
    assert spectrum_share(torch.ones(20)) == pytest.approx(0.1)
    assert spectrum_share(torch.tensor([1.0, 3.0])) == pytest.approx(0.9)
    assert math.isnan(effective_rank(torch.zeros(3))) and math.isnan(spectrum_share(torch.zeros(3)))


def test_principal_angle():
    eye = torch.eye(6, dtype=F64)
    assert principal_angle(eye[:, :2], eye[:, :2]) == pytest.approx(0, abs=1e-6)
    assert principal_angle(eye[:, :2], eye[:, 2:4]) == pytest.approx(90)
    tilted = (eye[:, :1] + eye[:, 1:2]) / 2**0.5
    assert principal_angle(eye[:, :1], tilted) == pytest.approx(45)


@pytest.mark.parametrize("tokens", [20, 300])
def test_narrow_matrices_are_exact(tokens):
    x = matrix(tokens, power(48, 1.0))
    values, vectors = Sketch.of(x).decompose()
    expected = torch.linalg.svdvals(x)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)
    assert vectors.shape == (48, min(tokens, 48))


@pytest.mark.parametrize(
    ("spectrum", "rank_tolerance"),
    [
        (torch.ones(320, dtype=F64), 0.05),
        (power(320, 0.5), 0.08),
        (power(320, 1.0), 0.15),
        (power(320, 2.0), 0.05),
        (torch.cat([torch.ones(20, dtype=F64), torch.zeros(300, dtype=F64)]), 1e-3),
        (torch.cat([torch.tensor([100.0], dtype=F64), torch.ones(319, dtype=F64)]), 0.05),
    ],
)
def test_wide_matrices_are_sketched_closely(spectrum, rank_tolerance):
    x = matrix(800, spectrum)
    sketch = Sketch.of(x)
    assert not sketch.exact and sketch.total.shape == (320, 80)
    values, _ = sketch.decompose()
    exact = torch.linalg.svdvals(x)
    assert len(values) == 320
    assert float(values.square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-6)
    assert effective_rank(values) == pytest.approx(effective_rank(exact), rel=rank_tolerance)
    assert spectrum_share(values) == pytest.approx(spectrum_share(exact), abs=0.08)


def test_wide_sketch_finds_the_principal_directions():
    x = matrix(600, power(320, 1.5))
    _, vectors = Sketch.of(x).decompose()
    exact = torch.linalg.svd(x, full_matrices=False).Vh[:16].T
    assert principal_angle(exact, vectors[:, :16]) < 3.0


@pytest.mark.parametrize("width", [16, 300])
def test_sketches_merge_by_addition(width):
    x = matrix(200, power(width, 1.0))
    whole, parts = Sketch.of(x), Sketch(width)
    for part in reversed(x.split(33)):
        parts.merge(Sketch.of(part))
    assert parts.count == 200 and parts.energy == pytest.approx(whole.energy, rel=1e-12)
    torch.testing.assert_close(parts.total, whole.total, rtol=1e-9, atol=1e-12)
    again = Sketch.from_state_dict(parts.state_dict())
    assert torch.equal(again.total, parts.total) and again.count == 200
    with pytest.raises(UserError, match="cannot be merged"):
        whole.merge(Sketch.of(torch.ones(2, 3)))


def test_fewer_tokens_than_test_vectors():
    x = matrix(10, torch.ones(300, dtype=F64))
    values, vectors = Sketch.of(x).decompose()
    assert values.shape == (10,) and vectors.shape == (300, 10)
    torch.testing.assert_close(values, torch.linalg.svdvals(x), rtol=1e-5, atol=1e-6)
    empty, none = Sketch(300).decompose()
    assert empty.numel() == 0 and none.shape == (300, 0)


def test_token_similarity():
    x = torch.randn(3, 9, 5, dtype=F64)
    total, number = token_similarity(x)
    unit = torch.nn.functional.normalize(x, dim=-1)
    cosine = unit @ unit.transpose(1, 2)
    off = ~torch.eye(9, dtype=torch.bool)
    assert number == 3 and total == pytest.approx(float(cosine[:, off].mean(1).sum()))
    assert token_similarity(torch.ones(4, 3)) == pytest.approx((1.0, 1))
    assert token_similarity(torch.ones(2, 1, 3)) == (0.0, 0)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, 4:] = mask[1] = False
    total, number = token_similarity(x, mask)
    by_hand = token_similarity(x[0, :4])[0] + token_similarity(x[2])[0]
    assert number == 2 and total == pytest.approx(by_hand)
    broken = x.clone()
    broken[1, 3] = math.nan
    good = token_similarity(x[1][torch.arange(9) != 3])[0]
    assert token_similarity(broken[1])[0] == pytest.approx(good)


def test_streamed_join_equals_one_shot():
    torch.manual_seed(0)
    x, f = torch.randn(6, 10, 24, dtype=F64), torch.randn(6, 10, 24, dtype=F64) ** 3
    y = 0.5 * x + f
    whole = join_geometry(x, f, y)
    halves = [JoinGeometry().update(x[i], f[i], y[i]) for i in (slice(0, 2), slice(2, 6))]
    merged = JoinGeometry.from_state_dict(halves[1].state_dict()).merge(halves[0])
    assert set(merged.summary()) == set(whole)
    for key, value in merged.summary().items():
        assert value == pytest.approx(whole[key], rel=1e-9, abs=1e-9), key
    assert whole["output_norm"] != pytest.approx(whole["sum_norm"], rel=0.01)


def test_cancelling_branch_and_bad_shapes():
    x = torch.randn(2, 8, 6, dtype=F64)
    row = join_geometry(x, -0.9 * x)
    assert row["cancellation"] == pytest.approx(0.01 / 1.81)
    assert row["principal_angle"] == pytest.approx(0, abs=1e-5)
    zero = join_geometry(torch.zeros(2, 4, 6), torch.zeros(2, 4, 6))
    assert zero["stream_norm"] == 0 and zero["cancellation"] is None
    with pytest.raises(UserError, match="a join needs equal shapes"):
        join_geometry(x, x[..., :3])


def test_join_with_broken_tokens_keeps_the_rest():
    x, f = torch.randn(2, 8, 6), torch.randn(2, 8, 6)
    x[0, 3, 1] = math.nan
    row = join_geometry(x, f)
    assert row["count"] == 15
    assert all(v is None or math.isfinite(v) for v in row.values())
