"""Habits and accidents: nothing is lost, wrong or without effect in silence."""

import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.optim import KLSOAP, SOAP, AdamW, KLShampoo, Muon, Shampoo, orthogonalize

METHODS = {
    "adamw": AdamW, "muon": Muon, "soap": SOAP, "kl_soap": KLSOAP, "shampoo": Shampoo,
    "kl_shampoo": KLShampoo,
    "jacobi": lambda p, **k: KLShampoo(p, root="jacobi", **k),
    "packed": lambda p, **k: KLShampoo(p, packed=True, **k),
    "newton": lambda p, **k: KLShampoo(p, root="newton", **k),
    "reference": lambda p, **k: KLShampoo(p, reference=True, **k),
    "one_sided": lambda p, **k: KLShampoo(p, one_sided=True, **k),
    "blocks": lambda p, **k: KLShampoo(p, block_size=3, **k),
}  # fmt: skip
SAME_STATE = {frozenset(pair) for pair in [("kl_shampoo", "jacobi")]}


def net(width=9):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 6))


def train(model, optimizer, steps):
    for t in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t))
        model(x).square().mean().backward()
        optimizer.step()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def refused(call, *words):
    with pytest.raises(UserError) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def normal(t, shape=(6, 9)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(t))


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-15, 1e15, 2e18])
@pytest.mark.parametrize("name", [n for n in METHODS if n != "reference"])
def test_gradients_of_any_size_give_finite_bounded_steps(name, size):
    p = nn.Parameter(torch.ones(6, 9))
    optimizer = METHODS[name]([("w", p)], lr=1e-2)
    for t in range(15):
        p.grad = normal(t).clamp(-1, 1) * size
        optimizer.step()
    assert p.isfinite().all() and (p - 1).abs().max() < 0.5 and not optimizer.skipped


@pytest.mark.parametrize("name", METHODS)
def test_a_gradient_whose_square_overflows_is_left_out_and_counted(name):
    p = nn.Parameter(torch.ones(6, 9))
    optimizer = METHODS[name]([("w", p)], lr=1e-2)
    for t in range(12):
        p.grad = normal(t) * (1e20 if t == 5 else 1.0)
        optimizer.step()
    assert optimizer.skipped == {"w": 1} and p.isfinite().all()
    assert all(v.isfinite().all() for v in optimizer.state[p].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_directions_do_not_depend_on_scale(dtype):
    x = normal(0)[None].to(dtype)
    for power in (-100, -60, 30):
        assert torch.equal(orthogonalize(x * 2.0**power), orthogonalize(x))
    assert orthogonalize(torch.zeros(1, 3, 0)).shape == (1, 3, 0)


@pytest.mark.parametrize("kind", ["transposed", "slice", "channels_last"])
@pytest.mark.parametrize("name", METHODS)
def test_memory_layout_changes_nothing(name, kind):
    w = normal(0, (4, 8, 3, 3) if kind == "channels_last" else (4, 8))
    laid = {
        "transposed": lambda: w.T.contiguous().T,
        "slice": lambda: torch.stack([w, w], -1).flatten(1)[:, ::2],
        "channels_last": lambda: w.to(memory_format=torch.channels_last),
    }[kind]()
    a, b = nn.Parameter(w.clone()), nn.Parameter(laid)
    assert not b.is_contiguous()
    optimizers = [METHODS[name]([("w", p)], lr=1e-2) for p in (a, b)]
    for t in range(4):
        for p, optimizer in zip((a, b), optimizers, strict=True):
            p.grad = normal(t, w.shape)
            optimizer.step()
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_optimiser_goes_on_bit_for_bit(name, how):
    model = net()
    optimizer = METHODS[name](model, lr=1e-2)
    train(model, optimizer, range(7))
    optimizer.skipped["0.weight"] = 3
    if how == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    else:
        buffer = io.BytesIO()
        torch.save((model, optimizer), buffer)
        buffer.seek(0)
        other, again = torch.load(buffer, weights_only=False)
    assert again.skipped == {"0.weight": 3} and again.describe() == optimizer.describe()
    train(model, optimizer, range(7, 23))
    train(other, again, range(7, 23))
    assert same(model, other)


@pytest.mark.parametrize("saved", METHODS)
def test_state_of_another_method_or_setting_is_refused_before_anything_changes(saved):
    model = net()
    optimizer = METHODS[saved](model, lr=1e-2)
    train(model, optimizer, range(3))
    for name in METHODS.keys() - {saved}:
        other = METHODS[name](model, lr=5e-2)
        if frozenset((saved, name)) in SAME_STATE:
            other.load_state_dict(optimizer.state_dict())
            continue
        refused(lambda o=other: o.load_state_dict(optimizer.state_dict()), "saved state")
        assert not other.state and other.param_groups[0]["lr"] == 5e-2


@pytest.mark.parametrize("name", METHODS)
def test_state_that_fits_no_parameter_is_refused(name):
    make = METHODS[name]
    model, wider, longer = net(), net(11), nn.Sequential(*net(), nn.Linear(6, 6))
    optimizer = make(model, lr=1e-2)
    for other in (wider, longer):
        source = make(other, lr=1e-2)
        train(other, source, range(2))
        word = "'3.bias'" if other is longer else "saved state"
        refused(lambda s=source: optimizer.load_state_dict(s.state_dict()), word)
    for nothing in ({}, None, {"state": {}}):
        refused(lambda n=nothing: optimizer.load_state_dict(n), "state_dict()")
    foreign = torch.optim.AdamW(model.parameters())
    refused(lambda: optimizer.load_state_dict(foreign.state_dict()), "saved")
    named = torch.optim.AdamW(model.named_parameters())
    refused(lambda: optimizer.load_state_dict(named.state_dict()), "another package's")
    train(model, optimizer, range(2))
    model[0].weight.data = torch.ones(12, 6)
    model[0].weight.grad = torch.ones(12, 6)
    refused(optimizer.step, "0.weight")


def test_groups_saved_with_different_settings_are_not_merged():
    model = net()
    one, two = model[0].weight, model[2].weight
    apart = Muon([{"params": [("a", one)], "lr": 1e-2}, {"params": [("b", two)], "lr": 2e-2}])
    joined = Muon([("a", one), ("b", two)])
    refused(lambda: joined.load_state_dict(apart.state_dict()), "different lr")


@pytest.mark.parametrize("name", ["muon", "kl_shampoo"])
def test_names_of_wrapped_models_are_the_same(name):
    model = net()
    wrapped = torch.compile(model, backend="eager")
    optimizer = METHODS[name](wrapped, lr=1e-2)
    train(wrapped, optimizer, range(4))
    plain = copy.deepcopy(model)
    again = METHODS[name](plain, lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    parallel = nn.Module()
    parallel.module = copy.deepcopy(model)
    METHODS[name](parallel).load_state_dict(again.state_dict())
    train(wrapped, optimizer, range(4, 14))
    train(plain, again, range(4, 14))
    assert same(model, plain)


@pytest.mark.parametrize("name", ["adamw", "muon", "kl_shampoo"])
def test_a_step_without_any_gradient_warns_once(name):
    model = net()
    optimizer = METHODS[name](model, lr=1e-2)
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        train(model, optimizer, range(1))


@pytest.mark.parametrize("name", ["adamw", "muon", "kl_shampoo", "jacobi"])
def test_a_step_that_cannot_be_meant_moves_nothing(name):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Embedding(5, 3, sparse=True)])
    optimizer = METHODS[name](model, lr=1e-2)
    (model[0](torch.ones(1, 3)).sum() + model[1](torch.tensor([1])).sum()).backward()
    before = copy.deepcopy(model)
    refused(optimizer.step, "1.weight is sparse")
    model.zero_grad()
    model[0](torch.ones(1, 3)).sum().backward()
    refused(lambda: optimizer.step(3.0), "float", "backward")
    for lr in (-1.0, math.nan, None):
        optimizer.param_groups[-1]["lr"] = lr
        refused(optimizer.step, "lr of a parameter group")
    assert same(model, before) and not any(optimizer.state.values())


def test_cleared_state_starts_anew():
    model = net()
    optimizer = KLShampoo(model, lr=1e-2)
    train(model, optimizer, range(3))
    fresh_model = copy.deepcopy(model)
    optimizer.state.clear()
    train(model, optimizer, range(3, 6))
    train(fresh_model, KLShampoo(fresh_model, lr=1e-2), range(3, 6))
    assert same(model, fresh_model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: None, lambda: 5, lambda: "model", lambda: net().state_dict(),
        lambda: [{"params": net()}], lambda: [{"params": 3}], lambda: [{"lr": 1e-3}],
        lambda: [*net().named_parameters(), ("w", torch.ones(2, 2), 1)],
        lambda: [{"params": list(net().parameters()), "param_names": ["w"]}],
        lambda: [(torch.ones(2, 2), "w")],
        lambda: [("w", torch.ones(2, 2)), ("w", torch.ones(2, 2))],
        lambda: [("w", torch.ones(4, 1).expand(4, 4))],
        lambda: nn.Linear(3, 3, device="meta"), lambda: nn.LazyLinear(3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["adamw", "kl_shampoo"])
def test_what_is_no_model_and_no_parameters(name, make):
    refused(lambda: METHODS[name](make()))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("split", "qkv"), ("split", ["qkv"]), ("split", {3: 2}), ("spectral_roles", None),
        ("spectral_roles", "matrix"), ("extra", {}), ("foreach", True), ("fused", True),
        ("capturable", True), ("maximize", True), ("max_precond_dim", 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", [AdamW, Muon, KLShampoo, SOAP])
def test_arguments_passed_by_habit(method, setting, value):
    refused(lambda: method(net(), **{setting: value}), setting)


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        (Muon, "eps", 1e-8), (Muon, "betas", (0.9, 0.9)), (Muon, "nesterov", "no"),
        (Muon, "dtype", "bf16"), (Muon, "dtype", torch.int8), (Muon, "block_size", 4),
        (AdamW, "block_size", 4), (AdamW, "split", {"0.weight": 3}), (KLShampoo, "packed", "no"),
        (KLShampoo, "reference", "no"), (KLShampoo, "one_sided", None),
        (KLShampoo, "momentum_dtype", torch.float16),
    ],
)  # fmt: skip
def test_arguments_without_a_meaning_here(method, setting, value):
    refused(lambda: method(net(), **{setting: value}), setting)


@pytest.mark.parametrize("method", [Muon, KLShampoo])
@pytest.mark.parametrize(
    "option",
    [
        {"weight_decy": 0.1}, {"algorithm": "adam"}, {"base_lr": "x"}, {"split": {"w": 2}},
        {"refresh_every": 0}, {"update_rms": -1}, {"scale": "none"}, {"fused": True},
        {"momentum": 0.9},
    ],
)  # fmt: skip
def test_options_of_groups_are_checked(method, option):
    group = {"params": [("w", nn.Parameter(torch.ones(4, 4)))], **option}
    refused(lambda: method([group]), "parameter group")
    optimizer = method(net())
    before = len(optimizer.param_groups)
    refused(lambda: optimizer.add_param_group(group), "parameter group")
    assert len(optimizer.param_groups) == before
    group = {"params": [("w", nn.Parameter(torch.ones(4, 4)))], "tag": "mine", "initial_lr": 1.0}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[-1]["tag"] == "mine"


def test_a_split_that_does_not_divide_is_refused_at_once():
    refused(lambda: KLShampoo(net(), split={"0.weight": 2}), "9 rows", "2 equal parts")
