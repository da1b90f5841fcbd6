"""Methods: the function stays, restore is bit for bit, each does what its equation says."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.evaluate import error_propagation, site_sqnr
from skipless.quant import METHODS, paused, quantization, quantize, quantized, restore
from skipless.quant.methods import method_name, parse_methods
from skipless.quant.methods.awq import best_scales
from skipless.quant.methods.codebook import kmeans
from skipless.quant.methods.outliers import Outliers
from skipless.quant.methods.smooth import smoothing_factors
from skipless.quant.transforms.rotation import Rotate, rotation
from skipless.quant.transforms.session import gain_offset
from skipless.scheme import Scheme

ALL = ["smooth", "awq", "hadamard", "stream", "rotation:learned,steps=2", "outliers:10%", "gptq",
       "codebook", "stream+smooth+hadamard+outliers:10%+gptq:order"]  # fmt: skip


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(ids)
    return getattr(out, "logits", out)


@pytest.fixture(params=["residual", "none", "swiglu"])
def model(request, make_transformer):
    """Ours with gains that are not 1, with and without skips, and with grouped queries."""
    if request.param == "swiglu":
        made = make_transformer("residual", hidden_act="swiglu", num_key_value_heads=2)
    else:
        made = make_transformer(request.param)
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize("method", ALL)
def test_function_stays_and_restore_is_bit_for_bit(model, ids, method):
    held_out = ids.flip(0, 1)
    before = logits(model, held_out)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    quantize(model, "W4A8", "block", method=method, calibration=[ids])
    after = logits(model, held_out)
    assert not torch.equal(after, before) and bool(after.isfinite().all())
    with paused(model):  # scaled and rotated, not rounded
        torch.testing.assert_close(logits(model, held_out), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model, held_out), after)
    restore(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model, held_out), before)


@pytest.mark.parametrize("method", ["smooth", "hadamard", "rotation:learned,steps=1", "gptq"])
def test_a_copy_of_a_quantised_model_lives_alone(model, ids, method):
    before = logits(model, ids)
    quantize(model, "W4A8", method=method, calibration=[ids])
    quantised = logits(model, ids)
    other = copy.deepcopy(model)
    restore(model)
    assert torch.equal(logits(other, ids), quantised)
    assert torch.equal(logits(restore(other), ids), before)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("rtn", "codebook")])
def test_methods_that_look_at_activations_ask_for_them(plain, method):
    for nothing in (None, []):
        with pytest.raises(UserError, match="pass calibration=batches"):
            quantize(plain, "W4A8", method=method, calibration=nothing)


def test_text_form():
    assert method_name(parse_methods("gptq+smooth:0.75")) == "smooth:0.75+gptq"
    assert method_name(parse_methods(["outliers:1%", "hadamard"])) == "hadamard+outliers:1%"
    assert method_name(parse_methods("rtn")) == method_name(parse_methods([])) == "rtn"
    assert [m.name for m in parse_methods("gptq+stream+awq")] == ["stream", "awq", "gptq"]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("smoth", "unknown; did you mean 'smooth'"),
        ("smooth+awq", "smooth and awq exclude each other"),
        ("gptq+codebook", "exclude each other"),
        ("gptq:fast", "gptq has no option 'fast'"),
        ("hadamard:4", "takes no option"),
        ("smooth:2", "from 0 to 1"),
        ("outliers:x", "'x' is not a number"),
        ("outliers:0%", r"must be in \(0, 1\)"),
    ],
)
def test_mistakes_in_the_text(plain, ids, method, says):
    with pytest.raises(UserError, match=says):
        quantize(plain, "W4A8", method=method, calibration=[ids])
    assert quantization(plain) is None


def test_stream_refuses_what_it_would_change(plain, ids):
    before = logits(plain, ids)
    with pytest.raises(UserError, match="no RMSNorm.*hadamard"):
        quantize(plain, "W4A8", method="stream", calibration=[ids])
    assert torch.equal(logits(plain, ids), before) and quantization(plain) is None


def test_stream_refuses_gains_on_the_stream(make_transformer, ids):
    odd = make_transformer("layerscale")
    for name, parameter in odd.named_parameters():
        if "connection" in name:
            parameter.data = 1 + torch.rand(parameter.shape)
    before = logits(odd, ids)
    with pytest.raises(UserError, match="rotating the stream changes"):
        quantize(odd, "W4A8", method="stream", calibration=[ids])
    assert torch.equal(logits(odd, ids), before)


def test_smoothing_equals_numpy():
    """SmoothQuant of one layer, in float64: scales, smoothed weight, output."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 12)) * np.exp(rng.normal(size=12))
    w = rng.normal(size=(8, 12))
    of_x, of_w = np.abs(x).max(0), np.abs(w).max(0)
    expected = of_x**0.7 / of_w**0.3
    found = smoothing_factors(torch.tensor(of_x), torch.tensor(of_w), 0.7)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)

    net = nn.Sequential(nn.Linear(12, 8, bias=False)).eval()
    net[0].weight.data = torch.tensor(w, dtype=torch.float32)
    batch = torch.tensor(x, dtype=torch.float32)
    quantize(net, "W8A8-w:channel", method="smooth:0.7", calibration=[batch])
    with paused(net):
        np.testing.assert_allclose(net[0].weight.detach().numpy(), w * expected, rtol=1e-5)

    def nearest(values, scale):
        return np.clip(np.rint(values / scale), -127, 127) * scale

    smooth_x, smooth_w = x / expected, w * expected
    q_x = nearest(smooth_x, np.abs(smooth_x).max() / 127)
    q_w = nearest(smooth_w, np.abs(smooth_w).max(1, keepdims=True) / 127)
    # A value between two codes may fall to the other side in float32: one step of one weight.
    np.testing.assert_allclose(
        net(batch).detach().numpy(), q_x @ q_w.T, atol=2e-2 * np.abs(q_x @ q_w.T).max()
    )
    error = np.linalg.norm(net(batch).detach().numpy() - q_x @ q_w.T) / np.linalg.norm(q_x @ q_w.T)
    assert error < 1e-3


def test_smooth_and_hadamard_help_a_giant_channel():
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    net[0].weight.data[7] = 20.0
    net[1].weight.data[:, 7] /= 20.0  # a giant in the tensor, not in the output
    x = torch.randn(128, 64)
    exact = net(x).detach()
    errors = {}
    for method in ("rtn", "smooth", "hadamard", "outliers:20", "awq"):
        with quantized(net, "W8A4", method=method, calibration=[x]):
            errors[method] = float((net(x).detach() - exact).norm() / exact.norm())
    assert errors["smooth"] < errors["rtn"] / 2
    assert errors["hadamard"] < errors["rtn"] / 2
    assert errors["outliers:20"] < errors["rtn"] / 2
    assert errors["awq"] <= errors["rtn"]


def test_awq_never_raises_the_error_on_its_tokens():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator) * torch.logspace(-1, 1, 16)
    matrices = [torch.randn(8, 16, generator=generator) for _ in range(2)]
    scheme = Scheme.parse("W3Afp-w:channel")
    from skipless.quant import quantize_weight

    power, s = best_scales(x, x.abs().mean(0), matrices, scheme)
    assert power > 0 and float(s.max() * s.min()) == pytest.approx(1, rel=1e-5)

    def error(scale):
        return sum(
            float((x / scale @ quantize_weight(m * scale, scheme).T - x @ m.T).square().sum())
            for m in matrices
        )

    assert error(s) < error(torch.ones(16))


def test_outlier_columns_pass_untouched():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4)).eval()
    original = net[0].weight.detach().clone()
    x = torch.randn(16, 8)
    x[:, 3] = 30.0
    quantize(net, "W4A4", method="outliers", calibration=[x])
    weight = net[0].weight.detach()
    assert torch.equal(weight[:, 3], original[:, 3])
    assert not torch.equal(weight[:, 0], original[:, 0])
    seen = []
    net[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    net(x)
    assert torch.equal(seen[0][:, 3], x[:, 3]) and not torch.equal(seen[0][:, 0], x[:, 0])
    step = x[:, [0, 1, 2, 4, 5, 6, 7]].abs().max() / 7
    assert bool(((seen[0][:, 0] / step).round() * step - seen[0][:, 0]).abs().max() < 1e-5)
    assert quantization(net).notes == ["outliers: 1 of 8 input channels in full precision"]
    with pytest.raises(UserError, match="input channels in full precision"):
        quantization(net).weights[0].codes()


def test_outlier_choice():
    largest = torch.tensor([1.0, 7.0, 6.0, 2.0])
    assert Outliers().choose(largest).tolist() == [1, 2]
    assert Outliers(threshold=None, share=0.25).choose(largest).tolist() == [1]
    assert Outliers(threshold=None, share=0.99).choose(largest).numel() == 3  # never all of them


@pytest.mark.parametrize("granularity", ["tensor", "channel", "g16"])
def test_kmeans_beats_the_uniform_grid_and_equals_lloyd(granularity):
    from skipless.quant import fake_quantize

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = kmeans(x, 3, granularity)
    uniform = fake_quantize(x, 3, granularity=granularity)
    assert (found - x).square().sum() < (uniform - x).square().sum()
    groups = {"tensor": x.reshape(1, -1), "channel": x, "g16": x.reshape(-1, 16)}[granularity]
    replaced = found.reshape(groups.shape)
    assert max(len(row.unique()) for row in replaced) <= 8
    row, entries = groups[0].double().numpy(), replaced[0].double().unique().numpy()
    nearest = np.abs(row[:, None] - entries).argmin(1)  # a fixed point of Lloyd's iteration
    np.testing.assert_allclose(replaced[0].double().numpy(), entries[nearest], atol=1e-6)
    if granularity == "tensor":
        for index, entry in enumerate(entries):
            assert row[nearest == index].mean() == pytest.approx(entry, abs=2e-2)


def test_a_codebook_has_no_integer_codes(plain):
    quantize(plain, "W3Afp", method="codebook")
    with pytest.raises(UserError, match="codebook"):
        quantization(plain).weights[0].codes()


@pytest.mark.parametrize("width", [1, 6, 16, 24, 48, 64, 96, 100, 576, 768])
def test_rotate_equals_the_matrix_and_turns_back(width):
    turn = rotation(width).double()
    torch.testing.assert_close(turn @ turn.T, torch.eye(width, dtype=torch.float64),
                               rtol=0, atol=1e-5)  # fmt: skip
    x = torch.randn(3, 5, width, dtype=torch.float64)
    torch.testing.assert_close(Rotate(width)(x), x @ turn, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Rotate(width, inverse=True)(Rotate(width)(x)), x,
                               rtol=1e-5, atol=1e-5)  # fmt: skip


def test_gains_of_norms():
    class OnePlus(nn.RMSNorm):
        def forward(self, x):
            return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    class Squared(nn.RMSNorm):
        def forward(self, x):
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight**2, self.eps)

    for norm, offset in ((nn.LayerNorm(8), 0), (nn.RMSNorm(8), 0), (OnePlus(8), 1),
                         (Squared(8), None)):  # fmt: skip
        norm.weight.data = torch.rand(8) + 0.3
        before = norm.weight.detach().clone()
        assert gain_offset(norm) == offset
        assert torch.equal(norm.weight, before)


def test_measurements_take_methods(model, ids):
    """The stream's relative error is taken between tensors of one basis, also when rotated."""
    plain = error_propagation(model, "W4A8", [ids])[-1]["r"]
    rows = site_sqnr(model, "W4A8", [ids], method="stream", calibration=[ids])
    assert all(row["sqnr"] is None or row["sqnr"] > 0 for row in rows)
    rotated = error_propagation(model, "W4A8", [ids], method="stream", calibration=[ids])[-1]["r"]
    assert 0 < rotated < 10 * plain


def test_dead_channels_constant_tensors_and_one_token():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    net[2].weight.data.zero_()
    net[0].weight.data[:, 2] = 0.0
    x = torch.randn(1, 8)
    x[:, 5] = 0.0
    for method in ("smooth", "awq", "hadamard", "gptq", "gptq:order", "outliers:20%", "codebook"):
        with quantized(net, "W4A8-w:channel", method=method, calibration=[x]):
            assert bool(net(x).isfinite().all()), method
            assert bool(net(torch.zeros(1, 8)).isfinite().all())


@pytest.mark.parametrize("method", ["smooth", "awq", "gptq", "hadamard", "outliers"])
def test_nan_in_calibration_names_the_layer(plain, ids, method):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    x = torch.ones(2, 4)
    x[1, 1] = torch.nan
    if method == "hadamard":  # looks at no values but traces on them: nothing can be folded
        quantize(net, "W8A8", method=method, calibration=[x])
        restore(net)
        return
    before = net[0].weight.detach().clone()
    with pytest.raises(UserError, match="NaN or infinity in front of 0"):
        quantize(net, "W8A8", method=method, calibration=[x])
    assert torch.equal(net[0].weight, before) and quantization(net) is None


def test_overflow_in_float16_is_told():
    net = nn.Sequential(nn.Linear(4, 4, bias=False)).half().eval()
    net[0].weight.data[:] = 1.0
    net[0].weight.data[0, 0] = 60000.0
    x = torch.full((2, 4), 1.0).half()
    x[:, 0] = 60000.0
    before = net[0].weight.detach().clone()
    with pytest.raises(UserError, match="float16.*convert the model to float32"):
        quantize(net, "W8A8", method="smooth:1", calibration=[x])
    assert torch.equal(net[0].weight, before)


def test_integers_see_changed_inputs_and_fused_steps_refuse(make_transformer, ids):
    """Rotations and divisions at run time come before codes are made; what skips hooks refuses."""
    from skipless.decoding import fuse
    from skipless.quant import to_integer

    model = make_transformer("residual")
    quantize(model, "W8A8", method="hadamard+gptq", calibration=[ids])
    simulated = logits(model, ids)
    to_integer(model, engine="float")
    torch.testing.assert_close(logits(model, ids), simulated, rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match="hadamard.*changes the inputs"):
        fuse(model)


def test_a_layer_left_out_beside_others_of_its_group(make_transformer, ids):
    """q stays in full precision: k and v still get the Hessian of what they see, rotated."""
    model = make_transformer("residual")
    before = logits(model, ids)
    layer = model.get_submodule("layers.0.self_attn.q_proj")
    original = layer.weight.detach().clone()
    errors = {}
    for method in ("hadamard", "hadamard+gptq"):
        scheme = "W3A8-w:channel *.q_proj=fp"
        with quantized(model, scheme, method=method, calibration=[ids]):
            assert torch.equal(layer.weight, original)
            errors[method] = float((logits(model, ids) - before).norm())
    assert errors["hadamard+gptq"] < errors["hadamard"]


def test_smoothing_does_not_cost_the_free_rotation_of_heads(make_transformer, ids):
    model = make_transformer("residual")
    quantize(model, "W4A8", method="smooth+hadamard", calibration=[ids])
    assert "hadamard: 2 tensors rotated for free, 6 when" in quantization(model).notes[1]
