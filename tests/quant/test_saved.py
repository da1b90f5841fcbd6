"""Packed weights: every width there and back, the bits of the model, refusals in words."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.quant import integer_codes, paused, quantization, quantize, restore, to_integer
from skipless.quant.bits import FORMS, pack_bits, pack_weight, unpack_bits, unpack_weight
from skipless.quant.saved import resume, saved_form

IDS = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_bits_lie_side_by_side_lowest_first(bits, rows, width, seed):
    half = 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-half, half, (rows, width), generator=generator)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (rows, -(-width * bits // 32))
    for row, words in zip(codes.tolist(), packed.tolist(), strict=True):
        whole = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(words))
        assert whole == sum((code + half) << (bits * place) for place, code in enumerate(row))
    assert torch.equal(unpack_bits(packed, bits, width).long(), codes)


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(2, 16),
    granularity=st.sampled_from(["tensor", "channel", "g4", "g12"]),
    symmetric=st.booleans(),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
    form=st.sampled_from(FORMS),
)
def test_codes_come_back(bits, granularity, symmetric, shift, form):
    if form == "int-quantized" and bits > 8:
        return
    w = torch.randn(6, 12, generator=torch.Generator().manual_seed(bits)) + shift
    codes = integer_codes(w, bits, granularity=granularity, symmetric=symmetric)
    tensors = pack_weight(codes, bits, symmetric, form)
    assert ("weight_zero_point" in tensors) != symmetric
    group = int(granularity[1:]) if granularity[0] == "g" else None
    back = unpack_weight("w", tensors, bits, group)
    assert torch.equal(back.codes.int(), codes.codes) and torch.equal(back.scale, codes.scale)
    assert torch.equal(back.dequantize(), codes.dequantize())


SCHEMES = [
    "W8A8", "W4A12-w:channel-a:token", "W3A8-asym-w:g8", "W4Afp-w:g16", "W12A16", "W8A8-KV4",
    "W8A8-static-clip:p99.9", "W4A8 layers.0=W8A12-w:channel layers.1.mlp.*=fp",
]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scope", ["linear", "block"])
def test_a_model_comes_back_bit_for_bit(make_transformer, scheme, scope):
    model = make_transformer("residual")
    quantize(model, scheme, scope, calibration=[IDS])
    expected = model(IDS).logits
    tensors, about = saved_form(model)
    other = make_transformer("residual")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    other.load_state_dict({n: t for n, t in tensors.items() if t.is_floating_point()
                           and n in other.state_dict()}, strict=False)  # fmt: skip
    resume(other, tensors, about)
    assert torch.equal(other(IDS).logits, expected)
    mine, theirs = quantization(other), quantization(model)
    assert str(mine.scheme) == str(theirs.scheme) and mine.describe() == theirs.describe()
    twin = copy.deepcopy(other)
    assert torch.equal(twin(IDS).logits, expected)
    if "asym" not in scheme and "fp" not in scheme and ":g" not in scheme:
        to_integer(model)
        to_integer(other)
        assert torch.equal(other(IDS).logits, model(IDS).logits)
    with paused(other):
        other(IDS)  # the rounded weights, activations in full precision
    restore(other)
    assert quantization(other) is None
    again = saved_form(twin)
    assert again[1] == about
    assert all(torch.equal(again[0][name], tensor) for name, tensor in tensors.items())


def test_gptq_heads_and_some_layers(make_transformer):
    for options in (
        {"method": "gptq", "calibration": [IDS]}, {"include_head": True}, {"layers": [1]},
    ):  # fmt: skip
        model = make_transformer("none")
        quantize(model, "W4A8-w:channel", **options)
        expected = model(IDS).logits
        tensors, about = saved_form(model)
        other = make_transformer("none")  # the same seed: what is not packed is equal
        resume(other, tensors, about)
        assert torch.equal(other(IDS).logits, expected)
        assert len(quantization(other).weights) == len(quantization(model).weights)


def test_size(make_transformer):
    model = make_transformer("none")
    full = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    quantize(model, "W4A8")
    tensors, _ = saved_form(model)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) < full / 4


def test_16_bit_floats(make_transformer):
    model = make_transformer("none").to(torch.bfloat16)
    quantize(model, "W4A8-w:channel")
    expected = model(IDS).logits
    tensors, about = saved_form(model)
    other = make_transformer("none").to(torch.bfloat16)
    resume(other, tensors, about)
    assert torch.equal(other(IDS).logits, expected)


def test_what_cannot_be_saved_is_refused(make_transformer, plain):
    with pytest.raises(UserError, match="not quantised"):
        saved_form(plain)
    model = make_transformer("none")
    quantize(model, "W8A8")
    with paused(model), pytest.raises(UserError, match="leave the paused block"):
        saved_form(model)
    tensors, about = saved_form(model)
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(UserError, match="changed after quantize"):
        saved_form(model)
    for method, words in (("hadamard", "when the model runs"), ("codebook", "codebook")):
        other = make_transformer("none")
        try:
            quantize(other, "W4A8", method=method, calibration=[IDS])
        except UserError:
            continue  # the method has its own conditions
        with pytest.raises(UserError, match=words):
            saved_form(other)


def test_damage_is_told(make_transformer, plain):
    model = make_transformer("none")
    quantize(model, "W4A8")
    tensors, about = saved_form(model)
    name = next(iter(about["weights"]))
    with pytest.raises(UserError, match="belongs to another model"):
        resume(plain, tensors, about)
    fresh = make_transformer("none")
    with pytest.raises(UserError, match=f"no packed {name}"):
        resume(fresh, {}, about)
    with pytest.raises(UserError, match="do not belong together"):
        resume(fresh, tensors | {name: tensors[name].float()}, about)
    with pytest.raises(UserError, match="do not belong together"):
        resume(fresh, tensors | {f"{name}_shape": torch.tensor([3, 4])}, about)
    with pytest.raises(UserError, match="newer skipless"):
        resume(fresh, tensors, about | {"version": 2})
    assert quantization(fresh) is None


def test_commands_on_plain_weights_refuse_a_packed_folder(tmp_path, make_transformer, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    from skipless.cli import main
    from skipless.export import save_quantized

    llama = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=16,
    )).eval()  # fmt: skip
    for model, name in ((llama, "llama"), (make_transformer(), "ours")):
        folder = str(save_quantized(quantize(model, "W4A8"), tmp_path / name))
        for words in (
            ["diagnose", folder, "--text", __file__, "--out", str(tmp_path / "page")],
            ["patch", folder, "--connection", "none", "--out", str(tmp_path / "patched")],
            ["prune", folder, "--text", __file__, "--out", str(tmp_path / "pruned")],
        ):
            assert main(words) == 2, words
            error = capsys.readouterr().err
            assert "holds packed integers (W4A8) that `skipless export` wrote" in error
            assert f"`skipless eval {folder} --text FILE` measures its loss" in error, (
                words,
                error,
            )
        for words in (["eval", folder], ["probe", folder], ["quantize", folder, "--text", "."]):
            assert main(words) == 2, words
            assert f"skipless eval {folder} --text FILE" in capsys.readouterr().err
    restore(llama)
    quantize(llama, "W8A8-w:channel-a:token")
    other = str(save_quantized(llama, tmp_path / "c", layout="compressed-tensors"))
    for words in (
        ["diagnose", other, "--text", __file__, "--out", str(tmp_path / "page")],
        ["patch", other, "--connection", "none", "--out", str(tmp_path / "patched")],
    ):
        assert main(words) == 2, words
        assert "quantised already (compressed-tensors)" in capsys.readouterr().err
    assert main(["eval", other]) == 2
    assert "quantised already (compressed-tensors)" in capsys.readouterr().err


def test_a_packed_folder_is_measured_on_a_text(tiny_run, tmp_path, capsys):
    """The same loss, to the digit, as of the quantised run in Python."""
    from skipless.cli import main
    from skipless.evaluate import loss
    from skipless.train import load_run

    text, folder = tmp_path / "text.txt", str(tmp_path / "packed")
    text.write_text("the cat sat on the mat and looked at the rain. " * 40)
    assert main(["export", str(tiny_run), "--scheme", "W3A4", "--out", folder]) == 0
    capsys.readouterr()
    assert main(["eval", folder, "--text", str(text), "--num-tokens", "128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = load_run(tiny_run)
    length = run.config.model.max_position_embeddings
    ids = run.tokenizer.encode(text.read_text())[: 128 // length * length]
    batches = list(torch.tensor(ids).view(-1, length).split(4))
    full = loss(run.model, batches).nats
    expected = loss(quantize(run.model, "W3A4"), batches)
    assert found["held_out_loss"] == pytest.approx(expected.nats, abs=1e-9)
    assert found["num_tokens"] == expected.num_tokens and abs(expected.nats - full) > 1e-4
    words = ["eval", str(tiny_run), "--text", str(text), "--num-tokens", "128", "--json"]
    before = {file: file.read_bytes() for file in tiny_run.glob("*.json")}
    assert main(words) == 0
    source = json.loads(capsys.readouterr().out)
    assert source["held_out_loss"] == pytest.approx(full, abs=1e-9), "on the same tokens"
    assert source["num_tokens"] == expected.num_tokens
    assert {file: file.read_bytes() for file in tiny_run.glob("*.json")} == before
