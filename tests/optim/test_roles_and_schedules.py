"""Roles on foreign modules, groups, schedules."""

import warnings

import pytest
import torch
from torch import nn

from skipless.checks import OPTIMIZERS
from skipless.config import OptimizerRecipe
from skipless.errors import UserError
from skipless.optim import KLShampoo, build_optimizer, parameter_roles, schedule
from skipless.optim.schedules import SCHEDULES


class Tiny(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up_proj = nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.alpha = nn.Parameter(torch.zeros(()))
        self.identity_bias = nn.Parameter(torch.zeros(2))
        self.experts = nn.Parameter(torch.zeros(3, 8, 8))
        self.conv = nn.Conv2d(2, 4, 3)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def test_roles_of_every_kind():
    roles = parameter_roles(Tiny(tied=False))
    assert roles == {
        "alpha": "gain", "identity_bias": "gain", "experts": "matrix",
        "embed_tokens.weight": "embedding", "norm.weight": "norm", "norm.bias": "norm",
        "up_proj.weight": "matrix", "up_proj.bias": "vector", "down_proj.weight": "matrix",
        "conv.weight": "convolution", "conv.bias": "vector", "lm_head.weight": "head",
    }  # fmt: skip


def test_a_tied_head_is_the_embedding():
    roles = parameter_roles(Tiny())
    assert roles["embed_tokens.weight"] == "embedding" and "lm_head.weight" not in roles


def test_a_head_without_a_known_name_is_found_by_its_width():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    assert parameter_roles(model)["2.weight"] == "head"
    assert parameter_roles(model)["1.weight"] == "matrix"


def test_multihead_attention():
    roles = parameter_roles(nn.MultiheadAttention(8, 2))
    assert roles["in_proj_weight"] == "matrix" and roles["in_proj_bias"] == "vector"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_recipes_cover_every_parameter_once(name):
    model = Tiny()
    optimizer = build_optimizer(
        OptimizerRecipe(name=name, lr=1e-2, adamw_lr=2e-3, gain_lr=5e-4, weight_decay=0.1), model
    )
    covered = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(covered) == len({id(p) for p in covered}) == len(list(model.parameters()))
    by_role = {group["role"]: group for group in optimizer.param_groups}
    assert by_role["matrix"]["base_lr"] == 1e-2 and by_role["matrix"]["weight_decay"] == 0.1
    assert by_role["embedding"]["base_lr"] == by_role["norm"]["base_lr"] == 2e-3
    assert by_role["gain"]["base_lr"] == 5e-4
    assert all(by_role[r]["weight_decay"] == 0.0 for r in ("norm", "gain", "vector"))
    assert by_role["matrix"]["algorithm"] == name
    assert by_role["embedding"]["algorithm"] == "adamw"


def test_describe_names_role_shape_blocks_and_bytes():
    model = Tiny()
    optimizer = KLShampoo(model, block_size=4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    text = optimizer.describe()
    assert "8 of 4 x 4, eigenbasis x eigenbasis" in text  # up_proj 16 x 8
    assert f"state {optimizer.state_bytes():,} bytes" in text
    # A head, a line a parameter, the sum, how bases are refreshed.
    assert len(text.splitlines()) == 3 + len(list(model.parameters()))


def test_adamw_equals_torch():
    model, twin = Tiny(), Tiny()
    twin.load_state_dict(model.state_dict())
    ours = build_optimizer(
        OptimizerRecipe(name="adamw", lr=1e-2, weight_decay=0.1, gain_weight_decay=0.1), model
    )
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=g)
        ours.step()
        theirs.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_warm_up_and_end_where_they_should(kind):
    values = [schedule(kind, t, 100, 10, 0.1, 0.2) for t in range(100)]
    assert values[0] == pytest.approx(1 / 11) and values[9] == pytest.approx(10 / 11)
    assert values[10] == 1.0 and max(values) == 1.0
    assert values[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert all(a >= b for a, b in zip(values[10:], values[11:], strict=False))
    if kind == "wsd":
        assert values[78] == 1.0 and values[80] < 1.0
    if kind == "cosine":
        assert schedule("cosine", 55, 101, 10, 0.0) == pytest.approx(0.5)


def test_schedule_errors_suggest():
    with pytest.raises(UserError, match="cosine"):
        schedule("cosin", 0, 10)
    with pytest.raises(UserError, match="min_lr_ratio"):
        schedule("cosine", 0, 10, min_lr_ratio=2.0)


def test_schedule_refuses_a_negative_warm_up_and_a_decay_beyond_the_run():
    with pytest.raises(UserError, match="warmup_steps is -5"):
        schedule("cosine", 0, 10, warmup_steps=-5)
    with pytest.raises(UserError, match="decay_fraction is 3"):
        schedule("wsd", 0, 10, decay_fraction=3)


def test_matrices_without_names_are_told():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    with pytest.warns(UserWarning, match="came without names .2 of them."):
        KLShampoo(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KLShampoo(model)
        KLShampoo(model.named_parameters())
        KLShampoo([{"params": [model[1].weight], "role": "matrix"}])
        KLShampoo([model[1].bias, torch.nn.Parameter(torch.ones(3))])
