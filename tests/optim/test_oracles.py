"""The whitening optimisers against float64 numpy and against what the mathematics promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.optim import KLSOAP, SOAP, KLShampoo, Shampoo


def gradients(count, m, n, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    left = torch.randn(m, m, generator=g, dtype=torch.float64)
    return [
        scale * (left @ torch.randn(m, n, generator=g, dtype=torch.float64) / m**0.5)
        for _ in range(count)
    ]


def weights_after(cls, grads, start, **options):
    p = torch.nn.Parameter(start.clone().float())
    optimizer = cls([p], **options)
    for g in grads:
        p.grad = g.to(p.dtype)
        optimizer.step()
    return p.detach().double(), optimizer, p


def numpy_reference(grads, w, *, lr, b1, b2, eps, decay, every=10):
    """O1's seven steps in float64, written from the equations alone."""
    state = None
    for t, g in enumerate(grads, start=1):
        m, n = g.shape
        if state is None:
            left, right = (1 - b2) * g @ g.T / n, (1 - b2) * g.T @ g / m
            ql, qr = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
            state = [left, right, ql, qr, np.full(m, 0.1), np.full(n, 0.1), (1 - b1) * g]
            continue
        left, right, ql, qr, ll, lr_, mom = state
        mom = b1 * mom + (1 - b1) * g
        sl = np.minimum(ll**-0.5, max(10, min(m, 4000)))
        sr = np.minimum(lr_**-0.5, max(10, min(n, 4000)))
        s = np.outer(sl, sr)
        w = w - lr * (ql @ ((ql.T @ mom @ qr) * (s / (1 + eps * s))) @ qr.T)
        w = w * (1 - lr * decay)
        new_left = b2 * left + (1 - b2) / n * g @ (qr @ np.diag(1 / lr_) @ qr.T) @ g.T
        new_right = b2 * right + (1 - b2) / m * g.T @ (ql @ np.diag(1 / ll) @ ql.T) @ g
        sq = (ql.T @ g @ qr) ** 2
        new_ll = b2 * ll + (1 - b2) * (sq / lr_[None, :]).mean(1)
        new_lr = b2 * lr_ + (1 - b2) * (sq / ll[:, None]).mean(0)
        if t % every == 0:
            ql, qr = np.linalg.qr(new_left @ ql)[0], np.linalg.qr(new_right @ qr)[0]
        state = [new_left, new_right, ql, qr, new_ll, new_lr, mom]
    return w


def numpy_default(grads, w, *, lr, b1, b2, decay, every=10):
    """The default mode in the original frame, float64: one block, eps 0."""
    m, n = grads[0].shape
    rms = np.sqrt((grads[0] ** 2).mean())
    left, right, mom = rms * np.eye(m), rms * np.eye(n), np.zeros((m, n))
    ql, qr = np.eye(m), np.eye(n)
    for t, g in enumerate(grads, start=1):
        ll, lr_ = np.diag(ql.T @ left @ ql), np.diag(qr.T @ right @ qr)
        sl = 1 / np.sqrt(np.maximum(ll, ll.mean() / max(10, m) ** 2))
        sr = 1 / np.sqrt(np.maximum(lr_, lr_.mean() / max(10, n) ** 2))
        mom = b1 * mom + (1 - b1) * g
        u = ql @ ((ql.T @ mom @ qr) / (1 - b1**t) * np.outer(sl, sr)) @ qr.T
        w = (w - lr * u) * (1 - lr * decay)
        a, b = g @ qr * sr, (ql * sl).T @ g
        left = b2 * left + (1 - b2) / n * a @ a.T
        right = b2 * right + (1 - b2) / m * b.T @ b
        if t % every == 0:
            c = np.sqrt(np.trace(right) / n / (np.trace(left) / m))
            left, right = c * left, right / c
            if t <= every:
                ql, qr = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
            else:
                ql, qr = np.linalg.qr(left @ ql)[0], np.linalg.qr(right @ qr)[0]
    return w


@pytest.mark.parametrize("every", [10, 3])
def test_reference_mode_is_the_seven_steps(every):
    grads = gradients(50, 8, 8)
    start = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    ours, *_ = weights_after(
        KLShampoo, grads, start, lr=1e-3, betas=(0.9, 0.98), reference=True, weight_decay=0.01,
        refresh_every=every,
    )  # fmt: skip
    theirs = numpy_reference(
        [g.numpy() for g in grads], start.double().numpy(),
        lr=1e-3, b1=0.9, b2=0.98, eps=1e-8, decay=0.01, every=every,
    )  # fmt: skip
    assert np.abs(ours.numpy() - theirs).max() < 1e-5
    assert np.abs(theirs - start.double().numpy()).max() > 1e-3  # it went somewhere


@pytest.mark.parametrize("m, n", [(8, 8), (12, 7)])
def test_default_mode_equals_float64(m, n):
    grads, start = gradients(50, m, n), torch.zeros(m, n)
    ours, *_ = weights_after(
        KLShampoo, grads, start, lr=1e-3, betas=(0.9, 0.95), eps=0.0, weight_decay=0.01
    )
    theirs = numpy_default(
        [g.numpy() for g in grads], np.zeros((m, n)), lr=1e-3, b1=0.9, b2=0.95, decay=0.01
    )
    assert np.abs(ours.numpy() - theirs).max() < 1e-5


@pytest.mark.parametrize("root", ["qr", "jacobi", "eigh", "newton"])
def test_kl_recovers_a_kronecker_covariance(root):
    g = torch.Generator().manual_seed(0)
    m, n = 6, 5
    a, b = (torch.randn(d, d, generator=g, dtype=torch.float64) for d in (m, n))
    grads = [a @ torch.randn(m, n, generator=g, dtype=torch.float64) @ b.T for _ in range(1500)]
    _, optimizer, p = weights_after(
        KLShampoo, grads, torch.zeros(m, n), lr=0.0, betas=(0.9, 0.998), root=root
    )
    state = optimizer.state[p]
    for side, truth in (("left", a @ a.T), ("right", b @ b.T)):
        found = state[side][0].double()
        found = found.tril() + found.tril(-1).T
        if root in ("qr", "jacobi"):
            basis = state[f"{side}_basis"][0].double()
            found = basis @ found @ basis.T
        found, truth = found / found.trace(), truth / truth.trace()
        assert (found - truth).norm() / truth.norm() < 0.1


@pytest.mark.parametrize("root", ["qr", "jacobi"])
@settings(max_examples=12, deadline=None)
@given(exponent=st.integers(-20, 20), m=st.integers(1, 9), n=st.integers(1, 9))
def test_default_direction_ignores_the_gradient_scale(root, exponent, m, n):
    grads, start = gradients(25, m, n, seed=m * 10 + n), torch.zeros(m, n)
    options = {"lr": 1e-2, "eps": 0.0, "weight_decay": 0.0, "root": root}
    plain, *_ = weights_after(KLShampoo, grads, start, **options)
    # A power of two changes exponents only, so nothing but a scale dependence can differ.
    scaled, *_ = weights_after(KLShampoo, [g * 4.0**exponent for g in grads], start, **options)
    assert torch.allclose(plain, scaled, atol=1e-5)


@pytest.mark.parametrize("cls", [KLShampoo, Shampoo])
def test_rotating_the_gradients_rotates_the_weights(cls):
    m, n = 7, 5
    grads, g = gradients(30, m, n), torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q for d in (m, n))
    options = {"lr": 1e-2, "root": "eigh", "weight_decay": 0.0, "eps": 0.0}
    plain, *_ = weights_after(cls, grads, torch.zeros(m, n), **options)
    turned, *_ = weights_after(cls, [u @ g @ v.T for g in grads], torch.zeros(m, n), **options)
    assert torch.allclose(u @ plain @ v.T, turned, atol=2e-5)


@pytest.mark.parametrize("root", ["qr", "jacobi"])
@pytest.mark.parametrize("cls", [KLShampoo, KLSOAP, SOAP, Shampoo])
def test_blocks_are_matrices_of_their_own(cls, root):
    grads, options = gradients(25, 8, 6), {"lr": 1e-2, "root": root}
    whole, *_ = weights_after(cls, grads, torch.zeros(8, 6), block_size=None, **options)
    one, *_ = weights_after(cls, grads, torch.zeros(8, 6), block_size=8, **options)
    assert torch.equal(whole, one)
    blocked, *_ = weights_after(cls, grads, torch.zeros(8, 6), block_size=4, **options)
    # Blocks 4 x 3 alone, each at the phase it had inside: same numbers as in the batch.
    parts = [torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(4)]
    optimizer = cls(parts, block_size=None, **options)
    for g in grads:
        for k, p in enumerate(parts):
            i, j = divmod(k, 2)
            p.grad = g[4 * i : 4 * i + 4, 3 * j : 3 * j + 3].float().contiguous()
        optimizer.step()
    joined = torch.cat([torch.cat([p.detach() for p in parts[2 * i : 2 * i + 2]], 1)
                        for i in range(2)]).double()  # fmt: skip
    assert torch.allclose(blocked, joined, atol=1e-6)


def test_padding_changes_nothing():
    """11 rows in blocks of 6 are padded to 12; the 5 real rows behave as a matrix of 5 rows."""
    grads = gradients(8, 11, 4)
    padded, *_ = weights_after(KLShampoo, grads, torch.zeros(11, 4), lr=1e-2, block_size=6)
    alone = torch.nn.Parameter(torch.zeros(5, 4))
    other = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = KLShampoo([other, alone], lr=1e-2, block_size=6)
    for g in grads:
        other.grad, alone.grad = g[:6].float(), g[6:].float()
        optimizer.step()
    assert torch.allclose(padded[:6], other.detach().double(), atol=1e-6)
    assert torch.allclose(padded[6:], alone.detach().double(), atol=2e-3)


@pytest.mark.parametrize("root", ["qr", "jacobi", "eigh"])
def test_second_moment_follows_its_direction(root):
    """Diagonal gradients have axes as eigenvectors, and their order by strength changes half way:
    in the original axes the second moment must still be the average of the squares."""
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = SOAP([p], lr=0.0, betas=(0.9, 0.9), refresh_every=5, root=root)
    average, orders = torch.zeros(4, 4), set()
    for t in range(60):
        strength = torch.tensor([8.0, 4, 2, 1] if t < 30 else [1.0, 2, 4, 8])
        p.grad = torch.diag(strength * (1 + torch.rand(4, generator=g)))
        average = 0.9 * average + 0.1 * p.grad.square()
        optimizer.step()
        state = optimizer.state[p]
        left, right = state["left_basis"][0].square(), state["right_basis"][0].square()
        orders.add(tuple(right.argmax(0).tolist()))
        assert torch.allclose(left @ state["second"][0] @ right.T, average, atol=1e-3 * 64)
    assert root != "eigh" or len(orders) > 1  # eigh did re-sort


def test_newton_and_eigh_roots_agree():
    grads = gradients(40, 20, 12)
    eigh, *_ = weights_after(KLShampoo, grads, torch.zeros(20, 12), lr=1e-2, root="eigh")
    newton, *_ = weights_after(KLShampoo, grads, torch.zeros(20, 12), lr=1e-2, root="newton")
    assert torch.allclose(eigh, newton, atol=5e-3)
    assert eigh.abs().max() > 0.05


def test_low_rank_side_finds_the_strong_directions():
    g = torch.Generator().manual_seed(0)
    strong = torch.linalg.qr(torch.randn(60, 3, generator=g)).Q
    p = torch.nn.Parameter(torch.zeros(60, 5))
    optimizer = KLShampoo(
        [p], lr=0.0, betas=(0.9, 0.95), block_size=None, max_side=50, wide="low_rank", rank=3
    )
    for _ in range(100):
        p.grad = 10 * strong @ torch.randn(3, 5, generator=g) + torch.randn(60, 5, generator=g)
        optimizer.step()
    found = optimizer.state[p]["left_vectors"][0]
    assert torch.linalg.svdvals(strong.T @ found).min() > 0.95
    assert "low_rank x eigenbasis" in optimizer.describe()


@pytest.mark.parametrize("root", ["qr", "jacobi"])
@pytest.mark.parametrize("wide", ["diagonal", "identity", "low_rank"])
@pytest.mark.parametrize("cls", [KLShampoo, KLSOAP, SOAP, Shampoo])
def test_wide_sides_whiten_what_they_can(cls, wide, root):
    grads = gradients(30, 40, 4)
    moved, optimizer, p = weights_after(
        cls, grads, torch.zeros(40, 4), lr=1e-2, block_size=None, max_side=20, wide=wide, rank=4,
        root=root,
    )  # fmt: skip
    assert moved.isfinite().all() and moved.abs().max() > 1e-3
    assert all(t.numel() <= 40 * 5 for t in optimizer.state[p].values())  # no 40 x 40 anywhere


@pytest.mark.parametrize("cls", [KLShampoo, KLSOAP, SOAP, Shampoo])
def test_update_rms_is_what_was_asked(cls):
    before, *_ = weights_after(cls, gradients(11, 9, 5), torch.zeros(9, 5), lr=1.0, update_rms=0.2,
                               weight_decay=0.0)  # fmt: skip
    after, *_ = weights_after(cls, gradients(12, 9, 5), torch.zeros(9, 5), lr=1.0, update_rms=0.2,
                              weight_decay=0.0)  # fmt: skip
    assert (after - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-4)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"root": "qrr"}, "did you mean 'qr'"),
        ({"refresh_every": 0}, "at least 1"),
        ({"update_rms": -1.0}, "update_rms is -1.0"),
        ({"lr": float("nan")}, "finite"),
        ({"betas": (0.9, 1.0)}, "decays"),
        ({"start": "published"}, "reference=True"),
        ({"reference": True, "rank": 8}, "where rank has no effect"),
        ({"reference": True, "one_sided": True}, "where one_sided has no effect"),
        ({"root": "eigh", "packed": True}, "packed=True needs eigenbases"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_bad_options_are_named(options, word):
    p = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(UserError, match=word):
        optimizer = KLShampoo([p], **options)
        p.grad = torch.ones(3, 3)
        optimizer.step()
