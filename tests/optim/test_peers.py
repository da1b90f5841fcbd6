"""Our SOAP, KL-SOAP and KL-Shampoo against HeavyBall 3.2.1 and pytorch-optimizer 4.1.0.

What differs by design, and how each is taken out:

    start        theirs: eigenvectors of the first gradient, no update on it (KL-Shampoo: 0.1 I);
                 ours: the first gradient's scale times I. So a peer runs alone for 200 steps, its
                 state is put into ours, and both go on from there.
    bias         theirs of HeavyBall sits in the averages' weights, ours in a factor, and they count
                 one step less: all gone after 200 steps at decays 0.9 and 0.95.
    eps, clamp   ours relative to the mean eigenvalue, theirs absolute: eps is 1e-12, and the
                 gradients' covariance stays inside our clamp (100 below the mean).
    KL balance   HeavyBall rebalances its factors by largest entry, we by trace: (cL, R/c) is the
                 same preconditioner, nothing to take out.
    column order theirs are sorted before QR, ours not: we take them over sorted, and the spectrum
                 is spread (factors of 3) so that they stay in order.
    factor size  SOAP's are sums over the other side in the peers, means in ours: divided once.
    QR shift     HeavyBall adds 5e-5 of the largest eigenvalue before QR: stays in, sets TIGHT.
    second moment when a basis turns: ours is carried over by squared entries (HeavyBall's "Heavy"
                 classes too), HeavyBall's SOAP and pytorch-optimizer's leave it (the latter
                 permutes it with sorted columns). The one real difference, measured below.
"""

import re

import pytest
import torch
from torch import Tensor

from skipless.optim import KLSOAP, SOAP, KLShampoo

M, N, WARM, MORE, LR = 5, 3, 200, 30, 1e-2
BETAS = (0.9, 0.95)
TIGHT = 1e-4
"""Largest difference of two paths over their length where rounding and the QR shift are left.
Measured: 4e-6 (KL-Shampoo), 9e-6 (KL-SOAP), 5e-7 (pytorch-optimizer)."""
UNTURNED = 0.03
"""The same where the peer leaves the second moment in the old basis. Measured: 0.010 to 0.015."""


def gradients() -> list[Tensor]:
    """A Z B with Z white: covariances with eigenvalues 1, 1/3, 1/9, ..., in random directions."""
    g = torch.Generator().manual_seed(0)
    sides = []
    for dim in (M, N):
        turn = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
        sides.append(turn * 3.0 ** (-0.5 * torch.arange(dim)))
    return [sides[0] @ torch.randn(M, N, generator=g) @ sides[1].T for _ in range(WARM + MORE)]


def step(optimizer, p: Tensor, g: Tensor) -> None:
    p.grad = g.clone()
    optimizer.step()


def take_over(cls, p: Tensor, found: dict):
    """One of our optimisers that goes on at `p` with a peer's state: "factors" and "bases" (left,
    right), "momentum" in the original frame, "second" in the bases."""
    mine = torch.nn.Parameter(p.detach().clone())
    optimizer = cls(
        [mine], lr=0.0, betas=BETAS, eps=1e-12, weight_decay=0.0, block_size=None, refresh_every=1
    )
    step(optimizer, mine, torch.randn(M, N))  # allocates; lr is 0
    state, bases, orders = optimizer.state[mine], [], []
    others = (N, M) if cls is SOAP else (1, 1)
    for side, factor, basis, other in zip(
        ("left", "right"), found["factors"], found["bases"], others, strict=True
    ):
        factor = factor / other
        order = (basis.T @ factor @ basis).diagonal().argsort(descending=True)
        basis = basis[:, order]
        state[f"{side}_basis"].copy_(basis)
        state[side].copy_(basis.T @ factor @ basis)
        bases.append(basis)
        orders.append(order)
    state["momentum"].copy_(bases[0].T @ found["momentum"] @ bases[1])
    if "second" in found:
        state["second"].copy_(found["second"][orders[0]][:, orders[1]])
    state["step"].fill_(WARM)
    for group in optimizer.param_groups:
        group["lr"] = LR
    return optimizer, mine


def difference(start: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| over the length of their path."""
    return float((ours - theirs).norm() / (theirs - start).norm())


# --- HeavyBall ------------------------------------------------------------------------------------


def entry(tree, name: str):
    """The one entry called `name` in HeavyBall's nested state, bucket axis off."""
    hits = []

    def walk(node):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value)
            elif re.fullmatch(rf".*_{name}_\d+", str(key)):
                hits.append(value)

    walk(tree)
    assert len(hits) == 1, (name, len(hits))
    return [x[0] for x in hits[0]] if isinstance(hits[0], (list, tuple)) else hits[0].view(M, N)


def heavyball_paths(cls, name: str, **options) -> float:
    """Difference of 30 steps by our `cls` and HeavyBall's `name` from HeavyBall's state."""
    heavyball = pytest.importorskip("heavyball")
    heavyball.utils.compile_mode = None  # eager
    p = torch.nn.Parameter(torch.zeros(M, N))
    peer = getattr(heavyball, name)(
        [p], lr=LR, betas=BETAS, shampoo_beta=BETAS[1], eps=1e-12, weight_decay=0.0,
        precondition_frequency=1, merge_dims=False, **options,
    )  # fmt: skip
    everything = gradients()
    for g in everything[:WARM]:
        step(peer, p, g)
    state = peer.state[p]
    factors, bases = entry(state, "GG"), entry(state, "Q")
    found = {"factors": [f.clone() for f in factors], "bases": [q.clone() for q in bases]}
    average = entry(state, "exp_avg").clone()
    if cls is KLShampoo:
        found["momentum"] = average
    else:
        found["momentum"] = bases[0] @ average @ bases[1].T  # kept in the bases there
        found["second"] = entry(state, "exp_avg_sq").clone()
    optimizer, mine = take_over(cls, p, found)
    start = p.detach().clone()
    for g in everything[WARM:]:
        step(peer, p, g)
        step(optimizer, mine, g)
    return difference(start, mine.detach(), p.detach())


@pytest.mark.parametrize(
    "cls, name, options",
    [
        (KLShampoo, "KLShampoo", {"dampening": 0.0}),  # random noise on the gradients otherwise
        (KLSOAP, "HeavyKLSOAP", {}),
        (SOAP, "HeavySOAP", {}),
    ],
)
def test_heavyball_takes_the_same_path(cls, name, options):
    assert heavyball_paths(cls, name, **options) < TIGHT


@pytest.mark.parametrize("cls, name", [(KLSOAP, "KLSOAP"), (SOAP, "SOAP")])
def test_heavyball_without_turning_the_second_moment_stays_near(cls, name):
    assert TIGHT < heavyball_paths(cls, name) < UNTURNED


def test_the_comparison_tells_methods_apart():
    """KL-SOAP from SOAP's state leaves its path by more than the tolerances above (0.065)."""
    assert heavyball_paths(KLSOAP, "HeavySOAP") > 1.5 * UNTURNED


# --- pytorch-optimizer ----------------------------------------------------------------------------


def pytorch_optimizer_paths(turned: bool) -> float:
    """The same against pytorch-optimizer's SOAP; `turned` carries its second moment over too."""
    soap = pytest.importorskip("pytorch_optimizer.optimizer.soap")
    p = torch.nn.Parameter(torch.zeros(M, N))
    peer = soap.SOAP([p], lr=LR, betas=BETAS, eps=1e-12, weight_decay=0.0, precondition_frequency=1)
    everything = gradients()

    def advance(g: Tensor) -> None:
        old = {**peer.state[p]}
        step(peer, p, g)
        if turned:
            turns = [(a.T @ b).square() for a, b in zip(old["Q"], peer.state[p]["Q"], strict=True)]
            seen = (old["Q"][0].T @ g @ old["Q"][1]).square()
            second = BETAS[1] * previous.pop() + (1 - BETAS[1]) * seen
            peer.state[p]["exp_avg_sq"] = turns[0].T @ second @ turns[1]
            previous.append(peer.state[p]["exp_avg_sq"].clone())

    previous: list[Tensor] = []
    for g in everything[:WARM]:
        step(peer, p, g)
    state = peer.state[p]
    previous.append(state["exp_avg_sq"].clone())
    optimizer, mine = take_over(
        SOAP, p, {"factors": state["GG"], "bases": state["Q"],
                  "momentum": state["exp_avg"], "second": state["exp_avg_sq"]},
    )  # fmt: skip
    start = p.detach().clone()
    for g in everything[WARM:]:
        advance(g)
        step(optimizer, mine, g)
    return difference(start, mine.detach(), p.detach())


def test_pytorch_optimizer_takes_the_same_path_once_its_second_moment_is_turned():
    assert pytorch_optimizer_paths(turned=True) < TIGHT


def test_pytorch_optimizer_stays_near():
    assert TIGHT < pytorch_optimizer_paths(turned=False) < UNTURNED
