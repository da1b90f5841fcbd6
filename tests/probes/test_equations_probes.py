"""Equations S1-S8 and S10 recomputed in float64 numpy, independent of the package's code."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.nn import functional as F

from skipless import probes
from skipless.errors import UserError

RNG = np.random.default_rng(0)


def excess(x, axis=None):
    d = x - x.mean(axis, keepdims=True)
    return (d**4).mean(axis) / (d**2).mean(axis) ** 2 - 3


def haar(d):
    q, r = np.linalg.qr(RNG.standard_normal((d, d)))
    return q * np.sign(np.diag(r))


def test_s1_poolings():
    x = RNG.standard_t(5, (64, 32))
    t = torch.from_numpy(x)
    assert float(probes.excess_kurtosis(t)) == pytest.approx(excess(x), rel=1e-12)
    assert float(probes.excess_kurtosis(t, "per_token")) == pytest.approx(
        excess(x, 1).mean(), rel=1e-12
    )
    np.testing.assert_allclose(probes.excess_kurtosis(t, "per_channel"), excess(x, 0), rtol=1e-11)


def test_s2_channel_energy_is_in_1_to_d():
    x = RNG.standard_normal((50, 16)) * np.logspace(0, 2, 16)
    s = (x**2).mean(0)
    got = probes.batch_moments(torch.from_numpy(x)).channel_energy()
    assert got == pytest.approx(16 * (s**2).sum() / s.sum() ** 2, rel=1e-12)
    one = np.zeros((5, 16))
    one[:, 3] = 1.0
    assert probes.batch_moments(torch.from_numpy(one)).channel_energy() == pytest.approx(16)
    assert probes.batch_moments(torch.ones(5, 16)).channel_energy() == pytest.approx(1)


def test_s3_sqnr():
    x = RNG.standard_normal((8, 8))
    q = np.round(x * 4) / 4
    expected = 10 * np.log10((x**2).sum() / ((x - q) ** 2).sum())
    assert probes.sqnr(torch.from_numpy(x), torch.from_numpy(q)) == pytest.approx(expected)
    assert probes.sqnr(torch.ones(2), torch.ones(2)) == math.inf
    assert math.isnan(probes.sqnr(torch.zeros(2), torch.zeros(2)))
    assert math.isnan(probes.sqnr(torch.tensor([1.0, math.nan]), torch.ones(2)))
    with pytest.raises(UserError, match=r"\(2,\) with \(3,\)"):
        probes.sqnr(torch.ones(2), torch.ones(3))


def test_s4_dense_mixing_shrinks_kurtosis():
    d, n = 12, 150_000
    u = haar(d)
    x = RNG.laplace(size=(n, d))  # excess 3
    factor = probes.mixing_factor(torch.from_numpy(u)).numpy()
    np.testing.assert_allclose(factor, (u**4).sum(1), rtol=1e-12)
    np.testing.assert_allclose(excess(x @ u.T, 0), 3 * factor, atol=0.2)
    mean = np.mean([(haar(d)[0] ** 4).sum() for _ in range(2000)])
    assert mean == pytest.approx(probes.haar_mixing_factor(d), rel=0.04)
    assert probes.haar_mixing_factor(d) == 3 / (d + 2)


@pytest.mark.parametrize(
    ("name", "activation", "expected"),
    [
        ("erf GELU", F.gelu, 3.0847),
        ("ReLU", F.relu, 2.4076),
        ("tanh GELU", lambda z: F.gelu(z, approximate="tanh"), 3.0870),
        ("SiLU", F.silu, 3.0685),
        ("squared ReLU", lambda z: F.relu(z) ** 2, 22.32),
    ],
)
def test_s5_activations(name, activation, expected):
    got = probes.activation_moments(activation)
    assert got["excess_kurtosis"] == pytest.approx(expected, abs=6e-5), name
    sample = activation(torch.from_numpy(RNG.standard_normal(400_000))).numpy()
    assert got["mean"] == pytest.approx(sample.mean(), abs=0.01)
    assert got["variance"] == pytest.approx(sample.var(), rel=0.03)


def test_s5_gelu_moments_and_another_input_scale():
    got = probes.activation_moments(F.gelu)
    assert got["mean"] == pytest.approx(0.28209, abs=5e-6)
    assert got["variance"] == pytest.approx(0.34564, abs=5e-6)
    # I4: a GELU input of standard deviation 1.22 gives 2.87.
    wide = probes.activation_moments(F.gelu, input_std=1.5**0.5)
    assert wide["excess_kurtosis"] == pytest.approx(2.87, abs=0.01)


@pytest.mark.parametrize(("n", "expected"), [(64, 59.0), (512, 507.0), (768, 763.0)])
def test_s6_one_hot_rows(n, expected):
    row = np.zeros(n)
    row[0] = 1.0
    assert probes.one_hot_excess(n) == pytest.approx(excess(row), rel=1e-12)
    assert probes.one_hot_excess(n) == pytest.approx(expected, abs=0.02)


def test_s7_geometry_of_a_join():
    x = RNG.standard_normal((2, 40, 32)) * np.logspace(0, -1, 32)
    f = 0.5 * RNG.standard_normal((2, 40, 32)) - 0.3 * x
    got = probes.join_geometry(torch.from_numpy(x), torch.from_numpy(f))
    a, b = x.reshape(80, 32), f.reshape(80, 32)

    def norm(z):
        return np.sqrt((z**2).sum(1).mean())

    assert got["stream_norm"] == pytest.approx(norm(a), rel=1e-12)
    assert got["branch_norm"] == pytest.approx(norm(b), rel=1e-12)
    assert got["sum_norm"] == pytest.approx(norm(a + b), rel=1e-12)
    cancellation = ((a + b) ** 2).sum() / ((a**2).sum() + (b**2).sum())
    assert got["cancellation"] == pytest.approx(cancellation, rel=1e-12)
    va, vb = (np.linalg.svd(z, full_matrices=False)[2][:16].T for z in (a, b))
    angle = np.degrees(scipy.linalg.subspace_angles(va, vb)).mean()
    assert got["principal_angle"] == pytest.approx(angle, rel=1e-7)
    for prefix, z in (("", a + b), ("branch_", b)):
        s = np.linalg.svd(z, compute_uv=False)
        p = s / s.sum()
        assert got[prefix + "effective_rank"] == pytest.approx(
            np.exp(-(p * np.log(p)).sum()), rel=1e-9
        )
        share = (s[:4] ** 2).sum() / (s**2).sum()  # 10 % of 32, rounded up
        assert got[prefix + "spectrum_share"] == pytest.approx(share, rel=1e-9)
    similarity = []
    for sequence in x + f:
        unit = sequence / np.linalg.norm(sequence, axis=1, keepdims=True)
        cosine = unit @ unit.T
        similarity.append(cosine[~np.eye(40, dtype=bool)].mean())
    assert got["token_similarity"] == pytest.approx(np.mean(similarity), rel=1e-10)


def test_s8_independent_addition_contracts():
    x, f = RNG.laplace(size=(100_000, 4)), 2 * RNG.standard_t(9, size=(100_000, 4))
    gx, gf, vx, vf = excess(x), excess(f), x.var(), f.var()
    expected = (gx * vx**2 + gf * vf**2) / (vx + vf) ** 2
    assert probes.independent_sum_excess(gx, vx, gf, vf) == pytest.approx(expected, rel=1e-12)
    got = probes.join_geometry(torch.from_numpy(x), torch.from_numpy(f))
    assert got["kurtosis_independent"] == pytest.approx(expected, rel=1e-9)
    assert got["kurtosis_sum"] == pytest.approx(excess(x + f), rel=1e-10)
    assert got["kurtosis_sum"] == pytest.approx(expected, abs=0.1)
    assert abs(got["cross_cumulant_share"]) < 0.1


def test_s8_cross_cumulants_of_dependent_branches():
    x = RNG.laplace(size=(5000, 8))

    def fourth(z):
        return ((z - z.mean()) ** 4).mean() - 3 * z.var() ** 2

    got = probes.join_geometry(torch.from_numpy(x), torch.from_numpy(x))
    assert got["cross_cumulant_share"] == pytest.approx(14 / 16)  # kappa_4(2x) = 16 kappa_4(x)
    f = 0.5 * x**2 * np.sign(x)
    cross = fourth(x + f) - fourth(x) - fourth(f)
    expected = cross / (abs(fourth(x)) + abs(fourth(f)) + abs(cross))
    got = probes.join_geometry(torch.from_numpy(x), torch.from_numpy(f))
    assert got["cross_cumulant_share"] == pytest.approx(expected, rel=1e-9)


def test_s10_attention():
    logits = 4 * RNG.standard_normal((2, 3, 5, 5))
    p = np.exp(logits)
    p /= p.sum(-1, keepdims=True)
    p[0, 0, 2] = [0.0, 0.0, 0.995, 0.005, 0.0]
    got = probes.attention_statistics(torch.from_numpy(p))
    entropy = -(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0)).sum(-1)
    assert got["entropy"] == pytest.approx(entropy.mean(), rel=1e-12)
    np.testing.assert_allclose(got["entropy_per_head"], entropy.mean((0, 2)), rtol=1e-12)
    assert got["max_probability"] == pytest.approx(p.max(-1).mean(), rel=1e-12)
    assert got["first_token_mass"] == pytest.approx(p[..., 0].mean(), rel=1e-12)
    assert got["saturated"] == pytest.approx((p.max(-1) > 0.99).mean(), rel=1e-12)
    assert got["saturated"] > 0
    diagonal = np.diagonal(p, axis1=-2, axis2=-1)
    assert got["self_mass"] == pytest.approx(diagonal.mean(), rel=1e-12)


def test_o4_isometry():
    u = haar(24)
    assert probes.isometry_error(torch.from_numpy(u), 1.0) < 1e-12
    assert probes.isometry_error(torch.from_numpy(3 * u[:10])) < 1e-12
    w = RNG.standard_normal((10, 24))
    values = np.linalg.eigvalsh(w @ w.T)
    best = min(
        np.linalg.norm(w @ w.T / c - np.eye(10), 2)
        for c in np.linspace(values[0], values[-1], 2_001)
    )
    got = probes.isometry_error(torch.from_numpy(w))
    assert got == pytest.approx(best, rel=1e-3) and got <= best + 1e-12
    assert probes.isometry_error(torch.from_numpy(w), 2.0) == pytest.approx(
        np.linalg.norm(w @ w.T / 2 - np.eye(10), 2), rel=1e-10
    )


@pytest.mark.parametrize("d", [16, 64])
def test_o4_drift_of_polar_and_sign_steps(d):
    lr, w = 1e-3, haar(d)
    polar = probes.isometry_error(torch.from_numpy(w - lr * haar(d)), 1.0)
    assert polar <= probes.polar_step_bound(lr) * (1 + 1e-12)
    sign = probes.isometry_error(
        torch.from_numpy(w - lr * np.sign(RNG.standard_normal((d, d)))), 1.0
    )
    assert sign == pytest.approx(probes.sign_step_estimate(lr, d), rel=0.35)
    # -sign pattern aligned with W's own top direction: the rank-one worst case, up to 2 lr d.
    s = np.sign(RNG.standard_normal(d))
    flat = np.outer(s, np.ones(d))
    reflect = np.eye(d) - 2 * np.outer(v := s / np.sqrt(d) - np.ones(d) / np.sqrt(d), v) / (v @ v)
    worst = probes.isometry_error(torch.from_numpy(reflect + lr * flat), 1.0)
    assert worst == pytest.approx(2 * lr * d + (lr * d) ** 2, rel=1e-6)


def test_numbers_of_o4_at_full_size():
    assert probes.sign_step_estimate(5e-4, 768) == pytest.approx(0.039, abs=0.002)
