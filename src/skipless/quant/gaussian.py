"""The Gaussian yardstick: what a symmetric uniform quantiser can do on N(0, 1) (S11).

A tensor with Gaussian values loses the least at one clip, and no plain b-bit quantiser gets a
better signal-to-noise ratio on it. Reports print the measured ratio, this ideal and the gap; the
`-clip:gauss` option uses the clip. Read by `quant.ranges`, `evaluate.propagation` and the report.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from skipless.errors import UserError

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def gaussian_mse(clip: float, bits: int) -> float:
    """E[(x - Q(x))^2] for x ~ N(0, 1) and the symmetric quantiser of Q1 with this clip (S11).

    The 2^b - 1 levels are k * s, k = -q..q, q = 2^(b-1) - 1, s = clip / q. Gauss-Legendre in
    each cell, closed form in the outermost one, which reaches to infinity.
    """
    q = 2 ** (bits - 1) - 1
    s = clip / q
    # One half line: half the cell around 0, whole cells around s .. (q-1) s, then the tail.
    centers = s * np.arange(q, dtype=np.float64)
    lower = np.maximum(centers - s / 2, 0.0)
    half = (centers + s / 2 - lower) / 2
    x = (lower + half)[:, None] + half[:, None] * _NODES
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    inner = float(((x - centers[:, None]) ** 2 * density @ _WEIGHTS) @ half)
    edge = clip - s / 2
    tail_mass = 0.5 * math.erfc(edge / math.sqrt(2))
    edge_density = math.exp(-0.5 * edge * edge) / math.sqrt(2 * math.pi)
    tail = (1 + clip * clip) * tail_mass + (edge - 2 * clip) * edge_density
    return 2 * (inner + tail)


@lru_cache(maxsize=32)
def gaussian_clip(bits: int) -> float:
    """The clip, in standard deviations, that minimises the error on N(0, 1) (S11).

    2 bits 1.22, 4 bits 2.47, 8 bits 3.92. Golden-section search; the error has one minimum.
    Raises UserError for widths outside 2..16.
    """
    if not isinstance(bits, int) or not 2 <= bits <= 16:
        raise UserError(f"bits is {bits!r}; a whole number from 2 to 16 was expected")
    ratio = (math.sqrt(5) - 1) / 2
    low, high = 0.5, 9.0
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    f_left, f_right = gaussian_mse(left, bits), gaussian_mse(right, bits)
    while high - low > 1e-6:
        if f_left < f_right:
            high, right, f_right = right, left, f_left
            left = high - ratio * (high - low)
            f_left = gaussian_mse(left, bits)
        else:
            low, left, f_left = left, right, f_right
            right = low + ratio * (high - low)
            f_right = gaussian_mse(right, bits)
    return (low + high) / 2


@lru_cache(maxsize=32)
def gaussian_sqnr(bits: int) -> float:
    """Best signal-to-quantisation-noise ratio on N(0, 1) in dB (S11): 4 bits 18.9, 8 bits 40.5."""
    return -10 * math.log10(gaussian_mse(gaussian_clip(bits), bits))
