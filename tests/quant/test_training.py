"""Training with quantisation: what is rounded when, what gradients are, what comes out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skipless.errors import UserError
from skipless.quant import (
    fake_quantize,
    from_integer,
    quantization,
    quantize,
    quantized,
    restore,
    to_integer,
)
from skipless.quant.training import RoundedLinear, train_quantized
from skipless.scheme import TrainingPlan


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 8, generator=generator)
    return x, torch.tanh(x @ torch.randn(8, 4, generator=generator))


def fit(model: nn.Module, plan: str | None, steps: int = 150, **options):
    x, y = data()
    training = train_quantized(model, plan, **options)
    groups = [{"params": list(model.parameters())}]
    if getattr(training, "clips", None):
        groups.append({"params": training.clips, "lr": 1e-3})
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    for step in range(steps):
        training.at(step / steps)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return training


def test_plan_in_words():
    plan = TrainingPlan.parse("W4A4-a:token scope=block from=0.1 over=0.5 layers.0=W8A8")
    assert str(plan.scheme) == "W4A4-a:token layers.0=W8A8" and plan.scope == "block"
    assert (plan.start, plan.over) == (0.1, 0.5)
    assert [plan.bits(4, p) for p in (0, 0.09, 0.1, 0.2, 0.5, 0.6, 1)] == [
        None,
        None,
        8,
        8,
        5,
        4,
        4,
    ]
    assert TrainingPlan.parse("W4A8").bits(12, 0.5) == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scope=block", "names no scheme"),
        ("W4A4 scope=model", "linear, block or all"),
        ("W4A4 from=x", "from is 'x', no number"),
        ("W4A4 from=0.9 over=0.2", "add up to at most 1"),
        ("W4A4-static", "leave out -static"),
        ("W4", "does not say what happens to activations"),
    ],
)
def test_mistakes_in_a_plan(text, says):
    with pytest.raises(UserError, match=says):
        TrainingPlan.parse(text)


def test_off_at_first_then_rounded_then_gone():
    model, (x, _) = net(), data()
    exact, names = model(x), list(model.state_dict())
    training = train_quantized(model, "W3A4 from=0.5")
    assert isinstance(model[0], RoundedLinear) and list(model.state_dict()) == names
    assert training.at(0.2) is None and torch.equal(model(x), exact)
    assert training.at(0.7) == 3
    hidden = F.relu(F.linear(fake_quantize(x, 4), fake_quantize(model[0].weight, 3), model[0].bias))
    out = F.linear(fake_quantize(hidden, 4), fake_quantize(model[2].weight, 3), model[2].bias)
    assert torch.equal(model(x), out)
    training.finish()
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), out)  # the very same rounding, now of stored weights
    assert torch.equal(restore(model)(x), exact)


def test_the_gradient_goes_straight_through():
    model, (x, y) = nn.Sequential(nn.Linear(8, 4, bias=False)), data()
    train_quantized(model, "W3Afp from=0")
    F.mse_loss(model(x), y).backward()
    rounded = fake_quantize(model[0].weight.detach(), 3).requires_grad_()
    F.mse_loss(x @ rounded.T, y).backward()
    torch.testing.assert_close(model[0].weight.grad, rounded.grad)


def test_training_quantised_beats_rounding_afterwards():
    x, y = data()
    plain, trained = net(), net()
    fit(plain, None)
    fit(trained, "W2A4-w:channel from=0.2 over=0.3").finish()
    with quantized(plain, "W2A4-w:channel"):
        afterwards = float(F.mse_loss(plain(x), y).detach())
    assert float(F.mse_loss(trained(x), y).detach()) < afterwards / 2


def test_learned_clips_move_and_are_kept():
    x, y = data()
    model = net()
    training = fit(model, "W3A3 from=0", learned_clips=True, calibration=[x])
    assert len(training.clips) == 4 and all(clip.grad is not None for clip in training.clips)
    learned = [float(clip.detach()) for clip in training.clips]
    out = model(x).detach()
    training.finish()
    torch.testing.assert_close(model(x), out, rtol=1e-4, atol=1e-5)
    clips = [float(q.clip) for q in quantization(model).activations]
    assert clips == pytest.approx(learned[:2])
    codes = quantization(model).weights[0].codes()
    assert float(codes.scale) == pytest.approx(learned[2] / 3)
    with torch.no_grad():
        to_integer(model, engine="float")
        torch.testing.assert_close(model(x), out, rtol=1e-4, atol=1e-4)
        from_integer(model)
    restore(model)
    with quantized(model, "W3A3"):
        assert float(F.mse_loss(out, y)) < float(F.mse_loss(model(x), y))


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        ("W4A4-asym", {"learned_clips": True}, "symmetric"),
        ("W4A4-w:g8", {"learned_clips": True}, "no groups"),
        ("W4A4", {"learned_clips": True}, "pass calibration"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(plan, options, says):
    model, (x, _) = net(), data()
    exact = model(x)
    with pytest.raises(UserError, match=says):
        train_quantized(model, plan, **options)
    assert type(model[0]) is nn.Linear and torch.equal(model(x), exact)
    quantize(model, "W8A8")
    with pytest.raises(UserError, match="already quantised"):
        train_quantized(model, "W4A4")


def test_a_run_trains_quantised_and_resumes_bit_for_bit(tiny_config, text_file, tmp_path):
    from skipless.data import prepare
    from skipless.train import load_run, train

    plan = "W4A4 scope=block from=0.25 over=0.25"
    config = tiny_config.replace(train={"quantize": plan, "checkpoint_every": 2})
    data = prepare(config.data, 300, cache_dir=text_file.parent / "cache")
    train(config, tmp_path / "whole", data=data)

    class Stop(Exception):
        pass

    def stop(info):
        if info["step"] == 4:
            raise Stop

    with pytest.raises(Stop):
        train(config, tmp_path / "parts", data=data, on_step=stop)
    train(config, tmp_path / "parts", data=data)
    whole, parts = (load_run(tmp_path / n).model.state_dict() for n in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    plain = tiny_config.replace(train={"checkpoint_every": 2})
    train(plain, tmp_path / "plain", data=data)
    other = load_run(tmp_path / "plain").model.state_dict()
    assert not all(torch.equal(whole[name], other[name]) for name in whole)


def test_settings_are_checked(tiny_config):
    for changes, says in (
        ({"quantize": "W4"}, "train.quantize: 'W4' does not say"),
        ({"quantize": "W4A4", "compile": True}, "train.quantize.*train.compile"),
        ({"quantize": "W4A4", "activation_checkpointing": True}, "activation_checkpointing"),
    ):
        with pytest.raises(UserError, match=says):
            tiny_config.replace(train=changes)


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3, stride=2, groups=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["W4A8-w:channel", "W3A4-a:token", "W4A6-w:g2"])
def test_convolutions_train_quantised(scheme):
    """In training the function is that of the quantised model, kernels included, and the gradient
    passes straight through."""
    x = torch.randn(5, 2, 8)
    model, twin = conv_net(), conv_net()
    quantize(twin, scheme, include_convolutions=True, include_head=True, overrides={"5": "fp"})
    training = train_quantized(model, f"{scheme} 5=fp from=0 over=0", include_convolutions=True)
    training.at(1.0)
    assert training.layers[0][0].module is model[0] and len(training.layers) == 2
    torch.testing.assert_close(model(x), twin(x), rtol=1e-5, atol=1e-6)
    model(x).square().sum().backward()
    assert all(bool(model[i].weight.grad.any()) for i in (0, 2, 5))
    assert list(model.state_dict()) == list(conv_net().state_dict())
    training.finish()
    torch.testing.assert_close(model(x), twin(x), rtol=1e-5, atol=1e-6)
    restore(model)
    assert torch.equal(model(x), conv_net()(x)) and type(model[0]) is nn.Conv1d


def test_learned_clips_of_convolutions_and_an_interruption():
    """Stopped after ten steps and gone on with from the state: the same bits as without a stop."""
    x, y = torch.randn(20, 2, 8), torch.randn(20, 4)
    options = {"learned_clips": True, "calibration": [x], "include_convolutions": True}

    def steps(model, training, optimizer, numbers):
        for step in numbers:
            training.at(step / 20)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    def begun(model):
        training = train_quantized(model, "W4A4-w:channel from=0.1 over=0.5", **options)
        return training, torch.optim.Adam([*model.parameters(), *training.clips], lr=1e-2)

    whole = conv_net()
    training, optimizer = begun(whole)
    steps(whole, training, optimizer, range(20))
    first = conv_net()
    half, half_optimizer = begun(first)
    steps(first, half, half_optimizer, range(10))
    saved = (first.state_dict(), half.state_dict(), half_optimizer.state_dict())
    second = conv_net()
    rest, rest_optimizer = begun(second)
    second.load_state_dict(saved[0])
    rest.load_state_dict(saved[1])
    rest_optimizer.load_state_dict(saved[2])
    steps(second, rest, rest_optimizer, range(10, 20))
    assert torch.equal(second(x), whole(x))
    rest.finish()
    assert quantization(second).include_convolutions
    torch.testing.assert_close(second(x), whole(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"learned clip of .* is missing"):
        training.load_state_dict({})
    with pytest.raises(UserError, match=r"learned clip of nothing is missing, left over"):
        training.load_state_dict(saved[1] | {"nothing": torch.ones(())})
    training.remove()
    plain = train_quantized(whole, "W4A4")
    assert plain.state_dict() == {}


@pytest.mark.parametrize("plan", ["W4A4 scope=all from=0", "W4A4-KV8-P6 from=0.5"])
def test_attention_probabilities_are_rounded_as_well(make_transformer, ids, plan):
    model = make_transformer("residual").train()
    attention = model.layers[0].self_attn
    before = attention.implementation
    plain = model(ids).logits
    training = train_quantized(model, plan)
    if "0.5" in plan:
        torch.testing.assert_close(model(ids).logits, plain)
    training.at(1.0)
    found = model(ids, labels=ids)
    found.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not torch.allclose(found.logits, plain, atol=1e-3)
    training.finish()
    sites = [site.site.kind for site in quantization(model).activations]
    assert "probabilities" in sites
    torch.testing.assert_close(model(ids).logits, found.logits)
    restore(model)
    assert attention.implementation == before
    train_quantized(model, plan).remove()
    assert attention.implementation == before
    torch.testing.assert_close(model(ids).logits, plain)
