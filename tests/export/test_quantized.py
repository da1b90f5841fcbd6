"""Folders of quantised models: the same bits after loading, whole or untouched, other programs."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from skipless.config import ConnectionConfig, ModelConfig
from skipless.errors import UserError
from skipless.export import load_quantized, save_quantized
from skipless.model import Transformer
from skipless.quant import (
    integer_layers,
    quantization,
    quantize,
    restore,
    to_integer,
)

IDS = torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def ours(kind: str = "none") -> Transformer:
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=16, connection=ConnectionConfig(kind=kind),
    )  # fmt: skip
    return Transformer(config, seed=0).eval()


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=61, max_position_embeddings=64, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=32)
    return GPT2LMHeadModel(config).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("make", "scheme", "options"),
    [
        (ours, "W8A8-KV8", {}),
        (lambda: ours("scalar"), "W4A12-w:channel-a:token", {"scope": "block"}),
        (llama, "W8A8", {"scope": "block"}),
        (llama, "W4A8-w:channel-a:token", {}),
        (lambda: llama(tie_word_embeddings=True), "W3A8-w:g16-asym", {}),
        (lambda: llama(tie_word_embeddings=True), "W8A8", {"include_head": True}),
        (gpt2, "W12A16", {}),
        (gpt2, "W8A12-static", {"calibration": [IDS]}),
    ],
)  # fmt: skip
def test_a_loaded_model_has_the_same_bits(tmp_path, make, scheme, options):
    try:
        model = make()
    except UserError:
        model = ours("residual")
    full = sum(p.numel() * 4 for p in model.parameters())
    quantize(model, scheme, **options)
    expected = logits(model)
    folder = save_quantized(model, tmp_path / "saved")
    assert os.path.getsize(folder / "model.safetensors") < full
    loaded = load_quantized(folder)
    assert type(loaded) is type(model) and not loaded.training
    assert torch.equal(logits(loaded), expected)
    assert quantization(loaded).describe() == quantization(model).describe()
    if "asym" not in scheme and ":g" not in scheme:
        to_integer(model)
        executed = load_quantized(folder, integer=True)
        assert len(integer_layers(executed)) == len(integer_layers(model)) > 0
        assert torch.equal(logits(executed), logits(model))


def test_transformers_loads_and_saves_it(tmp_path):
    model = llama()
    quantize(model, "W4A8-w:channel")
    expected = logits(model)
    save_quantized(model, tmp_path / "saved")
    import skipless.hf  # noqa: F401

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded.eval()), expected)
    loaded.save_pretrained(tmp_path / "again")
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("saved", "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again.eval()), expected)
    restore(again)
    with pytest.raises(UserError, match="the model was restored"):
        again.save_pretrained(tmp_path / "third")


def test_without_the_plug_in_transformers_stops(tmp_path, monkeypatch):
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
    )

    model = llama()
    quantize(model, "W8A8")
    save_quantized(model, tmp_path / "saved")
    for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(mapping, "skipless", raising=False)
    with pytest.raises(Exception, match=r"mismatch|ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_bfloat16_models(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    quantize(model, "W4A8-w:channel-a:token")
    expected = logits(model)
    loaded = load_quantized(save_quantized(model, tmp_path / "saved"))
    assert loaded.dtype == torch.bfloat16 and torch.equal(logits(loaded), expected)
    mine = ours().to(torch.bfloat16)
    quantize(mine, "W8A8")
    loaded = load_quantized(save_quantized(mine, tmp_path / "mine"))
    assert torch.equal(logits(loaded), logits(mine))


def test_an_interrupted_save_leaves_the_old_folder(tmp_path, monkeypatch):
    model = ours()
    quantize(model, "W8A8")
    folder = save_quantized(model, tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    restore(model)
    quantize(model, "W4A4")
    import safetensors.torch

    def torn(tensors, path, **options):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(safetensors.torch, "save_file", torn)
        save_quantized(model, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["saved"]
    save_quantized(model, folder)  # one of ours may be replaced
    assert str(quantization(load_quantized(folder)).scheme) == "W4A4"


def test_refusals(tmp_path):
    model = ours()
    with pytest.raises(UserError, match="not quantised"):
        save_quantized(model, tmp_path / "saved")
    quantize(model, "W8A8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="holds something else"):
        save_quantized(model, tmp_path / "other")
    with pytest.raises(UserError, match="is a file"):
        save_quantized(model, tmp_path / "other" / "notes.txt")
    with pytest.raises(UserError, match="no model quantised by skipless"):
        load_quantized(tmp_path / "other")
    with pytest.raises(UserError, match="layout"):
        save_quantized(model, tmp_path / "saved", layout="gguf")
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    quantize(plain, "W8A8")
    with pytest.raises(UserError, match="saved_form"):
        save_quantized(plain, tmp_path / "saved")
    folder = save_quantized(model, tmp_path / "saved")
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        load_quantized(folder)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("W12A16", {}, "at most 8 bits"), ("W8A8-asym", {}, "symmetric"),
        ("W8A8-static", {"calibration": [IDS]}, "dynamic"), ("W8A8", {"scope": "block"}, "scope"),
    ],
)  # fmt: skip
def test_what_compressed_tensors_has_no_words_for(tmp_path, scheme, options, message):
    model = llama()
    quantize(model, scheme, **options)
    with pytest.raises(UserError, match=message):
        save_quantized(model, tmp_path / "saved", layout="compressed-tensors")
    conv = gpt2()
    quantize(conv, "W8A8")
    with pytest.raises(UserError, match="Conv1D"):
        save_quantized(conv, tmp_path / "saved", layout="compressed-tensors")


@pytest.mark.parametrize(
    "scheme", ["W8A8-w:channel-a:token", "W4Afp-w:g16", "W3A8-w:channel-a:token"]
)
def test_the_compressed_tensors_layout(tmp_path, scheme):
    model = llama()
    quantize(model, scheme)
    folder = save_quantized(model, tmp_path / "saved", layout="compressed-tensors")
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = about["config_groups"]["group_0"]
    bits = int(scheme[1])
    assert group["weights"]["num_bits"] == bits and len(group["targets"]) == 14
    assert about["format"] == ("int-quantized" if scheme.startswith("W8A8") else "pack-quantized")
    assert about["ignore"] == ["lm_head"]
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if bits == 8:
        assert tensors[name].dtype == torch.int8
    else:
        assert tensors[name + "_packed"].shape == (48, -(-32 * bits // 32))
    assert tensors[name + "_scale"].shape == (48, 2 if "g16" in scheme else 1)


@pytest.mark.parametrize(
    "scheme", ["W8A8-w:channel-a:token", "W4Afp-w:g16", "W3A8-w:channel-a:token"]
)
def test_the_package_reads_the_same_weights(tmp_path, scheme):
    pytest.importorskip("compressed_tensors")
    model = llama()
    quantize(model, scheme)
    folder = save_quantized(model, tmp_path / "saved", layout="compressed-tensors")
    other = AutoModelForCausalLM.from_pretrained(folder).eval()
    theirs = logits(other)
    rounded = dict(model.named_parameters())
    seen = 0
    for module, name in ((m, n) for n, m in other.named_modules() if n + ".weight" in rounded):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.is_floating_point():
            assert torch.equal(weight, rounded[name + ".weight"]), name
            seen += 1
    assert seen > 14, sys.modules["compressed_tensors"].__version__
    mine = logits(model)
    assert (theirs - mine).norm() / mine.norm() < 0.05


def test_damaged_folders_of_transformers_are_refused(tmp_path, capfd):
    model = llama()
    quantize(model, "W8A8")
    folder = save_quantized(model, tmp_path / "saved")
    capfd.readouterr()
    load_quantized(folder)
    assert "Loading weights" not in capfd.readouterr().err
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    from safetensors.torch import save_file

    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"no packed {name}"):
        load_quantized(folder)
    save_file({n: t for n, t in tensors.items() if "norm" not in n}, folder / "model.safetensors")
    with pytest.raises(UserError, match="norm"):
        load_quantized(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_quantized(folder)


@pytest.mark.parametrize("make", [ours, llama])
@pytest.mark.parametrize("key", ["scheme", "scope", "method", "layers", "weights", "ranges"])
def test_settings_that_are_damaged(tmp_path, make, key):
    model = make()
    quantize(model, "W8A8-static", calibration=[IDS])
    folder = save_quantized(model, tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    for value in (7, None):
        config["quantization_config"][key] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"saved.* {value} for .*\.{key}") as caught:
            load_quantized(folder)
        assert "\n" not in str(caught.value)


def test_nothing_is_drawn_that_the_file_replaces(tmp_path, monkeypatch):
    """Orthogonal starts of a wide model take longer than reading it."""
    model = ours("anneal")
    model.set_training_progress(0.3)
    quantize(model, "W8A8")
    folder = save_quantized(model, tmp_path / "saved")
    monkeypatch.setattr("skipless.model.transformer.initialize", None)
    again = load_quantized(folder)
    assert torch.equal(logits(again), logits(model)) and not any(p.is_meta for p in again.buffers())


def test_places_modes_and_what_a_kill_left(tmp_path):
    model = ours()
    quantize(model, "W8A8")
    folder = save_quantized(model, tmp_path / "a")
    modes = {oct(file.stat().st_mode) for file in folder.iterdir()}
    assert len(modes) == 1, "weights are as readable as the rest"
    (tmp_path / "link").symlink_to("a")
    save_quantized(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    folder.rename(tmp_path / ".a.0badcafe.old")
    with pytest.raises(UserError, match=r"being replaced.*whole in .*\.a\.0badcafe\.old"):
        load_quantized(folder)
    for bad, says in (("a\0b", "null byte"), ("x" * 300, "name too long"), ("a", "a file")):
        if bad == "a":
            (tmp_path / "a").write_text("")
        with pytest.raises(UserError, match=says):
            save_quantized(model, tmp_path / bad)


def test_a_full_disk_leaves_the_old_folder(tmp_path):
    """A limit on the size of files stands for it: the write of the weights fails half way."""
    resource = pytest.importorskip("resource", reason="limits of POSIX")
    model = ours()
    quantize(model, "W2A8")
    folder = save_quantized(model, tmp_path / "a")
    restore(model)
    quantize(model, "W8A8", include_head=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (folder / "model.safetensors").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        with pytest.raises(UserError, match=r"cannot write .*/a: .*nothing was written"):
            save_quantized(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["a"]
    assert str(quantization(load_quantized(folder)).scheme) == "W2A8"
