"""Muon: the orthogonal factor against the exact SVD, scale rules, batching."""

import numpy as np
import pytest
import torch

from skipless.errors import UserError
from skipless.optim import Muon, orthogonalize
from skipless.optim.describe import isometry_drift
from skipless.optim.muon import scale_factor


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 5, 8), (1, 6, 6)])
def test_svd_mode_is_the_polar_factor(shape):
    x = randn(*shape)
    u, _, vt = np.linalg.svd(x.double().numpy(), full_matrices=False)
    assert np.abs(orthogonalize(x, coefficients="svd").numpy() - u @ vt).max() < 1e-5


@pytest.mark.parametrize(
    "coefficients, steps, low, high",
    [("keller", 5, 0.3, 1.35), ("convergent", 25, 0.999, 1.001), ("polar_express", 9, 0.98, 1.02)],
)
def test_newton_schulz_flattens_singular_values(coefficients, steps, low, high):
    x = randn(2, 40, 24)
    y = orthogonalize(x, coefficients=coefficients, steps=steps)
    values = torch.linalg.svdvals(y)
    assert values.min() > low and values.max() < high
    exact = orthogonalize(x, coefficients="svd")
    cosine = (y * exact).sum() / (y.norm() * exact.norm())
    assert cosine > 0.95


def test_polar_express_needs_fewer_steps():
    x = randn(1, 64, 64)

    def error(coefficients):
        values = torch.linalg.svdvals(orthogonalize(x, coefficients=coefficients, steps=6))
        return (values - 1).abs().mean().item()

    assert error("polar_express") < error("convergent")


def test_zero_and_rank_one_matrices():
    assert orthogonalize(torch.zeros(1, 4, 3)).abs().max() == 0
    assert orthogonalize(torch.zeros(1, 4, 3), coefficients="svd").abs().max() == 0
    rank_one = torch.outer(randn(6), randn(4)).unsqueeze(0)
    values = torch.linalg.svdvals(orthogonalize(rank_one, coefficients="svd"))
    assert torch.allclose(values, torch.tensor([[1.0, 0, 0, 0]]), atol=1e-5)


def test_scale_rules():
    assert scale_factor("keller", 8, 2) == 2 and scale_factor("keller", 2, 8) == 1
    assert scale_factor("spectral", 8, 2) == 2 and scale_factor("spectral", 2, 8) == 0.5
    update = orthogonalize(randn(1, 32, 8), coefficients="svd") * scale_factor("rms", 32, 8)
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-4)
    with pytest.raises(UserError, match="rms"):
        scale_factor("rmss", 2, 2)


def test_one_step_is_nesterov_then_polar():
    p = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Muon([p], lr=0.1, weight_decay=0.0, coefficients="svd", scale="spectral")
    first, second = randn(6, 4, seed=1), randn(6, 4, seed=2)
    expected, buffer = np.zeros((6, 4)), np.zeros((6, 4))
    for g in (first, second):
        p.grad = g
        optimizer.step()
        g = g.double().numpy()
        buffer = 0.95 * buffer + 0.05 * g
        u, _, vt = np.linalg.svd(0.05 * g + 0.95 * buffer, full_matrices=False)
        expected -= 0.1 * np.sqrt(6 / 4) * u @ vt
    assert np.abs(p.detach().numpy() - expected).max() < 1e-5


def test_batching_changes_nothing():
    one = [torch.nn.Parameter(randn(6, 4, seed=k)) for k in range(3)]
    apart = [torch.nn.Parameter(p.detach().clone()) for p in one]
    together = Muon(one, lr=0.1)
    singles = [Muon([p], lr=0.1) for p in apart]
    for t in range(3):
        for k in range(3):
            one[k].grad = apart[k].grad = randn(6, 4, seed=10 * t + k)
        together.step()
        for optimizer in singles:
            optimizer.step()
    for a, b in zip(one, apart, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_fused_qkv_is_split_on_request():
    weight = torch.nn.Parameter(torch.zeros(12, 4))
    optimizer = Muon([("attn.qkv.weight", weight)], split={"qkv": 3}, coefficients="svd", lr=1.0,
                     scale="spectral", weight_decay=0.0)  # fmt: skip
    weight.grad = randn(12, 4)
    optimizer.step()
    for part in weight.detach().split(4):
        assert torch.allclose(part @ part.T, torch.eye(4), atol=1e-4)
    with pytest.raises(UserError, match="part of no parameter"):
        Muon([("attn.q.weight", weight)], split={"qkv": 3})


def test_isometry_drift_of_a_polar_step():
    """O4: at most 2 lr + lr^2, whatever the width."""
    for width in (8, 64):
        w = torch.linalg.qr(randn(width, width)).Q
        step = orthogonalize(randn(1, width, width, seed=1), coefficients="svd")[0]
        drift = isometry_drift(w, w - 0.01 * step)
        assert 0.5 * 0.02 < drift <= 0.02 + 0.01**2 + 1e-5
    sign = randn(64, 64, seed=2).sign()
    assert isometry_drift(w, w - 0.01 * sign) > 5 * drift
