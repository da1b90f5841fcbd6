"""Models on integers: the same bits from every engine, and everything else as it was (Q4)."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant import integer_codes, paused, quantization, quantize, restore
from skipless.quant.integers import codes as module
from skipless.quant.integers.codes import activation_codes
from skipless.quant.integers.engines import ENGINES
from skipless.quant.integers.hardware import probe
from skipless.quant.integers.layers import (
    IntegerLinear,
    from_integer,
    integer_layers,
    to_integer,
)


def bits_of(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def run(model: nn.Module, *args) -> Tensor:
    with torch.no_grad():
        out = model(*args)
    return getattr(out, "logits", out)


@pytest.fixture(scope="module")
def exact() -> list[str]:
    return [report.engine for report in probe() if report.usable]


def on_every_engine(model: nn.Module, exact: list[str], *args) -> Tensor:
    """The output, after asserting that all engines that take the model give the same bits."""
    results = {}
    for engine in exact:
        try:
            to_integer(model, engine)
        except UserError as error:
            assert "cannot run" in str(error)
            continue
        assert set(integer_layers(model).values()) == {engine}
        results[engine] = run(model, *args)
        from_integer(model)
    assert "float" in results
    for engine, result in results.items():
        assert torch.equal(bits_of(result), bits_of(results["float"])), engine
    return results["float"]


@pytest.mark.parametrize("weight_bits", [2, 3, 4, 6, 8])
def test_all_engines_equal_the_simulation_by_codes_in_a_model(ours, exact, weight_bits):
    ids = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))
    for activation_bits in (4, 6, 8, 10, 12):
        quantize(ours, f"W{weight_bits}A{activation_bits}")
        simulated = run(ours, ids)
        executed = on_every_engine(ours, exact, ids)
        # The rounded floats of the hooks differ in the last digits, and by a code where that tips.
        error = (executed - simulated).norm() / simulated.norm()
        assert error < (0.2 if weight_bits < 4 else 0.05), (weight_bits, activation_bits)
        restore(ours)


@pytest.mark.parametrize(
    "options",
    [
        "-w:channel",
        "-a:token",
        "-w:channel-a:token",
        "-static",
        "-clip:mse",
        "-clip:gauss-w:channel",
        "-static-clip:p99.9",
    ],
)
@pytest.mark.parametrize("scope", ["linear", "block"])
def test_granularities_ranges_and_scopes(ours, exact, options, scope):
    ids = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))
    quantize(ours, "W4A8" + options, scope=scope, calibration=[ids])
    simulated = run(ours, ids)
    executed = on_every_engine(ours, exact, ids)
    assert (executed - simulated).norm() / simulated.norm() < 0.05


def test_one_layer_equals_the_formula_and_nearly_the_hooks(exact):
    """y = (s_a s_w) (codes . codes) + b by hand, in int64 and float32."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(50, 35)).eval()
    x = torch.randn(3, 4, 50)
    for scheme in ("W8A12", "W4A8-w:channel-a:token", "W16A16", "W2A2"):
        quantize(layer, scheme)
        parsed = quantization(layer).scheme
        w = integer_codes(
            quantization(layer).weights[0].stored, parsed.weight_bits,
            granularity=parsed.weight_granularity,
        )  # fmt: skip
        a = integer_codes(x, parsed.activation_bits, granularity=parsed.activation_granularity)
        sums = a.codes.reshape(-1, 50).long() @ w.codes.long().t()
        scale = a.scale.reshape(-1)[:, None] * w.scale.reshape(-1)[None, :]
        expected = (sums.float() * scale + layer[0].bias).reshape(3, 4, 35)
        assert torch.equal(on_every_engine(layer, exact, x), expected), scheme
        torch.testing.assert_close(expected, run(layer, x), rtol=1e-4, atol=1e-4)
        restore(layer)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 7),
    width=st.integers(1, 40),
    bits=st.integers(2, 16),
    per_token=st.booleans(),
    size=st.sampled_from([0.0, 1e-44, 1e-38, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
def test_fused_codes_equal_those_of_the_simulation(rows, width, bits, per_token, size, seed):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * size
    granularity = "token" if per_token else "tensor"
    expected = integer_codes(x, bits, granularity=granularity)
    codes, scale = activation_codes(x, bits, granularity=granularity)
    assert torch.equal(codes.int(), expected.codes)
    assert torch.equal(scale, expected.scale.reshape(-1))
    clip = torch.tensor(0.7)
    given_range = integer_codes(x, bits, clip=clip)
    codes, scale = activation_codes(x, bits, clip=clip)
    assert torch.equal(codes.int(), given_range.codes)
    assert torch.equal(scale, given_range.scale.expand_as(scale))


@pytest.mark.parametrize("fused", [True, False])
def test_values_without_a_code_become_nan(monkeypatch, fused):
    if not fused:
        monkeypatch.setattr(module, "fastest_kernel", lambda: None)
    x = torch.ones(3, 5)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    codes, scale = activation_codes(x, 8)
    assert scale.shape == (1,) and bool(scale.isnan().all())
    codes, scale = activation_codes(x, 8, granularity="token")
    assert scale.isnan().tolist() == [False, True, True]
    assert codes[0].tolist() == [127] * 5 and not bool(codes[1:].any())
    codes, scale = activation_codes(x, 8, clip=torch.tensor(4.0))
    assert scale.isnan().tolist() == [False, True, False]
    assert codes[2].tolist() == [127, 32, 32, 32, 32]  # infinity saturates


def test_nan_in_a_model_is_named(plain, ids):
    quantize(plain, "W8A8")
    to_integer(plain)
    with torch.no_grad():
        plain.blocks[1].norm.weight[0] = torch.nan
    with pytest.raises(UserError, match=r"NaN or infinity reached blocks\.1\.mlp\.0:input"):
        run(plain, ids)


def test_undoing_is_bit_exact_and_leaves_nothing(ours):
    ids = torch.randint(61, (1, 5))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    reference = run(ours, ids)
    quantize(ours, "W4A8")
    simulated, keys = run(ours, ids), list(ours.state_dict())
    assert to_integer(ours) is ours
    names = integer_layers(ours)
    assert len(names) == len(quantization(ours).weights) and "lm_head" not in names
    layer = ours.get_submodule(next(iter(names)))
    assert isinstance(layer, IntegerLinear) and "W4A8, engine=" in repr(layer)
    run(ours, ids)
    assert list(ours.state_dict()) == keys
    from_integer(ours)
    assert type(layer) is nn.Linear and not integer_layers(ours)
    assert torch.equal(run(ours, ids), simulated)
    to_integer(ours)
    restore(ours)
    assert not integer_layers(ours) and torch.equal(run(ours, ids), reference)
    after = ours.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ours.modules())
    assert not any("_skipless_integer" in vars(m) for m in ours.modules())


def test_paused_training_and_copies(plain, ids):
    reference = run(plain, ids)
    quantize(plain, "W4A8")
    simulated = run(plain, ids)
    to_integer(plain)
    executed = run(plain, ids)
    with paused(plain):
        assert torch.equal(run(plain, ids), reference)
    assert torch.equal(run(plain, ids), executed)
    twin = copy.deepcopy(plain)
    assert torch.equal(run(twin, ids), executed)
    restore(twin)
    assert torch.equal(run(twin, ids), reference)
    assert integer_layers(plain) and torch.equal(run(plain, ids), executed)
    plain.train()
    out = plain(ids)
    assert torch.equal(out, simulated)
    out.sum().backward()
    assert bool(plain.blocks[0].mlp[0].weight.grad.any())


def test_layers_that_read_one_tensor_share_its_codes(ours, monkeypatch):
    quantize(ours, "W8A8")
    to_integer(ours)
    calls = []
    original = module.activation_codes

    def counting(x: Tensor, *args, **options):
        calls.append(x.shape)
        return original(x, *args, **options)

    monkeypatch.setattr(module, "activation_codes", counting)
    run(ours, torch.randint(61, (1, 5)))
    # A layer reads four different tensors: q = k = v, o, up, down.
    assert len(calls) == 4 * len(ours.layers)
    assert len(integer_layers(ours)) == 6 * len(ours.layers)


def test_odd_inputs(exact):
    """One token, none, one dimension, strided, 16-bit floats, double; no bias."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(33, 18, bias=False)).eval()
    quantize(model, "W8A12-a:token")
    for x in (torch.randn(1, 33), torch.randn(33), torch.randn(2, 33, 5).transpose(1, 2),
              torch.randn(4, 66)[:, ::2], torch.randn(6, 40)[::2, 3:36],
              torch.randn(1, 33).expand(3, 33)):  # fmt: skip
        executed = on_every_engine(model, exact, x)
        assert executed.shape == (*x.shape[:-1], 18)
        torch.testing.assert_close(executed, run(model, x), rtol=1e-3, atol=1e-4)
    assert on_every_engine(model, exact, torch.randn(0, 33)).shape == (0, 18)
    assert on_every_engine(model, exact, torch.randn(2, 0, 33)).shape == (2, 0, 18)
    restore(model)
    model.to(torch.bfloat16)
    quantize(model, "W8A8")
    x = torch.randn(4, 33, dtype=torch.bfloat16)
    executed = on_every_engine(model, exact, x)
    assert executed.dtype == torch.bfloat16
    torch.testing.assert_close(executed, run(model, x), rtol=0.05, atol=0.05)
    restore(model)
    model.to(torch.float64)
    quantize(model, "W8A8")
    to_integer(model)
    assert run(model, torch.randn(4, 33, dtype=torch.float64)).dtype == torch.float64


def test_autocast_and_inference_mode_change_nothing(plain, ids):
    layer = nn.Sequential(nn.Linear(24, 8)).eval()
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    quantize(layer, "W8A8")
    for engine in ("float", None):
        to_integer(layer, engine)
        expected = run(layer, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(run(layer, x), expected)
        with torch.inference_mode():
            assert torch.equal(layer(x.clone()), expected)
        from_integer(layer)


def test_tied_heads_and_conv1d(plain, ids, exact):
    from transformers.pytorch_utils import Conv1D

    quantize(plain, "W4A8", include_head=True)
    on_every_engine(plain, exact, ids)
    to_integer(plain)
    assert "out" in integer_layers(plain) and plain.out.weight is plain.embed.weight

    torch.manual_seed(2)
    model = nn.Sequential(Conv1D(21, 30), nn.GELU(), Conv1D(5, 21)).eval()
    x = torch.randn(4, 30)
    quantize(model, "W8A8-w:channel")
    simulated = run(model, x)
    executed = on_every_engine(model, exact, x)
    torch.testing.assert_close(executed, simulated, rtol=1e-2, atol=1e-3)
    to_integer(model)
    assert type(model[0]).__name__ == "Conv1D"
    restore(model)
    assert type(model[0]) is Conv1D


@pytest.mark.parametrize(
    ("scheme", "message"),
    [("W8Afp", "keeps activations in floating point"), ("W8A8-asym", "has zero points"),
     ("W8A8-w:g8", "several scales in one sum")],
)  # fmt: skip
def test_schemes_that_integers_do_not_cover_are_refused(plain, scheme, message):
    quantize(plain, scheme)
    with pytest.raises(UserError, match=message):
        to_integer(plain)
    assert not integer_layers(plain)


def test_misuse_is_told(plain, ids):
    with pytest.raises(UserError, match="not quantised"):
        to_integer(plain)
    with pytest.raises(UserError, match="nothing to undo"):
        from_integer(plain)
    quantize(plain, "W12A16")
    with pytest.raises(UserError, match="nothing to undo"):
        from_integer(plain)
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.0: engine 'int_mm' cannot run W12A16"):
        to_integer(plain, "int_mm")
    with pytest.raises(UserError, match="did you mean 'float'"):
        to_integer(plain, "flot")
    assert not integer_layers(plain)
    with paused(plain), pytest.raises(UserError, match="leave the paused block"):
        to_integer(plain)
    to_integer(plain)
    assert set(integer_layers(plain).values()) == {"float"}  # the only one with 12-bit weights
    with pytest.raises(UserError, match="on integers already"):
        to_integer(plain)
    with pytest.raises(UserError, match=r"move the model, then to_integer"):
        plain.blocks[0].mlp[0](torch.randn(2, 16, device="meta"))
    from_integer(plain)
    with torch.no_grad():
        plain.blocks[2].mlp[2].weight.mul_(2)
    with pytest.raises(UserError, match=r"blocks\.2\.mlp\.2\.weight changed after quantize"):
        to_integer(plain)


def test_every_engine_is_named_in_the_documentation():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "integer.md").read_text()
    assert all(f"`{name}`" in text for name in ENGINES)
