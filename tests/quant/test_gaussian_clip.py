"""-clip:gauss on Gaussian tensors against S11, over seeds, shapes and groups.

One draw of few values strays: at b bits the noise hangs on the handful of values beyond k sd, or,
where none is there, the range ends at the largest value and the ratio is better than the ideal.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from skipless.quant import fake_quantize, gaussian_sqnr

SIZES = {3: (128, 128), 4: (2, 64, 128), 5: (256, 256), 6: (512, 256), 7: (512, 512),
         8: (1024, 1024), 10: (4, 1024, 1024), 12: (4096, 4096)}  # fmt: skip
"""Bits, and a shape from which every draw stays within 0.3 dB."""


def draw(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def beyond(x: torch.Tensor, bits: int, granularity: str = "tensor") -> float:
    """dB by which the ratio is better than S11, sums in float64 numpy."""
    noise = x - fake_quantize(x, bits, granularity=granularity, clip="gauss")
    signal, lost = (np.square(t.numpy(), dtype=np.float64).sum() for t in (x, noise))
    return 10 * math.log10(signal / lost) - gaussian_sqnr(bits)


@pytest.mark.parametrize(("bits", "shape"), SIZES.items())
def test_one_tensor_is_within_a_third_of_a_decibel(bits, shape):
    for seed in range(6 if math.prod(shape) < 2**20 else 1):
        assert abs(beyond(3.7 * draw(shape, seed), bits)) < 0.3


@pytest.mark.parametrize("bits", SIZES)
def test_many_tensors_of_4096_values(bits):
    """Each with a range of its own, their noise taken together: 128 rows are 128 draws."""
    for seed in range(3):
        found = beyond(draw((128, 4096), seed), bits, "channel")
        assert found > -0.3
        assert found < 0.3 or bits >= 8  # beyond 7 bits no value reaches the clip: better


@pytest.mark.parametrize(
    ("granularity", "rows", "bits"),
    [("token", 768, (3, 4, 5)), ("channel", 256, (3, 4)), ("g128", 768, (3, 4)),
     ("g64", 768, (3,))],
)  # fmt: skip
def test_small_groups_hold_at_few_bits_and_are_better_at_many(granularity, rows, bits):
    for seed in range(3):
        x = draw((128, rows), seed)
        for width in (3, 4, 5, 6, 8, 10, 12):
            found = beyond(x, width, granularity)
            assert found > -0.3
            if width in bits:
                assert found < 0.3
            if width >= 8:  # the range is the largest value of the group: less than k sd
                assert found > 0.5
