"""Convolutions and embeddings: kernels and their inputs by hand, restored bit for bit, saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from skipless.errors import UserError
from skipless.quant import (
    fake_quantize,
    from_integer,
    integer_codes,
    integer_layers,
    quantization,
    quantize,
    quantized,
    restore,
    to_integer,
)
from skipless.quant.integers.hardware import probe

ALL = ["W4A8", "W4A6-w:channel-a:token", "W3A8-asym", "W4A8-w:g4", "W4Afp-clip:mse"]


def vit() -> tuple[nn.Module, dict]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=8, patch_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    return ViTModel(config).eval(), {"pixel_values": torch.randn(2, 3, 8, 8)}


def whisper() -> tuple[nn.Module, dict]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64,
        max_source_positions=20, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.arange(12).view(2, 6)
    model = WhisperForConditionalGeneration(config).eval()
    return model, {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}


def output(model: nn.Module, batch: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch)[0]


def rounded(x: torch.Tensor, text: str) -> torch.Tensor:
    """An activation [examples, channels, ...] by hand."""
    bits = text.partition("A")[2].partition("-")[0]
    if bits == "fp":
        return x
    options = {"symmetric": "-asym" not in text, "clip": "mse" if "mse" in text else "absmax"}
    if "-a:token" not in text:
        return fake_quantize(x, int(bits), **options)
    return torch.stack([fake_quantize(example, int(bits), **options) for example in x])


def kernel(w: torch.Tensor, text: str) -> torch.Tensor:
    """A kernel [out, in, ...] by hand, as rows [out, in * k]."""
    granularity = "channel" if "-w:channel" in text else "g4" if "-w:g4" in text else "tensor"
    flat = fake_quantize(
        w.detach().reshape(len(w), -1), int(text[1]), granularity=granularity,
        symmetric="-asym" not in text, clip="mse" if "mse" in text else "absmax",
    )  # fmt: skip
    return flat.reshape(w.shape)


@pytest.mark.parametrize("text", ALL)
def test_patches_of_vit_by_hand(text):
    model, batch = vit()
    layer = model.embeddings.patch_embeddings.projection
    before = copy.deepcopy(model.state_dict())
    expected = F.conv2d(
        rounded(batch["pixel_values"], text), kernel(layer.weight, text), layer.bias, layer.stride
    )
    reference, seen = output(model, batch), []
    quantize(model, text, include_convolutions=True)
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out))
    output(model, batch)
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert "convolution" not in quantization(model).describe()
    handle.remove()
    restore(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(output(model, batch), reference)


@pytest.mark.parametrize("text", ["W4A8", "W4A6-w:channel-a:token"])
def test_front_of_whisper_by_hand(text):
    model, batch = whisper()
    encoder = model.model.encoder
    x = batch["input_features"]
    for layer in (encoder.conv1, encoder.conv2):
        args = (kernel(layer.weight, text), layer.bias, layer.stride, layer.padding)
        x = F.gelu(F.conv1d(rounded(x, text), *args))
    seen = []
    with quantized(model, text, include_convolutions=True):
        handle = encoder.conv2.register_forward_hook(lambda module, args, out: seen.append(out))
        output(model, batch)
    handle.remove()
    assert torch.allclose(F.gelu(seen[0]), x, atol=1e-5)


def test_by_default_they_stay_and_are_named():
    model, batch = whisper()
    kernels = {n: p.clone() for n, p in model.named_parameters() if ".conv" in n}
    with quantized(model, "W4A8"):
        state = dict(model.named_parameters())
        assert all(torch.equal(state[name], value) for name, value in kernels.items())
        text = quantization(model).describe()
    assert "convolution model.encoder.conv1, model.encoder.conv2" in text
    assert "embedding model.encoder.embed_positions, model.decoder.embed_tokens" in text


def test_embedding_and_head_of_whisper_stay_tied_and_are_rounded_once():
    model, batch = whisper()
    table = model.model.decoder.embed_tokens.weight
    before = table.detach().clone()
    quantize(model, "W4A8-w:channel", include_head=True, include_convolutions=True)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight is table
    assert torch.equal(table, fake_quantize(before, 4, granularity="channel"))
    names = [weight.name for weight in quantization(model).weights]
    assert names.count("model.decoder.embed_tokens.weight") == 1
    assert "proj_out.weight" not in names
    assert "every matrix quantised" in quantization(model).describe()
    output(model, batch)
    restore(model)
    assert torch.equal(table, before)


def test_scales_an_example_without_a_batch_dimension():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU())
    x = torch.randn(2, 6, 6)
    expected = F.conv2d(fake_quantize(x, 4), fake_quantize(net[0].weight, 8), net[0].bias)
    with torch.no_grad(), quantized(net, "W8A4-a:token", include_convolutions=True):
        assert torch.allclose(net[0](x), expected, atol=1e-6)
        assert torch.equal(net(x[None])[0], net(x))
        assert net(x.new_zeros(0, 2, 6, 6)).shape == (0, 4, 4, 4)


def test_static_ranges_overrides_and_layers():
    model, batch = whisper()
    conv = "model.encoder.conv1"
    quantize(
        model, "W8A8-static", overrides={conv: "W4A8-static", "model.encoder.conv2": "fp"},
        include_convolutions=True, calibration=[batch],
    )  # fmt: skip
    site = next(q for q in quantization(model).activations if q.site.module == conv)
    assert float(site.clip) == pytest.approx(float(batch["input_features"].abs().max()), rel=1e-3)
    assert {str(w.scheme) for w in quantization(model).weights if conv in w.name} == {"W4A8-static"}
    assert "left out model.encoder.conv2" in quantization(model).describe()
    restore(model)
    quantize(model, "W8A8", include_convolutions=True, layers=[None])
    assert {w.name for w in quantization(model).weights} >= {f"{conv}.weight"}


def test_what_a_block_holds_belongs_to_its_layer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mlp = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.mlp(self.conv(x.mT).mT)

    net = nn.Sequential(Block(), Block())
    quantize(net, "W4A4-w:channel", include_convolutions=True, layers=[1])
    names = {weight.name for weight in quantization(net).weights}
    assert names == {"1.conv.weight", "1.mlp.weight"}
    assert bool(net(torch.randn(2, 5, 8)).isfinite().all())


@pytest.mark.parametrize("method", ["gptq", "smooth", "codebook", "outliers:10%", "hadamard"])
def test_methods_leave_kernels_on_their_grid(method):
    model, batch = vit()
    layer = model.embeddings.patch_embeddings.projection
    wanted = fake_quantize(layer.weight.detach(), 4, granularity="channel")
    reference = output(model, batch)
    with quantized(
        model, "W4A8-w:channel", method=method, calibration=[batch], include_convolutions=True
    ):
        if method == "codebook":
            assert all(len(row.unique()) <= 16 for row in layer.weight)
        else:
            assert torch.equal(layer.weight, wanted)
        assert bool(output(model, batch).isfinite().all())
    assert torch.equal(output(model, batch), reference)


USABLE = [report.engine for report in probe() if report.usable]
CONVOLUTIONS = {
    "patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 8)),
    "whisper": (lambda: nn.Conv1d(5, 7, 3, stride=2, padding=1), (3, 5, 11)),
    "dilated": (lambda: nn.Conv2d(2, 5, (3, 2), dilation=(2, 1), padding=(2, 0)), (2, 2, 9, 7)),
    "same": (lambda: nn.Conv2d(2, 5, (3, 4), padding="same", bias=False), (2, 2, 6, 7)),
    "reflect": (lambda: nn.Conv1d(2, 5, 3, padding=2, padding_mode="reflect"), (2, 2, 6)),
    "circular": (lambda: nn.Conv2d(2, 5, 3, padding=1, padding_mode="circular"), (1, 2, 5, 4)),
    "groups": (lambda: nn.Conv2d(6, 9, (2, 3), groups=3, padding=1, stride=2), (2, 6, 5, 6)),
    "wide groups": (lambda: nn.Conv1d(6, 40, 3, groups=2, padding="same"), (2, 6, 7)),
    "depthwise": (
        lambda: nn.Conv1d(34, 34, 3, groups=34, stride=2, padding=3, dilation=2),
        (2, 34, 8),
    ),
    "depthwise, two of each": (
        lambda: nn.Conv2d(
            4, 8, 3, groups=4, dilation=(1, 2), padding_mode="reflect", padding=1, bias=False
        ),
        (2, 4, 6, 7),
    ),
    "groups in volume": (lambda: nn.Conv3d(4, 6, (1, 2, 2), groups=2, padding=1), (1, 4, 2, 3, 4)),
    "volume": (lambda: nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 1, 2)), (2, 2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("text", ["W8A8", "W4A6-w:channel-a:token", "W8A12-static"])
def test_on_integers_a_convolution_is_the_exact_sum(name, text):
    """Against convolutions of the codes in float64, which holds every sum, dequantised as Q4 says;
    and every engine gives the same bits."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    layer = make()
    x_dims = len(shape) - 1
    x = torch.randn(shape) * torch.tensor([1.0, 30.0, 0.1])[: shape[0]].view(-1, *[1] * x_dims)
    model = nn.Sequential(layer).eval()
    quantize(model, text, include_convolutions=True, calibration=[x])
    with torch.no_grad():
        simulated = model(x)
        to_integer(model, engine="float")
        out = model(x)
        record = quantization(model)
        assert "simulated" not in record.describe() and integer_layers(model) == {"0": "float"}
        codes, scale = record.weights[0].codes()
        site = record.activations[0]
        granularity = "token" if site.granularity == "token" else "tensor"
        rows = integer_codes(x.flatten(1), site.bits, granularity=granularity, clip=site.clip)
        twin = copy.deepcopy(layer).double()
        twin.__class__ = type(layer).__bases__[1]
        twin.weight.data, twin.bias = codes.double().reshape(layer.weight.shape), None
        sums = twin(rows.codes.double().reshape(x.shape)).float()
        of_row = rows.scale.reshape(-1, *[1] * x_dims)
        of_column = scale.reshape(-1).expand(layer.out_channels).reshape(-1, *[1] * (x_dims - 1))
        expected = sums * (of_row * of_column)
        if layer.bias is not None:
            expected = expected + layer.bias.reshape(-1, *[1] * (x_dims - 1))
        assert torch.equal(out, expected)
        torch.testing.assert_close(out, simulated, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(x[0]), out[0]) or granularity == "tensor"  # no batch dimension
        for engine in USABLE:
            from_integer(model)
            try:
                to_integer(model, engine=engine)
            except UserError:
                to_integer(model, engine="float")  # it refuses these widths
            assert torch.equal(model(x), out), engine
        from_integer(model)
        assert torch.equal(model(x), simulated)


def test_on_integers_whole_models_with_convolutions():
    for make, number in ((vit, 14), (whisper, 2 + 6 + 10)):
        model, batch = make()
        reference = output(model, batch)
        quantize(model, "W8A8-w:channel", include_convolutions=True)
        simulated = output(model, batch)
        to_integer(model)
        assert len(integer_layers(model)) == number
        executed = output(model, batch)
        assert torch.allclose(executed, simulated, atol=2e-2)
        twin = copy.deepcopy(model)
        assert torch.equal(output(twin, batch), executed)
        from_integer(model)
        assert torch.equal(output(model, batch), simulated)
        restore(model)
        assert torch.equal(output(model, batch), reference)


def test_on_integers_what_is_not_covered_stays_simulated_and_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 1), nn.Conv1d(8, 4, 1)
    ).eval()
    x = torch.randn(2, 4, 9)
    quantize(model, "W8A8 0=W8A8-w:g6 2=W8A8-w:g4", include_convolutions=True)
    with torch.no_grad():
        simulated = model(x)
        to_integer(model)
        assert list(integer_layers(model)) == ["3"] and "engine=" in repr(model[3])
        assert "on integers: all but 0, 2, which stay simulated" in quantization(model).describe()
        torch.testing.assert_close(model(x), simulated, rtol=1e-4, atol=1e-5)
        executed = model(x)
        with pytest.raises(UserError, match=r"3 takes 8 channels and was given \[2, 4, 9\]"):
            model[3](x)
        with pytest.raises(UserError, match="give floating-point"):
            model[3](torch.zeros(2, 8, 9, dtype=torch.long))
        assert torch.equal(model(x), executed)
        bad = x.clone()
        bad[1, 0, 3] = torch.nan
        with pytest.raises(UserError, match="NaN or infinity reached 0:input"):
            model(bad)
    model.train()
    y = torch.randn(2, 4, 9, requires_grad=True)
    model(y).square().sum().backward()
    assert bool(model[3].weight.grad.any()) and bool(y.grad.any())
    from_integer(model)
    assert "on integers" not in quantization(model).describe()
    restore(model)


@pytest.mark.parametrize(("make", "include_head"), [(vit, False), (whisper, True)])
@pytest.mark.parametrize("text", ["W4A8-w:channel", "W3A8-w:g4-asym", "W8A8"])
def test_saved_and_back(tmp_path, make, include_head, text):
    from skipless.export import load_quantized, save_quantized

    model, batch = make()
    quantize(model, text, include_head=include_head, include_convolutions=True)
    expected = output(model, batch)
    loaded = load_quantized(save_quantized(model, tmp_path / "packed"))
    assert torch.equal(output(loaded, batch), expected)
    assert quantization(loaded).describe() == quantization(model).describe()
    if text == "W8A8":
        for each in (model, loaded):
            to_integer(each, engine="float")
        assert torch.equal(output(loaded, batch), output(model, batch))


def test_the_layout_of_others_refuses(tmp_path):
    from skipless.export import save_quantized

    model, _ = vit()
    quantize(model, "W8A8", include_convolutions=True)
    with pytest.raises(UserError, match="linear layers only"):
        save_quantized(model, tmp_path / "packed", layout="compressed-tensors")


def test_what_is_not_covered():
    with pytest.raises(UserError, match="leave include_convolutions out"):
        quantize(nn.Sequential(nn.Linear(4, 4)), "W8A8", include_convolutions=True)
    with pytest.raises(UserError, match="include_convolutions=True"):
        quantize(nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), "W8A8")
    net = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 4, 3))
    quantize(net, "W8A8", include_convolutions=True)
    assert "in full precision: convolution 1" in quantization(net).describe()
