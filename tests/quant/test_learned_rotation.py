"""rotation:learned: orthogonal to float64's rounding, the function kept, the error lowered."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.quant import paused, quantization, quantize, quantized, restore
from skipless.quant.methods import learned_rotation, method_name, parse_methods
from skipless.quant.transforms.orthogonal import Orthogonal, cayley, turn_columns

LEARNED = "rotation:learned,steps=4"


def logits(model, ids):
    with torch.no_grad():
        out = model(ids)
    return getattr(out, "logits", out)


def precise(make_transformer, kind):
    """Ours in float64, with gains that are not 1; "grouped" shares values among heads."""
    changes = {"hidden_act": "swiglu", "num_key_value_heads": 2} if kind == "grouped" else {}
    model = make_transformer("residual" if kind == "grouped" else kind, **changes).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = 0.5 + drawn
    return model


def test_cayley_equals_its_formula_and_is_orthogonal():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 12, 12)) * 2
    a = a - a.transpose(0, 2, 1)
    eye = np.eye(12)
    expected = np.linalg.inv(eye + a / 2) @ (eye - a / 2)
    found = cayley(torch.tensor(a))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(found @ found.mT, np.broadcast_to(eye, found.shape), atol=1e-13)
    assert torch.equal(cayley(torch.zeros(5, 5)), torch.eye(5))
    small = torch.tensor(a[:1, :3, :3], requires_grad=True)
    assert torch.autograd.gradcheck(lambda u: cayley(u - u.mT), small)


@pytest.mark.parametrize("width", [6, 24, 48, 64])
def test_rotations_stay_orthogonal_wherever_they_are_moved(width):
    turn = Orthogonal(3, width, torch.Generator().manual_seed(1))
    eye = torch.eye(width, dtype=torch.float64).expand(3, width, width)
    start = turn.matrix().detach()
    assert torch.equal(start, turn.start) and (start[0] - start[1]).abs().max() > 0.01
    for scale in (0.0, 0.1, 30.0):
        with torch.no_grad():
            turn.free.normal_(std=scale, generator=torch.Generator().manual_seed(2))
        moved = turn.matrix().detach()
        torch.testing.assert_close(moved @ moved.mT, eye, rtol=0, atol=1e-12)
    turn.reset()
    assert torch.equal(turn.matrix(), start)


def test_blocks_are_turned_by_their_own_matrix():
    rng = np.random.default_rng(1)
    x, turns = rng.normal(size=(4, 9)), rng.normal(size=(2, 3, 3))
    found = turn_columns(torch.tensor(x), torch.tensor(turns), torch.tensor([1, 0, 1]))
    parts = [x[:, 3 * i : 3 * i + 3] @ turns[k] for i, k in enumerate((1, 0, 1))]
    np.testing.assert_allclose(found.numpy(), np.concatenate(parts, 1), rtol=1e-12)


@pytest.mark.parametrize("kind", ["residual", "none", "grouped"])
def test_the_function_stays_to_float64_rounding(make_transformer, ids, kind):
    model = precise(make_transformer, kind)
    before = logits(model, ids.flip(0, 1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    quantize(model, "W4A4", "block", method=LEARNED, calibration=[ids])
    assert quantization(model).method == LEARNED
    (note,) = quantization(model).notes
    assert note.startswith("rotation: 2 values and the stream learned, 2 tensors by Hadamard")
    after = logits(model, ids.flip(0, 1))
    with paused(model):
        same = logits(model, ids.flip(0, 1))
        assert (same - before).abs().max() < 1e-13 * before.abs().max() * 32
        assert not torch.equal(model.layers[0].self_attn.v_proj.weight,
                               state["layers.0.self_attn.v_proj.weight"])  # fmt: skip
    assert (after - before).abs().max() > 1e-3 * before.abs().max()
    other = copy.deepcopy(model)
    restore(model)
    assert torch.equal(logits(other, ids.flip(0, 1)), after)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model, ids.flip(0, 1)), before)


def test_every_head_has_its_own_orthogonal_matrix(make_transformer, ids):
    """Without RMSNorm there is no stream; V and O alone are left, offline."""
    model = make_transformer("none", norm="layernorm").double()
    attention = model.layers[1].self_attn
    v, o = (m.weight.detach().clone() for m in (attention.v_proj, attention.o_proj))
    untouched = attention.q_proj.weight.detach().clone()
    quantize(model, "W4A4", method=f"{LEARNED},offline", calibration=[ids])
    assert "no stream learned, 0 tensors by Hadamard" in quantization(model).notes[0]
    with paused(model):
        assert torch.equal(attention.q_proj.weight, untouched)
        found = []
        for head in range(4):
            part = slice(8 * head, 8 * head + 8)
            new = attention.v_proj.weight.detach()[part]
            turn = torch.linalg.lstsq(v[part].T, new.T).solution  # V R = V'
            torch.testing.assert_close(turn @ turn.T, torch.eye(8).double(), rtol=0, atol=1e-12)
            torch.testing.assert_close(o[:, part] @ turn, attention.o_proj.weight[:, part])
            found.append(turn)
    assert min((a - b).abs().max() for a in found for b in found if a is not b) > 0.1


def divergence(exact, found):
    """Kullback-Leibler divergence a position, in float64 numpy."""
    p, q = (x.double().numpy().reshape(-1, x.shape[-1]) for x in (exact, found))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1).mean()


def test_the_error_falls_and_is_the_one_it_says(make_transformer, ids):
    model = make_transformer("none")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    exact, errors = logits(model, ids), {}
    for steps in (0, 12):
        method = f"rotation:learned,steps={steps}"
        with quantized(model, "W4A4", "block", method=method, calibration=[ids]):
            errors[steps] = divergence(exact, logits(model, ids))
            (note,) = quantization(model).notes
    assert errors[12] < 0.95 * errors[0]
    said = [float(word) for word in note.split("; error ")[1].split() if word[0].isdigit()][:2]
    assert said == pytest.approx([errors[0], errors[12]], rel=1e-3)


def test_it_is_deterministic_and_its_seed_counts(make_transformer, ids):
    model, found = make_transformer("residual"), []
    for seed in (0, 0, 1):
        method = f"{LEARNED},seed={seed}"
        with quantized(model, "W3A4", method=method, calibration=[ids]):
            found.append(logits(model, ids))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_it_is_left_at_the_start_where_learning_does_not_help(make_transformer, ids, monkeypatch):
    model = make_transformer("residual")
    with quantized(model, "W8A8", method="rotation:learned,steps=0", calibration=[ids]):
        start = logits(model, ids)
    errors = iter([1.0, 2.0])
    monkeypatch.setattr(learned_rotation._Learning, "everything", lambda self: next(errors))
    with quantized(model, "W8A8", method=LEARNED, calibration=[ids]):
        assert "no gain: left at the start" in quantization(model).notes[0]
        assert torch.equal(logits(model, ids), start)


def test_combined_with_other_methods_mixed_and_static(make_transformer, ids):
    model = make_transformer("residual")
    before = logits(model, ids)
    quantize(
        model, "W4A8-static-w:channel-P6 layers.0.mlp=fp", "all",
        method=f"smooth+{LEARNED}+gptq", calibration=[ids],
    )  # fmt: skip
    assert len(quantization(model).notes) == 2
    assert logits(model, ids).isfinite().all()
    with paused(model):
        torch.testing.assert_close(logits(model, ids), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(restore(model), ids), before)


def test_no_gradient_and_no_hook_is_left(make_transformer, ids):
    model = make_transformer("residual")
    with quantized(model, "W4A4", method=LEARNED, calibration=[ids]):
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_text_form():
    usual = "rotation:learned"
    assert method_name(parse_methods("rotation")) == method_name(parse_methods(usual)) == usual
    long = "rotation:learned,steps=8,lr=0.01,seed=3,offline"
    assert method_name(parse_methods(f"gptq+{long}")) == f"{long}+gptq"


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("rotation:blind", "rotation is 'blind'; rotation:learned is known"),
        ("rotation:learned,steps=x", "option 'steps=x'; steps=N"),
        ("rotation:learned,lr=fast", "'fast' is not a number"),
        ("rotation:learned,lr=0", "a rate between 0 and 10"),
        ("rotation+hadamard", "exclude each other"),
        ("stream+rotation", "exclude each other"),
    ],
)
def test_mistakes(plain, ids, method, says):
    with pytest.raises(UserError, match=says):
        quantize(plain, "W4A8", method=method, calibration=[ids])
    assert quantization(plain) is None


def test_nan_is_told_and_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()  # a source without heads
    x = torch.randn(4, 8)
    before = net[0].weight.detach().clone()
    with quantized(net, "W4A4", method=LEARNED, calibration=[x]):
        assert "1 value and" in quantization(net).notes[0]
    bad = [x, x.clone().fill_(torch.nan)]
    with pytest.raises(UserError, match="NaN or infinity"):
        quantize(net, "W4A4", method=LEARNED, calibration=bad)
    assert torch.equal(net[0].weight, before) and quantization(net) is None
    assert not any(module._forward_pre_hooks for module in net.modules())
