"""The compiled sums against torch's, and what happens where they do not apply."""

import math

import pytest
import torch

from skipless.diagnose import kernel
from skipless.probes.outliers import Outliers


@pytest.fixture(scope="module")
def compiled():
    if kernel.load() is None:
        pytest.skip("no C++ compiler")
    return kernel.fused_sums


@pytest.mark.parametrize(("n", "width"), [(1, 1), (3, 7), (5, 16), (130, 33), (64, 576)])
def test_compiled_and_torch_agree(compiled, n, width):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, width, generator=generator) * 3
    x[:, 0] += 1e4  # a channel far from 0
    both = {}
    for name, fused in (("torch", None), ("compiled", compiled)):
        seen = Outliers((4, 8), fused=fused)
        both[name] = seen, seen.update(x)
    (slow, a), (fast, b) = both["torch"], both["compiled"]
    assert b.count == a.count and b.max_abs == a.max_abs
    torch.testing.assert_close(b.mean, a.mean, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(b.sums, a.sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-6)
    if width > 1 and n > 1:
        assert b.kurtosis() == pytest.approx(a.kurtosis(), rel=1e-9)
        assert b.kurtosis_per_token() == pytest.approx(a.kurtosis_per_token(), rel=1e-9)
    for bits in (4, 8):
        for key in ("noise", "energy", "ratio", "count"):
            wanted = getattr(slow.noise[bits], key)
            assert getattr(fast.noise[bits], key) == pytest.approx(wanted, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(compiled, other):
    x = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    expected = compiled(x, [7, 127])
    torch.set_default_dtype(other)
    try:
        found = compiled(x, [7, 127])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_it_is_used(compiled):
    called = []

    def spy(rows, levels):
        called.append(levels)
        return compiled(rows, levels)

    seen = Outliers((4, 8), fused=spy)
    seen.update(torch.randn(9, 4))
    seen.update(torch.zeros(9, 4))  # no range to round over
    assert called == [[7, 127]] * 2 and seen.count == 18
    x = torch.randn(6, 4)
    x[2, 1] = math.nan
    assert seen.update(x).nonfinite == 1 and len(called) == 4 and seen.count == 23


@pytest.mark.parametrize("width", [1, 3, 16, 37])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_wherever_it_stands(compiled, width, value):
    x = torch.randn(6, width)
    assert torch.equal(compiled(x, [127]).largest, x.abs().amax(1))
    for place in range(width):
        broken = x.clone()
        broken[4, place] = value
        found = compiled(broken, [127])
        assert found.sums is None and not found.largest[4].isfinite()
        assert torch.equal(found.largest[:4], x[:4].abs().amax(1))


def test_zeros_and_tiny_numbers_round_to_nothing(compiled):
    for x in (torch.zeros(5, 9), torch.full((5, 9), 1e-45)):  # the smallest float32
        _, _, noise = compiled(x, [127]).sums
        assert torch.equal(noise, torch.zeros(1, 5))


def test_other_dtypes_are_left_to_torch():
    assert kernel.fused_sums(torch.randn(3, 4, dtype=torch.float64), [1]) is None
    assert kernel.fused_sums(torch.randn(3, 4, dtype=torch.bfloat16), [1]) is None


def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel.load.cache_clear()
    try:
        assert kernel.load() is None and kernel.fused_sums(torch.randn(3, 4), [1]) is None
    finally:
        kernel.load.cache_clear()
