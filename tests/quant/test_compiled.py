"""Models that were compiled, and have run, before they are quantised: no hook is missed."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from skipless.evaluate import error_propagation, precision_table, sensitivity
from skipless.model import ModelConfig, Transformer
from skipless.probes import Probe
from skipless.quant import (
    executed,
    from_integer,
    integer_layers,
    paused,
    quantization,
    quantize,
    quantized,
    restore,
    to_integer,
    train_quantized,
)
from skipless.quant.saved import resume, saved_form


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(num_layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def net():
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def wrapped(model):
    compiled = torch.compile(model, backend="eager")
    return compiled, compiled


def in_place(model):
    model.compile(backend="eager")
    return model, model


def by_block(model):
    for layer in model.layers:
        layer.compile(backend="eager")
    return model, model


def around(model):
    return torch.compile(lambda x: model(x), backend="eager"), model


def warm(how):
    """(what is called, what is quantised), having run in full precision."""
    torch.compiler.reset()
    call, model = how(net())
    with torch.no_grad():
        call(X)
    return call, model


@pytest.fixture(params=[wrapped, in_place, by_block, around], ids=lambda f: f.__name__)
def compiled(request):
    yield warm(request.param)
    torch.compiler.reset()


@torch.no_grad()
def test_what_runs_is_what_was_asked_for(compiled):
    call, model = compiled
    reference, before = net(), net()(X)
    scheme, method = "W4A4-static", "smooth+gptq"  # both look at activations, by hooks
    quantize(reference, scheme, method=method, calibration=[X])
    assert quantize(model, scheme, method=method, calibration=[X]) is model
    assert not torch.allclose(reference(X), before, atol=1e-2)
    torch.testing.assert_close(call(X), reference(X))
    with paused(model):
        torch.testing.assert_close(call(X), before)
    assert restore(model) is model and quantization(model) is None
    torch.testing.assert_close(call(X), before)


@torch.no_grad()
def test_integers_come_and_go():
    call, model = warm(by_block)
    reference = quantize(net(), "W4A4")
    quantize(model, "W4A4")
    to_integer(reference)
    assert to_integer(model) is model
    assert integer_layers(model) == integer_layers(reference)
    assert torch.equal(call(X), reference(X))
    from_integer(reference)
    assert from_integer(model) is model
    torch.testing.assert_close(call(X), reference(X))
    torch.compiler.reset()


@torch.no_grad()
def test_a_look_leaves_the_compiled_code_in_place(compiled):
    call, model = compiled
    torch._dynamo.utils.counters.clear()
    with Probe(net()) as expected:
        expected.model(X)
    with Probe(model) as probe:
        call(X)
    assert probe.table() == expected.table()
    assert probe.geometry() == expected.geometry()
    with quantized(net(), "W4A4") as reference, quantized(model, "W4A4"):
        rounded = reference(X)
        torch.testing.assert_close(call(X), rounded)
    with executed(net(), "W4A4") as reason, executed(model, "W4A4"):
        assert reason == "" and integer_layers(model)
        torch.testing.assert_close(call(X), rounded)
    assert not integer_layers(model)
    torch.testing.assert_close(call(X), net()(X))
    assert not torch._dynamo.utils.counters["frames"], "nothing was compiled again"


@torch.no_grad()
def test_what_is_compiled_inside_forgets_the_hooks_afterwards(monkeypatch):
    torch.compiler.reset()
    model = net()
    monkeypatch.delitem(sys.modules, "torch._dynamo")  # as in a process that compiled nothing yet
    with quantized(model, "W4A4"):
        monkeypatch.undo()
        call = torch.compile(model, backend="eager")
        rounded = call(X)
    plain = call(X)
    assert not torch.allclose(rounded, plain, atol=1e-2)
    torch.testing.assert_close(plain, net()(X))
    torch.compiler.reset()


@torch.no_grad()
def test_measures_of_the_rooms_above_are_those_of_the_plain_model():
    torch.compiler.reset()
    torch.manual_seed(0)
    config = ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=60)
    model = Transformer(config).eval()
    ids = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = error_propagation(model, "W4A4", [ids])
    by_module = sensitivity(model, "W4A4", [ids], by="module")
    table = precision_table(model, [ids], ["W4A4 layers.0=W8A8"])
    for block in model.blocks:
        block.compile(backend="eager")
    whole = torch.compile(model, backend="eager")
    whole(ids)
    found = error_propagation(whole, "W4A4", [ids])
    assert [row["site"] for row in found] == [row["site"] for row in expected]
    assert [row["r"] for row in found] == pytest.approx([row["r"] for row in expected], rel=1e-3)
    again = sensitivity(whole, "W4A4", [ids], by="module")
    assert [row["layer"] for row in again] == [row["layer"] for row in by_module]
    again_table = precision_table(whole, [ids], ["W4A4 layers.0=W8A8"])
    for found, expected in zip(again_table, table, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    losses = [row["loss"] for row in by_module]
    assert [row["loss"] for row in again] == pytest.approx(losses, abs=1e-4)
    torch.compiler.reset()


def test_training_rounds_what_was_compiled_before():
    call, model = warm(around)
    reference = net()
    for each in (model, reference):
        train_quantized(each, "W3A4 from=0").at(0.5)
    x = X.clone().requires_grad_()
    found, expected = call(x), reference(x)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, net()(x), atol=1e-2)
    torch.compiler.reset()


@pytest.mark.parametrize("how", [wrapped, by_block], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "way", ["W4A4", "W4A4-static", "smooth", "hadamard", "integers", "training"]
)
def test_layers_do_not_have_it_compiled_anew(how, way):
    """More layers than torch traces one function for, which differ in name and range."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Net(num_layers=torch._dynamo.config.recompile_limit + 1).eval()
    if way == "training":
        train_quantized(model, "W4A4 scope=block from=0").at(1.0)
    else:
        scheme = way if way.startswith("W") else "W4A4"
        method = way if way in ("smooth", "hadamard") else "rtn"
        quantize(model, scheme, method=method, calibration=[X])
    if way == "integers":
        to_integer(model)
    x = X.clone().requires_grad_(way == "training")
    with torch.set_grad_enabled(way == "training"):
        expected = model(x)
        call, _ = how(model)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(3):
                torch.testing.assert_close(call(x), expected)
            if way == "training":
                call(x).sum().backward()
                assert float(x.grad.abs().sum()) > 0
    torch.compiler.reset()


def test_compiling_stays_unloaded():
    """Torch's compiler takes a second or two to load; who does not use it does not wait for it."""
    code = (
        "import sys, torch, skipless.quant as q\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "q.quantize(model=net, scheme='W8A8')(torch.ones(1, 4))\n"
        "q.from_integer(q.to_integer(net))(torch.ones(1, 4))\n"
        "q.restore(net)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@torch.no_grad()
def test_a_wrapped_model_is_saved_under_the_names_of_the_inner_one():
    compiled = torch.compile(quantize(net(), "W4A8-w:channel"), backend="eager")
    tensors, settings = saved_form(compiled)
    assert "layers.0.up.weight" in tensors and "layers.0.up.weight" in settings["weights"]
    fresh = torch.compile(net(), backend="eager")
    resume(fresh, tensors, settings)
    torch.testing.assert_close(fresh(X), compiled(X))
    torch.compiler.reset()
