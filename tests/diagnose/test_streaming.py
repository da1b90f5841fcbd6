"""Models read layer by layer against the same models whole: every number of every site."""

import json
import shutil

import pytest
import torch
from torch import nn

from skipless.diagnose import diagnose
from skipless.diagnose.block_noise import block_noise
from skipless.diagnose.streaming import (
    ensure_loaded,
    file_bytes,
    free_bytes,
    is_streamed,
    open_streamed,
)
from skipless.errors import UserError
from skipless.quant import Scheme

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
}  # fmt: skip
TEXT = {
    **SIZES, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
WHISPER = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
    "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", "ForCausalLM", {**TEXT, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", "LMHeadModel",
             {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40, "n_positions": 32}),
    "bert": ("Bert", "Model", TEXT),
    "vit": ("ViT", "ForImageClassification", IMAGE),
    "whisper": ("Whisper", "ForConditionalGeneration", WHISPER),
    "clip": ("CLIP", "Model",
             {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8}),
}  # fmt: skip


def save(name, path, **options):
    transformers = pytest.importorskip("transformers")
    prefix, suffix, config = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, prefix + suffix)(
        getattr(transformers, prefix + "Config")(**config)
    )
    model.save_pretrained(path, **options)
    return type(model)


def inputs(name):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 40, (2, 8), generator=generator)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    if name == "whisper":
        sound = torch.randn(2, 4, 16, generator=generator)
        return {"input_features": sound, "decoder_input_ids": tokens}
    if name == "clip":
        tokens[:, -1] = 2
        image = torch.randn(2, 3, 8, 8, generator=generator)
        return {"input_ids": tokens, "pixel_values": image}
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def whole(cls, path):
    """As loaded, each weight moved to where an allocator puts it: alignment moves sums."""
    model = cls.from_pretrained(path).eval()
    for parameter in {id(p): p for p in model.parameters()}.values():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_number_is_that_of_the_whole_model(name, tmp_path):
    shards = {"max_shard_size": "5KB"} if name in ("llama", "vit") else {}
    cls = save(name, tmp_path, **shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(shards)
    batches = [inputs(name), {k: v.flip(0) for k, v in inputs(name).items()}]
    expected = diagnose(whole(cls, tmp_path), batches, ["W8A8", "W4A4"], layers=False)
    model = open_streamed(tmp_path)
    found = diagnose(model, batches, ["W8A8", "W4A4"])
    assert found.sites == expected.sites and found.weights == expected.weights
    for mine, other in ((found.attention, expected.attention), (found.joins, expected.joins)):
        for row, wanted in zip(mine, other, strict=True):  # their products' sums vary with memory
            assert row == {
                key: value if value is None or isinstance(value, str)
                else pytest.approx(value, rel=1e-5, abs=1e-6)
                for key, value in wanted.items()
            }  # fmt: skip
    assert found.scope == expected.scope and found.damage is None
    assert any("read layer by layer" in line for line in found.missing)
    assert sum(not p.is_meta for p in model.parameters()) < len(list(model.parameters()))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_noise_of_blocks_is_that_of_the_whole_model(name, tmp_path, capsys):
    cls = save(name, tmp_path / "model")
    batches = [inputs(name), {k: v.flip(0) for k, v in inputs(name).items()}]
    model, scheme = open_streamed(tmp_path / "model"), Scheme.parse("W4A4")
    expected = block_noise(whole(cls, tmp_path / "model"), scheme, batches, "block", {})
    found = diagnose(model, batches, ["W4A4"], layer_batches=batches, out=tmp_path / "out")
    predicted = {row["layer"]: row["predicted"] for row in found.layers}
    assert predicted == {k: pytest.approx(v, rel=1e-6) for k, v in expected.items()}
    assert len(expected) == 3 and all(value > 0 for value in expected.values())
    assert all(row["increase"] is None for row in found.layers)
    assert any("blocks alone add at W4A4: most in" in line for line in found.lines())
    assert "Predicted and not measured" in (tmp_path / "out" / "index.html").read_text()
    with pytest.raises(UserError, match="needs a calibration"):
        block_noise(model, scheme, batches, "block", {"calibration": batches})


def test_two_stacks_have_no_noise_of_blocks(tmp_path):
    save("whisper", tmp_path)
    found = diagnose(open_streamed(tmp_path), inputs("whisper"), "W8A8")
    assert found.layers == [] and any("several stacks" in line for line in found.missing)


def test_one_block_is_in_memory_at_a_time(tmp_path):
    save("llama", tmp_path)
    model = open_streamed(tmp_path)
    assert is_streamed(model) and not is_streamed(nn.Linear(2, 2))
    full = []

    def look(block, *_):
        full.append([i for i, layer in enumerate(model.model.layers)
                     if not any(p.is_meta for p in layer.parameters())])  # fmt: skip

    for layer in model.model.layers:
        assert all(p.is_meta for p in layer.parameters())
        layer.mlp.register_forward_hook(look)
    with torch.no_grad():
        model(**inputs("llama"))
    assert full == [[0], [1], [2]]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ensure_loaded(model, "model.layers.1.self_attn.q_proj.weight")
    assert not model.model.layers[1].mlp.up_proj.weight.is_meta
    assert model.model.layers[2].mlp.up_proj.weight.is_meta
    assert not model.model.norm.weight.is_meta


def test_the_dtype_is_that_of_the_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    streamed = open_streamed(tmp_path)
    ensure_loaded(streamed, "model.layers.0")
    assert streamed.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert streamed.model.norm.weight.dtype == torch.bfloat16


def test_a_base_models_file_is_read_into_a_model_with_a_head_and_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    streamed = open_streamed(tmp_path)
    ensure_loaded(streamed, "layers.2")
    expected = model.model.layers[2].mlp.up_proj.weight
    assert torch.equal(streamed.layers[2].mlp.up_proj.weight, expected)


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    save("llama", tmp_path / "good")
    assert file_bytes(tmp_path / "good") > 10_000 and (free_bytes() or 1) > 0

    def changed(name, change):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        weights = load_file(tmp_path / name / "model.safetensors")
        change(weights)
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / name

    key = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UserError, match=rf"no weight named {key}: it is incomplete"):
        open_streamed(changed("lacks", lambda w: w.pop(key)))
    with pytest.raises(UserError, match="has the shape"):
        streamed = open_streamed(
            changed("narrow", lambda w: w.update({key: w[key][:, :3].clone()}))
        )
        ensure_loaded(streamed, key)
    with pytest.raises(UserError, match="holds NaN"):
        diagnose(open_streamed(changed("nan", lambda w: w[key].fill_(float("nan")))),
                 inputs("llama")["input_ids"])  # fmt: skip
    (tmp_path / "good" / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="cannot be read"):
        open_streamed(tmp_path / "good")
    (tmp_path / "good" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        open_streamed(tmp_path / "good")
    mixture = transformers.MixtralConfig(**TEXT, num_local_experts=2, num_key_value_heads=2)
    transformers.MixtralForCausalLM(mixture).save_pretrained(tmp_path / "experts")
    with pytest.raises(UserError, match="stored in another form than the model's"):
        open_streamed(tmp_path / "experts")
    config = transformers.ResNetConfig(hidden_sizes=[4], depths=[1], embedding_size=4)
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    with pytest.raises(UserError, match="has no list of blocks"):
        open_streamed(tmp_path / "resnet")


def test_the_command_reads_layer_by_layer_when_asked_or_when_memory_is_short(
    saved, tmp_path, capsys, monkeypatch
):
    from skipless.cli import main
    from skipless.diagnose import loading

    model, text = str(saved / "model"), str(saved / "text.txt")
    words = ["diagnose", model, "--text", text, "--num-tokens", "64", "--schemes", "W8A8"]
    assert main([*words, "--out", str(tmp_path / "whole"), "--no-layers"]) == 0
    assert main([*words, "--out", str(tmp_path / "asked"), "--layer-by-layer"]) == 0
    assert "this model is read layer by layer" in capsys.readouterr().out
    monkeypatch.setattr(loading, "free_bytes", lambda: file_bytes(model) - 1)
    assert main([*words, "--out", str(tmp_path / "short")]) == 0
    whole, asked, short = (
        json.loads((tmp_path / name / "diagnosis.json").read_text())["sites"]
        for name in ("whole", "asked", "short")
    )
    assert asked == short
    for row, wanted in zip(asked, whole, strict=True):  # files are not aligned, see `whole` above
        assert row["site"] == wanted["site"] and row["count"] == wanted["count"]
        for key in ("kurtosis", "max_abs", "std"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-5)
    monkeypatch.setattr(loading, "free_bytes", lambda: file_bytes(model))
    assert not is_streamed(loading.load_subject(model).model)


def test_only_folders_are_read_layer_by_layer(tiny_run):
    from skipless.diagnose.loading import load_subject

    with pytest.raises(UserError, match="is a run directory, read whole"):
        load_subject(str(tiny_run), layer_by_layer=True)
    with pytest.raises(UserError, match=r"hf download some/one --local-dir"):
        load_subject("some/one", layer_by_layer=True)
