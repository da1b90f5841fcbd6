"""Statistics of one tensor and their theory: S1, S3, S4, S5, S6, S8. All in float64.

Read by users, by the tests of the equations and by `skipless.report` for yardsticks. The
streaming forms are in moments.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skipless.errors import UserError, check_choice
from skipless.probes.moments import Moments, batch_moments
from skipless.probes.rows import F64, as_rows, check_tensor

POOLINGS = ("pooled", "per_channel", "per_token")


def excess_kurtosis(x: Tensor, pooling: str = "pooled") -> Tensor:
    """S1: E[(x-mu)^4] / Var^2 - 3, population form, of a tensor [..., D].

    `pooled` over all tokens and channels and `per_token` (over channels, mean over the tokens that
    are not constant) return a float64 scalar; `per_channel` (over tokens) a float64 vector [D].
    Constant data has no kurtosis: NaN. A NaN or infinity in x makes every result NaN. Raises
    UserError for an unknown pooling, an empty or a non-floating tensor.
    """
    check_choice("pooling", pooling, POOLINGS)
    check_tensor(x)
    if x.numel() == 0:
        raise UserError(
            f"excess_kurtosis got an empty tensor of shape {tuple(x.shape)}; pass one with entries"
        )
    moments = batch_moments(x)
    if moments.nonfinite:
        width = x.shape[-1] if x.dim() else 1
        shape = (width,) if pooling == "per_channel" else ()
        return torch.full(shape, math.nan, dtype=F64, device=x.device)
    if pooling == "per_channel":
        return moments.kurtosis_per_channel()
    value = moments.kurtosis() if pooling == "pooled" else moments.kurtosis_per_token()
    return torch.tensor(value, dtype=F64)


def max_excess_kurtosis(n: int) -> float:
    """The largest excess kurtosis n samples can have, n - 5 + 1/(n-1): one value off, n-1 equal."""
    if n < 2:
        raise UserError(f"n is {n}; kurtosis needs at least 2 samples")
    return n - 5 + 1 / (n - 1)


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """S3: signal to quantisation noise, 10 log10(sum x^2 / sum (x - Q(x))^2), in dB.

    Infinite for an exact copy, NaN for 0 against 0 or non-finite input. Raises UserError for
    different shapes.
    """
    check_tensor(reference)
    check_tensor(approximation)
    if reference.shape != approximation.shape:
        raise UserError(
            f"sqnr compares {tuple(reference.shape)} with {tuple(approximation.shape)}; "
            "the shapes must be equal"
        )
    if reference.device != approximation.device:
        approximation = approximation.to(reference.device)
    x, q = as_rows(reference).to(F64), as_rows(approximation).to(F64)
    signal, noise = float(x.square().sum()), float((x - q).square().sum())
    return decibels(noise, signal)


def decibels(noise: float, signal: float) -> float:
    """S3: 10 log10(signal / noise) in dB; infinite without noise, NaN for 0 against 0."""
    if not (math.isfinite(noise) and math.isfinite(signal)) or noise == signal == 0:
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def mixing_factor(weights: Tensor) -> Tensor:
    """S4: sum a_i^4 / (sum a_i^2)^2 over the last dimension, float64 [...].

    y = sum a_i x_i of independent equal coordinates has excess kurtosis factor * g_x: 1 keeps it
    (one-hot row), 1/d is the least (equal weights). A Haar row has 3/(d+2) in expectation.
    """
    squares = weights.detach().to("cpu", F64).square()
    return squares.square().sum(-1) / squares.sum(-1).square()


def haar_mixing_factor(d: int) -> float:
    """S4: the expectation of sum a_i^4 over a uniform unit vector in d dimensions, 3/(d+2)."""
    return 3 / (d + 2)


def activation_moments(
    activation: Callable[[Tensor], Tensor], *, input_std: float = 1.0, num_points: int = 400_001
) -> dict[str, float]:
    """S5: mean, variance and excess kurtosis of activation(z), z ~ N(0, input_std^2).

    The trapezoidal rule on [-14, 14] standard deviations, with a node at the kink of ReLU;
    accurate to about 1e-9 for smooth and piecewise smooth activations.
    """
    z = torch.linspace(-14.0, 14.0, num_points | 1, dtype=F64)
    weight = torch.exp(-0.5 * z * z) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    y = activation(z * input_std)
    mean = float((weight * y).sum())
    centred = y - mean
    variance = float((weight * centred**2).sum())
    fourth = float((weight * centred**4).sum())
    excess = fourth / variance**2 - 3 if variance > 0 else math.nan
    return {"mean": mean, "variance": variance, "excess_kurtosis": excess}


def one_hot_excess(n: int) -> float:
    """S6: excess kurtosis of a one-hot row of length n, 1/(p(1-p)) - 6 with p = 1/n."""
    if n < 2:
        raise UserError(f"a one-hot row of length {n} is constant; expected at least 2")
    p = 1 / n
    return 1 / (p * (1 - p)) - 6


def independent_sum_excess(g_x: float, v_x: float, g_f: float, v_f: float) -> float:
    """S8: excess kurtosis of x + F if independent, (g_x v_x^2 + g_f v_f^2) / (v_x + v_f)^2."""
    return (g_x * v_x**2 + g_f * v_f**2) / (v_x + v_f) ** 2


def cross_cumulant_share(x: Moments, f: Moments, total: Moments) -> dict[str, float]:
    """S8 at a join: how much of the kurtosis of x + F comes from dependence.

    kappa_4(x+F) = kappa_4(x) + kappa_4(F) + C, pooled over tokens and channels, where C holds the
    joint cumulants and is 0 for independent x and F. Returns `kurtosis_sum` (measured g of x+F),
    `kurtosis_independent` (S8), and `cross_cumulant_share` = C / (|kappa_4(x)| + |kappa_4(F)| +
    |C|) in [-1, 1].
    """
    fourth, variance, excess = [], [], []
    for part in (x, f, total):
        n, _, m2, _, m4 = part.pooled()
        v = m2 / n if n else math.nan
        variance.append(v)
        fourth.append((m4 / n if n else math.nan) - 3 * v * v)
        excess.append(part.kurtosis())
    cross = fourth[2] - fourth[0] - fourth[1]
    size = abs(fourth[0]) + abs(fourth[1]) + abs(cross)
    # Straight from the fourth cumulants, so that a constant branch (no kurtosis) still has a value.
    whole = (variance[0] + variance[1]) ** 2
    return {
        "kurtosis_sum": excess[2],
        "kurtosis_independent": (fourth[0] + fourth[1]) / whole if whole > 0 else math.nan,
        "cross_cumulant_share": cross / size if size > 0 else math.nan,
    }
