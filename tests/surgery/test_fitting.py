"""The equations behind a conversion: the divergence, the ridge regression, the fitted branch."""

from typing import Any

import numpy as np
import pytest
import torch

from skipless.surgery import connections, patch, shares
from skipless.surgery.conversion.distilling import Yardstick, divergence
from skipless.surgery.conversion.fitting import RIDGES, Moments, fit_branch

from .sequences import batches


def test_divergence_is_the_equation():
    generator = torch.Generator().manual_seed(0)
    target, found = (torch.randn(2, 3, 7, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    p, q = (softmax(x.double().numpy() / 2.5) for x in (target, found))
    each = 2.5**2 * (p * np.log(p / q)).sum(-1)
    assert float(divergence(target, found, 2.5)) == pytest.approx(each.mean(), rel=1e-5)
    masked = (each * mask.numpy()).sum() / 3
    assert float(divergence(target, found, 2.5, mask)) == pytest.approx(masked, rel=1e-5)
    assert float(divergence(target, target)) == 0


def test_moments_solve_the_ridge_regression():
    generator = np.random.default_rng(0)
    h, x, y = (generator.normal(size=(50, n)) for n in (6, 4, 4))
    sums = Moments()
    for part in np.split(np.arange(50), 5):
        sums.add(*(torch.from_numpy(array[part]) for array in (h, x, y)))
    w = 1 / (y**2).sum(-1, keepdims=True)
    gram = h.T @ (w * h)
    ridge = 0.1 * np.trace(gram) / 6
    expected = np.linalg.solve(gram + ridge * np.eye(6), h.T @ (w * x))
    (found,) = sums.solve([0.1])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    left = (w * (h @ expected - x) ** 2).sum()
    assert sums.error(found) == pytest.approx(left, rel=1e-9)


def padded(data, to):
    """The same texts with padding on the right, and what says so."""
    found = []
    for ids in data:
        mask = torch.zeros(len(ids), to, dtype=torch.long)
        mask[:, : ids.shape[1]] = 1
        wide = torch.full((len(ids), to), 5)
        wide[:, : ids.shape[1]] = ids
        found.append({"input_ids": wide, "attention_mask": mask})
    return found


def test_padding_is_no_part_of_a_fit_nor_of_a_share_nor_of_a_distance(trained):
    data = batches(count=5)
    weights, distances, parts = [], [], []
    for given in (data, padded(data, data[0].shape[1] + 7)):
        model: Any = patch(trained("llama"), "anneal")
        join, layer = connections(model)["model.layers.1.mlp_connection"], model.model.layers[1]
        parts.append(shares(model, given))
        fit_branch(model, join, layer.mlp.down_proj, given)
        weights.append(layer.mlp.down_proj.weight.detach().clone())
        yardstick = Yardstick(trained("llama"), given, loss=lambda m, b: sum(
            float(m(**x).logits.mean() if isinstance(x, dict) else m(input_ids=x).logits.mean())
            for x in b
        ))  # fmt: skip
        distances.append(yardstick.with_divergence(model)[-1])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)
    assert distances[0] == pytest.approx(distances[1], rel=1e-3) and distances[0] > 0
    assert parts[0] == pytest.approx(parts[1], rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_fitted_branch_is_near_the_old_join(trained, family):
    """An independent least-squares problem on the recorded tensors must not do much better."""
    model: Any = patch(trained(family), "anneal", sites="mlp", layers=-1)
    ((name, join),) = connections(model).items()
    layer: Any = model.get_submodule(name.rpartition(".")[0])
    linear = layer.mlp.down_proj if family == "llama" else layer.mlp.c_proj
    seen = {}
    linear.register_forward_pre_hook(lambda m, args: seen.update(h=args[0].flatten(0, 1).double()))
    join.register_forward_hook(
        lambda m, args, out: seen.update(x=args[0].flatten(0, 1).double(),
                                         y=out.flatten(0, 1).double())
    )  # fmt: skip
    data = batches(count=16)
    old = linear.weight.detach().clone()
    left = fit_branch(model, join, linear, data)
    new = linear.weight.detach().double()
    change = (new - old.double()).T if family == "llama" else new - old.double()
    with torch.no_grad():
        linear.weight.copy_(old)
        model(torch.cat(data))
    weight = 1 / seen["y"].norm(dim=-1, keepdim=True)
    h, x = seen["h"] * weight, seen["x"] * weight
    if family == "llama":  # Conv1D has a bias besides, which the fit moved as well
        best = torch.linalg.lstsq(h, x).solution
        lower, found = ((h @ d - x).square().sum() / x.square().sum() for d in (best, change))
        assert lower <= found < 1.2 * lower + 1e-3
    assert 0 <= left < 1 and tuple(sorted(RIDGES)) == RIDGES
