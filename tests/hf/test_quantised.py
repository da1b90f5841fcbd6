"""Quantised models of transformers, saved the ways that people save: never as another model."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import skipless.hf  # noqa: F401
from skipless.errors import UserError
from skipless.export import load_quantized, save_quantized
from skipless.quant import quantize, restore

from .hf_models import SMALL, build, ids


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(intermediate_size=48, **SMALL)).eval()


@torch.no_grad()
def logits(model):
    return model(ids()).logits


@pytest.mark.parametrize("make", [build, llama])
def test_a_quantised_model_is_not_saved_as_its_weights_alone(make, tmp_path):
    model = make()
    plain = logits(model)
    quantize(model, "W8A8")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UserError, match=r"save_quantized\(model, folder\), or restore"):
            each.save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()
    save_quantized(model, tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again), logits(model))
    for each in (model, copy.deepcopy(model)):
        restore(each).save_pretrained(tmp_path / "plain")
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), plain)


def test_a_quantised_part_is_not_saved_as_its_weights_alone(tmp_path):
    model = build()
    quantize(model.model, "W8A8")
    with pytest.raises(UserError, match=r"^model is quantised by itself .* restore\(model.model\)"):
        model.save_pretrained(tmp_path / "no")
    restore(model.model)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("make", [build, llama])
@pytest.mark.parametrize("scheme", ["W8A8-a:token", "W4A4", "W8A8-w:g16"])
def test_a_loaded_model_is_saved_by_the_scheme_that_it_has_now(make, scheme, tmp_path):
    save_quantized(quantize(make(), "W8A8"), tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    quantize(restore(model), scheme)
    expected = logits(model)
    model.save_pretrained(tmp_path / "second")
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "second"),
        load_quantized(tmp_path / "second"),
    ):
        assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("make", [build, llama])
@pytest.mark.parametrize("content", [b"", b"x" * 99, None])
def test_weights_that_are_cut_short_are_told_in_a_sentence(make, content, tmp_path):
    folder = save_quantized(quantize(make(), "W8A8"), tmp_path / "packed")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9] if content is None else content)
    for load in (AutoModelForCausalLM.from_pretrained, load_quantized):
        with pytest.raises(UserError, match=r"model\.safetensors cannot be read .* cut short"):
            load(folder)


@pytest.mark.parametrize("make", [build, llama])
@pytest.mark.parametrize(("key", "value", "told"), [
    ("weights", None, "says None for quantization_config.weights"),
    ("ranges", 3, "says 3 for quantization_config.ranges"),
    ("version", 2, "saved in version 2 of the format and this skipless reads 1"),
])  # fmt: skip
def test_damaged_settings_are_told_in_a_sentence(make, key, value, told, tmp_path):
    folder = save_quantized(quantize(make(), "W8A8"), tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    for load in (AutoModelForCausalLM.from_pretrained, load_quantized):
        with pytest.raises(UserError, match=told):
            load(folder)


@pytest.mark.parametrize("make", [build, llama])
@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.input_layernorm"])
def test_what_is_missing_beside_packed_weights_is_not_drawn(make, name, tmp_path):
    folder = save_quantized(quantize(make(), "W8A8"), tmp_path / "packed")
    file, key = folder / "model.safetensors", f"model.{name}.weight"
    state = load_file(file)
    lost = {k: v for k, v in state.items() if k != key}
    for changed, told in (
        (lost, f"the folder has no {key}"),
        (lost | {key: state[key][:3].clone()}, rf"holds {key} as \[3"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        for load in (AutoModelForCausalLM.from_pretrained, load_quantized):
            with pytest.raises(UserError, match=told):
                load(folder)
