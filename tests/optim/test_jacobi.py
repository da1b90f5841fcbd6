"""root="jacobi": eigenbases by matrix products alone, against float64 eigendecompositions."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from skipless.optim import KLSOAP, SOAP, KLShampoo, Shampoo
from skipless.optim.roots import in_descending_order, jacobi_angles, jacobi_step, power_step
from skipless.optim.sides import FIRST_SWEEPS, FullSide

CLASSES = [KLShampoo, KLSOAP, SOAP, Shampoo]


def spd(values, seed=0):
    """Symmetric [1, d, d], float32, of these eigenvalues, and its basis in float64."""
    g = torch.Generator().manual_seed(seed)
    d = len(values)
    q = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    s = (q * torch.as_tensor(values, dtype=torch.float64)) @ q.mT
    return ((s + s.mT) / 2).float().unsqueeze(0), q


def drift(q):
    """Largest entry of Q^T Q - I, in float64."""
    q = q.double()
    return (q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max().item()


def correlation(s):
    """Largest |s_ij| / sqrt(l_i l_j) off the diagonal."""
    scale = s.diagonal(dim1=-2, dim2=-1).rsqrt()
    c = s * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return (c - torch.diag_embed(c.diagonal(dim1=-2, dim2=-1))).abs().max().item()


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 40), decades=st.floats(0, 3), seed=st.integers(0, 99))
def test_refreshes_of_a_fixed_factor_end_at_its_eigenbasis(d, decades, seed):
    values = np.random.default_rng(seed).permutation(np.logspace(0, -decades, d))
    s, _ = spd(values, seed)
    q, turned = in_descending_order(*jacobi_step(s, FIRST_SWEEPS))
    for _ in range(6):
        turn, turned = jacobi_step(q.mT @ s @ q)
        q = q @ turn
    assert drift(q) < 1e-5
    exact = (q.mT.double() @ s.double() @ q.double())[0]
    # float32 keeps eigenvalues to some 1e-7 of the largest, so correlations to 1e-7 of the ratio.
    assert correlation(exact) < max(1e-3, 1e-6 * 10**decades)
    found = exact.diagonal().sort(descending=True).values
    truth = np.linalg.eigvalsh(s[0].double().numpy())[::-1].copy()
    assert (found - torch.from_numpy(truth)).abs().max() < 1e-5 * truth[0]
    assert torch.allclose(turned[0].double(), exact, atol=1e-5 * truth[0])


def awkward():
    """Name and factor [1, d, d]: what a first refresh must survive."""
    d = 24
    padded = torch.zeros(1, d, d)
    padded[:, :17, :17] = spd(np.logspace(0, -2, 17))[0]
    v = torch.randn(d, generator=torch.Generator().manual_seed(1))
    return {
        "zero": torch.zeros(1, d, d),
        "rank 1": torch.outer(v, v).unsqueeze(0),
        "all ones": torch.ones(1, d, d),
        "condition 1e12": spd(np.logspace(0, -12, d))[0],
        "badly scaled rows": spd(np.ones(d) + 0.5)[0] * torch.logspace(0, -12, d),
        "tiny": 1e-30 * spd(np.logspace(0, -2, d))[0],
        "huge": 1e30 * spd(np.logspace(0, -2, d))[0],
        "identity": torch.eye(d).unsqueeze(0),
        "one cluster": spd(1 + 1e-6 * np.arange(d))[0],
        "padded": padded,
    }


@pytest.mark.parametrize("name", list(awkward()))
def test_awkward_factors(name):
    s = awkward()[name]
    if name == "badly scaled rows":
        rows = torch.logspace(0, -6, s.shape[-1])
        s = rows.unsqueeze(-1) * spd(np.linspace(1, 2, s.shape[-1]))[0] * rows
    q, turned = jacobi_step(s, FIRST_SWEEPS)
    assert q.isfinite().all() and turned.isfinite().all() and drift(q) < 1e-5
    exact = q.mT.double() @ s.double() @ q.double()
    size = max(s.double().diagonal(dim1=-2, dim2=-1).mean().item(), 1e-38)
    off = exact - torch.diag_embed(exact.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 2e-3 * size
    if name == "padded":
        assert torch.equal(q[:, 17:, 17:], torch.eye(7).expand(1, 7, 7)) or (
            drift(q[:, :17, :17]) < 1e-5 and q[:, 17:, :17].abs().max() == 0
        )
    if name in ("zero", "identity"):
        assert torch.allclose(q, torch.eye(s.shape[-1]), atol=1e-6)


def test_angles_are_jacobis_to_first_order():
    """X_ij = s_ij / (l_j - l_i) where the rest is small, and at most 45 degrees for one pair."""
    values = torch.tensor([5.0, 1.0, 3.0])
    e = torch.tensor([[0.0, 2, 1], [2, 0, -1], [1, -1, 0]]) * 1e-5
    x = jacobi_angles((torch.diag(values) + e).unsqueeze(0))[0]
    expected = e / (values - values.unsqueeze(-1)).fill_diagonal_(1)
    assert torch.allclose(x, expected, rtol=1e-4, atol=1e-12)
    for a in (0.01, 0.5, 1.0, 1.5):
        pair = torch.tensor([[[1.0, 0.9 * a**0.5], [0.9 * a**0.5, a]]])
        x = jacobi_angles(pair)
        assert torch.equal(x, -x.mT) and 0 < x.abs().max() <= 1


def test_errors_shrink_quadratically():
    s, q = spd(np.logspace(0, -2, 12))
    q = q.float().unsqueeze(0)
    g = torch.Generator().manual_seed(2)
    sizes = []
    for size in (1e-2, 1e-3):
        skew = torch.randn(12, 12, generator=g) * size
        near = torch.linalg.matrix_exp(skew - skew.mT)
        sizes.append(correlation(jacobi_step((q @ near).mT @ s @ (q @ near))[1]))
    assert sizes[1] < 0.03 * sizes[0]


def test_close_eigenvalues_separate_faster_than_by_power_steps():
    s, q = spd(np.linspace(2.0, 1.0, 16))
    skew = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 0.02
    start = q.float() @ torch.linalg.matrix_exp(skew - skew.mT)
    near = start.mT @ s @ start
    qr, _ = power_step(near)
    assert correlation(jacobi_step(near)[1]) < 0.2 * correlation(qr.mT @ near @ qr)


@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(-24, 24), d=st.integers(1, 12))
def test_the_turn_ignores_the_factors_scale(exponent, d):
    s, _ = spd(np.logspace(0, -2, d))
    plain, scaled = jacobi_step(s, 3)[0], jacobi_step(s * 4.0**exponent, 3)[0]
    assert torch.equal(plain, scaled)


def test_nothing_is_read_back_by_the_host():
    """Tensors without data fail at the first read."""
    q, turned = in_descending_order(*jacobi_step(torch.empty(3, 8, 8, device="meta"), 2))
    assert q.shape == turned.shape == (3, 8, 8)


@pytest.mark.slow
def test_compiles_as_one_graph():
    s = torch.cat([spd(np.logspace(0, -2, 8), seed)[0] for seed in range(3)])
    compiled = torch.compile(jacobi_step, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(s, 2)[0], jacobi_step(s, 2)[0], atol=1e-6)


# ---- inside the optimisers ------------------------------------------------------------------


def gradients(count, m, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    left = torch.randn(m, m, generator=g)
    return [left @ torch.randn(m, n, generator=g) / m**0.5 for _ in range(count)]


def run(optimizer, p, grads):
    for g in grads:
        p.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("packed", [False, True])
def test_products_alone(cls, packed, monkeypatch):
    """No decomposition is called, in the first refresh either; blocks with padding among them."""

    def refuse(*_, **__):
        raise AssertionError("a decomposition was called")

    for where, name in (
        *((torch.linalg, n) for n in ("eigh", "qr", "svd", "cholesky", "inv", "solve")),
        (torch, "geqrf"),
    ):
        monkeypatch.setattr(where, name, refuse)
    p = nn.Parameter(torch.zeros(11, 7))
    optimizer = cls([p], lr=1e-2, root="jacobi", block_size=6, packed=packed)
    run(optimizer, p, gradients(25, 11, 7))
    assert p.isfinite().all() and p.abs().max() > 1e-2
    for side in ("left", "right"):
        assert drift(optimizer.state[p][f"{side}_basis"]) < 1e-5


@pytest.mark.parametrize("cls", CLASSES)
def test_close_to_exact_eigenvectors(cls):
    """The run of the QR power steps; in the SOAP forms, closer than that to the run with exact
    eigenvectors at every refresh."""
    ends, exact = {}, cls in (SOAP, KLSOAP)
    for root in ("qr", "jacobi", "eigh") if exact else ("qr", "jacobi"):
        p = nn.Parameter(torch.zeros(12, 8))
        run(cls([p], lr=1e-2, root=root, weight_decay=0.0), p, gradients(60, 12, 8))
        ends[root] = p.detach()
    truth = ends["eigh"] if exact else ends["qr"]
    gap = (ends["jacobi"] - truth).norm() / truth.norm()
    assert gap < 0.05
    assert not exact or gap < 0.9 * (ends["qr"] - truth).norm() / truth.norm()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("first, second", [("qr", "jacobi"), ("jacobi", "qr")])
def test_a_run_is_continued_with_the_other_root(cls, first, second):
    """Other bases whiten a little otherwise: the continued run lies no further from the first
    than a whole run with the other root does."""
    grads = gradients(90, 10, 6)
    alone = nn.Parameter(torch.zeros(10, 6))
    run(cls([alone], lr=1e-2, root=second), alone, grads)
    p = nn.Parameter(torch.zeros(10, 6))
    optimizer = cls([p], lr=1e-2, root=first)
    run(optimizer, p, grads[:33])
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    q = copy.deepcopy(p)
    other = cls([q], lr=1e-2, root=second)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    run(optimizer, p, grads[33:])
    run(other, q, grads[33:])
    assert set(other.state[q]) == set(optimizer.state[p])
    assert 0 < (p - q).norm() < 1.2 * (p - alone).norm() < 0.15 * p.norm()


def test_auto_takes_products_where_decompositions_are_loops():
    p = nn.Parameter(torch.zeros(6, 4))
    optimizer = KLShampoo([p], lr=1e-2)
    named = {d: optimizer._basis(torch.device(d)) for d in ("cpu", "mps", "cuda")}
    assert named == {"cpu": "qr", "mps": "qr", "cuda": "jacobi"}
    assert "on cpu: a basis is refreshed by one QR power step" in optimizer.describe()
    jacobi = KLShampoo([p], lr=1e-2, root="jacobi")
    assert "on cpu: a basis is refreshed by Jacobi sweeps" in jacobi.describe()
    run(jacobi, p, gradients(2, 6, 4))
    sides = next(iter(jacobi._buckets.values()))[0].sides
    assert all(isinstance(side, FullSide) and side.method == "jacobi" for side in sides)
