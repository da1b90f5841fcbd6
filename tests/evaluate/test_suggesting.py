"""suggest_scheme: the fragile layer first, losses as measured directly, bits counted right."""

from __future__ import annotations

import pytest
import torch

from skipless.config import ConnectionConfig, ModelConfig
from skipless.errors import UserError
from skipless.evaluate import loss, prefixes, suggest_scheme
from skipless.model import Transformer
from skipless.quant import executed, quantization, quantized


@pytest.fixture
def fragile():
    """Four blocks, of which block 2 has one giant weight in each matrix."""
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=32, connection=ConnectionConfig(kind="residual"),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Transformer(config, seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        for name, weight in model.layers.named_parameters():
            if weight.ndim == 2:
                weight.mul_(8)
                if name.startswith("2."):
                    weight[0, 0] = 8 * weight.abs().max()
    return model


@pytest.fixture
def texts(fragile):
    """The labels are what the model itself finds likeliest, so that noise costs."""
    ids = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        labels = fragile(ids).logits.argmax(-1)
    return [*zip(ids.split(2), labels.split(2), strict=True)]


def measured(model, scheme, texts, scope="linear"):
    with executed(model, scheme, scope):
        return loss(model, texts).nats


@pytest.mark.parametrize("scope", ["linear", "block"])
def test_the_fragile_layer_is_raised_first(fragile, texts, scope):
    before = {k: v.clone() for k, v in fragile.state_dict().items()}
    # What raising each alone gives, by hand: the choice of the first step.
    alone = {
        layer: measured(fragile, f"W4A8 layers.{layer}=W8A8", texts, scope) for layer in range(4)
    }
    low = measured(fragile, "W4A8", texts, scope)
    assert min(alone, key=lambda layer: alone[layer]) == 2
    target = alone[2] + 1e-6 - loss(fragile, texts).nats
    assert low > alone[2] + 1e-3
    found = suggest_scheme(fragile, texts, "W4A8", "W8A8", max_increase=target, scope=scope)
    assert found.met and found.scheme == "W4A8 layers.2=W8A8"
    assert [step["layer"] for step in found.steps] == ["layers.2"]
    assert found.loss == measured(fragile, found.scheme, texts, scope) == alone[2]
    assert found.increase == found.loss - found.full_precision and found.standard_error > 0
    assert found.weight_bits == pytest.approx((3 * 4 + 8) / 4)  # blocks of one size
    assert quantization(fragile) is None
    assert all(torch.equal(v, before[k]) for k, v in fragile.state_dict().items())
    assert not any("forward" in module.__dict__ for module in fragile.modules())


@pytest.mark.parametrize(("by", "bits"), [("layer", 5.5), ("module", 3.4)])
def test_kept_outputs_change_nothing_and_save_work(fragile, texts, by, bits, monkeypatch):
    options = {"max_bits": bits, "scope": "block", "by": by}
    runs = []
    handle = fragile.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    kept = suggest_scheme(fragile, texts, "W3A8", "W8A8", **options)
    with_kept = len(runs)
    runs.clear()
    monkeypatch.setattr(prefixes, "KEPT_BYTES", 0)
    whole = suggest_scheme(fragile, texts, "W3A8", "W8A8", **options)
    handle.remove()
    assert kept.scheme == whole.scheme and kept.steps == whole.steps and kept.steps
    assert with_kept < len(runs)


def test_bits_by_module_are_those_of_the_weights(fragile, texts):
    found = suggest_scheme(fragile, texts, "W3Afp", "W6Afp", max_bits=3.5, by="module")
    with quantized(fragile, found.scheme):
        weights = quantization(fragile).weights
        bits = sum(w.parameter.numel() * w.scheme.weight_bits for w in weights)
        assert found.weight_bits == pytest.approx(bits / sum(w.parameter.numel() for w in weights))
    assert found.weight_bits <= 3.5 and found.met
    assert found.loss == measured(fragile, found.scheme, texts)


def test_targets_that_cannot_be_met_say_so(fragile, texts):
    found = suggest_scheme(fragile, texts, "W2A3", "W3A3", max_increase=0.01)
    assert not found.met and "W3A3 everywhere already costs" in found.reason
    assert found.scheme == "W3A3" and found.loss == measured(fragile, "W3A3", texts)
    both = suggest_scheme(fragile, texts, "W2A8", "W8A8", max_increase=0.001, max_bits=3.6)
    assert not both.met and "bits are spent" in both.reason and both.weight_bits <= 3.6


def test_a_target_met_at_once_raises_nothing(fragile, texts):
    found = suggest_scheme(fragile, texts, "W8A8", "W16A16", max_increase=10.0)
    assert (found.met, found.scheme, found.steps) == (True, "W8A8", [])


def test_equal_weights_are_told_apart_by_activations(fragile, texts):
    found = suggest_scheme(fragile, texts, "W8A3", "W8A8", max_increase=0.3)
    assert found.met and found.weight_bits == 8 and 0 < len(found.steps) <= 4


def test_transformers_models(texts):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=61, max_position_embeddings=32,
    )).eval()  # fmt: skip
    with torch.no_grad():
        llama.lm_head.weight.mul_(20)
    found = suggest_scheme(llama, texts, "W2A8", "W8A8", max_bits=5.0)
    assert found.loss == measured(llama, found.scheme, texts) and len(found.steps) == 1


@pytest.mark.parametrize(
    ("low", "high", "options", "says"),
    [("W8A8", "W4A4", {}, "narrow scheme first"), ("W4A4", "W4A4", {}, "not wider"),
     ("W4A4 layers.0=fp", "W8A8", {}, "searched for"), ("W4A4", "W8A8", {"by": "head"}, "'head'"),
     ("W4A4", "W8A8", {"max_bits": 3.0}, "everywhere takes 4"),
     ("W8A4", "W8A8", {"max_bits": 8.0}, "give max_increase")],
)  # fmt: skip
def test_mistakes(fragile, texts, low, high, options, says):
    with pytest.raises(UserError, match=says):
        suggest_scheme(fragile, texts, low, high, **options)
    assert quantization(fragile) is None


def test_the_command_prints_a_scheme_that_can_be_pasted(copy_run, tmp_path, capsys):
    import json
    import shlex

    from skipless.cli import main

    tiny_run = copy_run(tmp_path / "run")  # measuring writes into it
    words = ["quantize", str(tiny_run), "--suggest", "W2A8", "W8A8", "--max-bits", "5"]
    assert main([*words, "--num-tokens", "256", "--json"]) in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["weight_bits"] <= 5 and found["scheme"].startswith("W2A8")
    assert (found["scope"], found["method"]) == ("linear", "rtn")
    assert main([*words[:2], "--suggest", "W2A8,W8A8", *words[5:], "--num-tokens", "256"]) == 0
    shown = capsys.readouterr().out
    assert "in scope linear; target met" in shown
    line = next(line for line in shown.splitlines() if line.startswith("to try it: "))
    typed = shlex.split(line.removeprefix("to try it: "))
    assert typed[:3] == ["skipless", "quantize", str(tiny_run)]
    assert main([*typed[1:], "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["scheme"], row["scope"]) for row in measured] == [(found["scheme"], "linear")]
    assert measured[0]["loss"] == found["loss"]
    for more, says in (
        (["--schemes", "W8A8"], "--suggest takes no --schemes"),
        (["--scopes", "linear", "block"], "--scopes names 2"),
    ):
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err
    assert main(["quantize", str(tiny_run), "--max-bits", "5"]) == 2
    assert "go with --suggest" in capsys.readouterr().err
