"""Isometry of hidden matrices and gradient norms by layer."""

import math

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.probes import Probe, gradient_norms, isometry_drift, isometry_error


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 10)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_isometry_drift_covers_hidden_matrices_only():
    model = Model()
    nn.init.orthogonal_(model.layers[0].up.weight, gain=2.0)
    drift = isometry_drift(model)
    assert list(drift) == [f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")]
    assert drift["layers.0.up.weight"] < 1e-5 < 0.1 < drift["layers.1.up.weight"] <= 1
    assert isometry_drift({"w": torch.eye(3)}) == {"w": 0.0}


def test_isometry_of_awkward_matrices():
    assert isometry_error(torch.ones(4, 4)) == pytest.approx(1.0)
    assert math.isnan(isometry_error(torch.zeros(3, 3)))
    assert math.isnan(isometry_error(torch.tensor([[1.0, math.nan]])))
    with pytest.raises(UserError, match="needs a matrix"):
        isometry_error(torch.ones(3))
    with pytest.raises(UserError, match="no linear layer inside numbered blocks"):
        isometry_drift(nn.ReLU())


def test_gradient_norms_by_layer():
    model = Model()
    with pytest.raises(UserError, match="has a gradient"):
        gradient_norms(model)
    model(torch.arange(10)).square().mean().backward()
    norms = gradient_norms(model)
    assert list(norms) == ["embed", "0", "1", "head"]
    grads = [p.grad for p in model.layers[1].parameters()]
    assert norms["1"] == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()))
    total = math.hypot(*norms.values())
    assert total == pytest.approx(
        float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    )
    model.head.weight.grad[0, 0] = math.nan
    assert math.isnan(gradient_norms(model)["head"])


def test_gradient_norms_of_two_stacks_do_not_mix():
    model = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    for part in model.values():
        part(torch.arange(10)).sum().backward()
    assert {"encoder.layers.0", "decoder.layers.1", "encoder"} <= set(gradient_norms(model))


def test_small_half_precision_gradients_survive():
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.grad = torch.full((4, 4), 1e-6)
    half = layer.half()
    assert gradient_norms(half)["weight"] == pytest.approx(4e-6, rel=0.05)


def test_double_precision_gradients_are_taken_as_they_are():
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with Probe(model, stats=["gradients"]) as probe:
        model(x).square().sum().backward()
    squares = sum(float(p.grad.square().sum()) for p in model.parameters())
    assert sum(n**2 for n in gradient_norms(model).values()) == pytest.approx(squares, rel=1e-12)
    norms = {row["site"]: row["gradient_norm"] for row in probe.table()}
    assert norms[":input"] == pytest.approx(float(x.grad.norm()), rel=1e-12)
