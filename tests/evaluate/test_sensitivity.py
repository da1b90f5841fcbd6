"""One at a time and all but one: the numbers of quantising by hand, with and without prefixes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from skipless.errors import UserError
from skipless.evaluate import prefixes, sensitivity
from skipless.evaluate.losses import sequence_losses
from skipless.quant import executed, fake_quantize, quantization

SCHEME = "W2A3"


def by_hand(model, batches, scope, layers):
    """Per-sequence losses with weights rounded by hand (linear scope: inputs as well)."""
    handles, kept = [], {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not name.startswith("layers."):
            continue
        if int(name.split(".")[1]) not in layers:
            continue
        kept[name] = module.weight.detach().clone()
        module.weight.data = fake_quantize(module.weight.detach(), 2, symmetric=False)
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args: (fake_quantize(args[0], 3, symmetric=False),)
            )
        )
    found = sequence_losses(model, batches)
    for handle in handles:
        handle.remove()
    for name, weight in kept.items():
        model.get_submodule(name).weight.data = weight
    return found


@pytest.mark.parametrize("keep", ["others", "one"])
def test_losses_are_those_of_rounding_by_hand(model, batches, keep):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    # With zero points, which integers do not cover: rounded floats, as by hand.
    scheme = f"{SCHEME}-asym"
    rows = sensitivity(model, scheme, batches, "linear", keep=keep, on_row=seen.append)
    assert seen == rows and [row["layer"] for row in rows] == [0, 1, 2]
    full, everything = sequence_losses(model, batches), by_hand(model, batches, "linear", {0, 1, 2})
    for row in rows:
        one = {row["layer"]}
        found = by_hand(model, batches, "linear", one if keep == "others" else {0, 1, 2} - one)
        assert row["loss"] == pytest.approx(found.nats, rel=1e-9)
        assert row["increase"] == pytest.approx(found.nats - full.nats, abs=1e-9)
        assert row["standard_error"] == pytest.approx(found.standard_error(full), rel=1e-6)
        assert row["num_weights"] == 6 and row["num_sites"] == 6
        if keep == "one":
            assert row["recovered"] == pytest.approx(everything.nats - found.nats, abs=1e-9)
            assert row["recovered_error"] == pytest.approx(
                found.standard_error(everything), rel=1e-6
            )
        else:
            assert "recovered" not in row
    assert quantization(model) is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize(
    ("keep", "by", "method"),
    [("others", "layer", "rtn"), ("one", "layer", "rtn"), ("others", "module", "rtn"),
     ("one", "module", "rtn"), ("one", "layer", "gptq"), ("one", "layer", "hadamard")],
)  # fmt: skip
def test_prefixes_change_nothing_and_save_work(model, batches, keep, by, method, monkeypatch):
    data = [ids for ids, _ in batches]
    options = {"keep": keep, "by": by, "method": method, "calibration": data}
    runs = []
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    kept = sensitivity(model, SCHEME, batches, **options)
    with_kept = len(runs)
    runs.clear()
    monkeypatch.setattr(prefixes, "KEPT_BYTES", 0)
    whole = sensitivity(model, SCHEME, batches, **options)
    handle.remove()
    assert kept == whole
    assert (with_kept < len(runs)) == (method != "hadamard")


def test_modules_are_single_layers_with_their_inputs(model, batches):
    alone = {r["layer"]: r for r in sensitivity(model, SCHEME, batches, by="module")}
    without = {r["layer"]: r for r in sensitivity(model, SCHEME, batches, by="module", keep="one")}
    assert len(alone) == len(without) == 18 and "layers.1.mlp.up_proj" in alone
    name = "layers.1.mlp.up_proj"
    with executed(model, f"{SCHEME} *=fp {name}={SCHEME}", "block"):
        record = quantization(model)
        assert [w.name for w in record.weights] == [f"{name}.weight"]
        assert [a.site.name for a in record.activations] == [f"{name}:input"]
        assert sequence_losses(model, batches).nats == alone[name]["loss"]
    with executed(model, f"{SCHEME} {name}=fp", "block"):
        assert len(quantization(model).weights) == 17
        assert sequence_losses(model, batches).nats == without[name]["loss"]
    assert alone[name]["num_weights"] == alone[name]["num_sites"] == 1


def test_overrides_stay(model, batches):
    mixed = f"{SCHEME} layers.0=W8A8"
    rows = {r["layer"]: r for r in sensitivity(model, mixed, batches, by="module")}
    name = "layers.0.mlp.up_proj"
    with executed(model, f"{mixed} *=fp {name}=W8A8", "block"):
        assert sequence_losses(model, batches).nats == rows[name]["loss"]


@pytest.mark.parametrize(
    "exception", ["{}=W8A8", "{}=fp", "*=W8A8", "{}:input=W8A8", "{}:input=fp"]
)
def test_an_exception_may_name_what_is_taken_apart(model, batches, exception):
    name = "layers.0.mlp.up_proj"
    mixed = f"{SCHEME} {exception.format(name)}"
    alone, without = (
        {r["layer"]: r for r in sensitivity(model, mixed, batches, by="module", keep=keep)}
        for keep in ("others", "one")
    )
    with executed(model, mixed, "block"):
        everything, record = sequence_losses(model, batches), quantization(model)
        weights = {w.name: w.scheme for w in record.weights}
        sites = {a.site.name: a.bits for a in record.activations}
    for layer, row in alone.items():
        single = weights[f"{layer}.weight"]
        bits = sites.get(f"{layer}:input", "fp")
        of_input = "fp" if bits == "fp" else f"W8A{bits}"
        with executed(model, f"{SCHEME} *=fp {layer}={single} {layer}:input={of_input}", "block"):
            assert sequence_losses(model, batches).nats == row["loss"], layer
    if name in without:
        kept = [word for word in mixed.split() if not word.startswith(f"{name}=")]
        with executed(model, f"{' '.join(kept)} {name}=fp", "block"):
            found = sequence_losses(model, batches)
        assert without[name]["loss"] == found.nats
        assert without[name]["recovered"] == everything.nats - found.nats


class Copying(torch.nn.Module):
    """Repeats its input through three layers; in the first two a giant weight that nothing reads
    makes the scale so wide that all others round to zero."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 8)
        self.embed.weight.data = torch.eye(7, 8)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({"inner": torch.nn.Linear(8, 8, bias=False)}) for _ in range(3)
        )
        for layer, block in enumerate(self.blocks):
            block["inner"].weight.data = torch.eye(8)
            block["inner"].weight.data[0, 7] = 1e3 if layer < 2 else 1.0
        self.out = torch.nn.Linear(8, 7, bias=False)
        self.out.weight.data = 30 * torch.eye(7, 8)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block["inner"](x)
        return self.out(x)


def test_an_interaction_shows():
    """Either of two layers alone destroys everything, so that keeping one gives back nothing."""
    ids = torch.arange(7).repeat(2, 2)
    texts, lost = [(ids, ids)], math.log(7)
    alone = [row["increase"] for row in sensitivity(Copying(), "W4Afp", texts, "linear")]
    assert alone == pytest.approx([lost, lost, 0.0], abs=1e-6)
    rows = sensitivity(Copying(), "W4Afp", texts, "linear", keep="one")
    assert [row["increase"] for row in rows] == pytest.approx([lost, lost, lost], abs=1e-6)
    assert [row["recovered"] for row in rows] == pytest.approx([0, 0, 0], abs=1e-6)


def test_mistakes(model, batches):
    with pytest.raises(UserError, match="keep"):
        sensitivity(model, SCHEME, batches, keep="none")
    with pytest.raises(UserError, match="by"):
        sensitivity(model, SCHEME, batches, by="head")
    ids = torch.arange(7)[None]
    with pytest.raises(UserError, match="nothing is left"):
        sensitivity(Copying(), "W4A4 blocks.0=fp blocks.1=fp", [ids], "linear", keep="one")
    assert quantization(model) is None
