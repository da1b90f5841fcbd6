"""Packed folders of a run in transformers: in our layout and in that of compressed-tensors."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from skipless.cli import main
from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.export import export_folder, load_quantized, save_quantized
from skipless.hf import SkiplessForCausalLM
from skipless.hf.converting import inner_name
from skipless.model import Transformer
from skipless.quant import integer_layers, quantization, quantize, restore, to_integer
from skipless.train import load_run

IDS = torch.arange(2, 18)[None]
MIXED = ["layers.0.mlp.*=W8A8", "*.o_proj=fp"]


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("W8A8", {}),
        ("W4A8-w:channel-a:token", {"overrides": MIXED}),
        ("W8A8-static", {"scope": "all"}),
        ("W8A8-asym-w:g8", {"include_head": True}),
    ],
)
def test_auto_classes_read_the_packed_folder_of_a_run(tiny_run, tmp_path, scheme, more):
    folder = tmp_path / "packed"
    export_folder(str(tiny_run), folder, scheme, num_tokens=256, **more)
    own, made = load_quantized(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(made) is SkiplessForCausalLM and quantization(made) is not None
    with torch.no_grad():
        expected = own(IDS).logits
        assert torch.equal(made(IDS).logits, expected)
        texts = made.generate(IDS, max_new_tokens=6, do_sample=False)
        assert torch.equal(texts, own.generate(IDS, 6))
        made.save_pretrained(tmp_path / "again")  # packed again, under transformers' names
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(IDS).logits, expected)
        if not more.get("include_head"):
            to_integer(made)
            assert len(integer_layers(made)) == len(integer_layers(to_integer(own)))
            assert torch.equal(made(IDS).logits, own(IDS).logits)
    restore(made)


def test_what_the_packed_folder_of_a_run_is_not(tiny_run, tmp_path):
    folder = tmp_path / "packed"
    export_folder(str(tiny_run), folder, "W8A8")
    tokenizer, run = AutoTokenizer.from_pretrained(folder), load_run(tiny_run)
    made = AutoModelForCausalLM.from_pretrained(folder)
    for settings in (made.config, made.generation_config):
        assert settings.eos_token_id == settings.pad_token_id == run.tokenizer.eos_id
    assert tokenizer("the king said")["input_ids"] == run.tokenizer.encode("the king said")
    expected = run.tokenizer.for_transformers(32)
    for key in ("eos_token_id", "pad_token_id", "padding_side", "model_max_length",
                "split_special_tokens", "model_input_names"):  # fmt: skip
        assert getattr(tokenizer, key) == getattr(expected, key), key
    wide = SkiplessForCausalLM.from_pretrained(folder, dtype=torch.float64, device_map="cpu")
    assert wide.dtype == torch.float64
    found, report = SkiplessForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and found.dtype == torch.float32
    with pytest.raises(UserError, match="a SkiplessForCausalLM, not a SkiplessForSequence"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(UserError, match="which is read without max_memory"):
        AutoModelForCausalLM.from_pretrained(folder, max_memory={0: 1})
    config = json.loads((folder / "config.json").read_text())
    config["model"]["hidden_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit its config.json"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_packed_classifier_and_a_run_itself(tiny_run, tmp_path):
    config = ModelConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         vocab_size=40, num_labels=3)  # fmt: skip
    own = Transformer(config, seed=1).eval()
    quantize(own, "W4A8-w:channel")
    save_quantized(own, tmp_path / "packed")
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(made(IDS).logits, own(IDS).logits)
    with pytest.raises(UserError, match="config.json is that of a run; `skipless export RUN"):
        SkiplessForCausalLM.from_pretrained(tiny_run)


def test_names_inside():
    pairs = {"layers.0.mlp.*": "model.layers.0.mlp.*", "*.o_proj": "*.o_proj",
             "lm_head": "lm_head", "lm_head:input": "lm_head:input", "norm.weight":
             "model.norm.weight", "score.weight": "score.weight", "l*": "model.l*"}  # fmt: skip
    assert {name: inner_name(name) for name in pairs} == pairs


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8-w:channel-a:token"])
def test_a_run_in_the_layout_of_compressed_tensors(tiny_run, tmp_path, scheme, capsys):
    out = tmp_path / "out"
    words = ["export", str(tiny_run), "--format", "compressed-tensors", "--scheme", scheme]
    more = ["--override", *MIXED, "--out", str(out)]
    assert main([*words, *more]) == 0
    assert "transformers after `import skipless.hf`, with the package" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["SkiplessForCausalLM"] and "model" not in config
    named = [name for group in config["quantization_config"]["config_groups"].values()
             for name in group["targets"]]  # fmt: skip
    assert named and all(name.startswith("model.layers.") for name in named)
    text = "the king said"
    tokenizer, own = AutoTokenizer.from_pretrained(out), load_run(tiny_run)
    assert tokenizer(text)["input_ids"] == own.tokenizer.encode(text)
    with pytest.raises(UserError, match="transformers reads it where that package is installed"):
        load_quantized(out)
    pytest.importorskip("compressed_tensors")
    quantize(own.model, scheme, overrides=MIXED)
    made = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():  # and unpacks the weights of the first call
        expected = own.model(IDS).logits
        assert (made(IDS).logits - expected).norm() < 0.05 * expected.norm()
    for name, parameter in own.model.named_parameters():
        assert torch.equal(made.get_parameter(inner_name(name)), parameter), name


def test_our_decoder_has_no_form_in_that_layout(tiny_run, tmp_path):
    model = load_run(tiny_run).model
    quantize(model, "W8A8")
    with pytest.raises(UserError, match="from_transformer"):
        save_quantized(model, tmp_path / "out", layout="compressed-tensors")
    assert not (tmp_path / "out").exists()
