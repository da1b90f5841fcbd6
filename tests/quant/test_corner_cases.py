"""Where two things that are each right meet: shared tensors, gradients, wide codes, odd batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from skipless.errors import UserError
from skipless.quant import (
    fake_quantize,
    integer_codes,
    paused,
    quantization,
    quantize,
    quantized,
    restore,
    to_integer,
    train_quantized,
)
from skipless.quant.methods.gptq import gptq
from skipless.quant.saved import resume, saved_form
from skipless.quant.transforms.tracing import read_groups
from skipless.scheme import Scheme


class Twice(nn.Module):
    """One tensor is read once without gradients, then with them."""

    def __init__(self):
        super().__init__()
        self.gate, self.main = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
        return self.main(x) * gate


@pytest.mark.parametrize("method", ["rtn", "hadamard"])
def test_a_tensor_rounded_without_gradients_still_passes_them_on(method):
    torch.manual_seed(0)
    net, x = Twice(), torch.randn(4, 8, requires_grad=True)
    quantize(net, "W8A8", method=method, calibration=[x.detach()])
    net(x).sum().backward()
    assert x.grad is not None and float(x.grad.abs().sum()) > 0.1


class Both(nn.Module):
    """A convolution and a linear layer read the same tensor."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.conv, self.linear = nn.Conv1d(4, 4, 1), nn.Linear(6, 6)

    def forward(self, x):
        return sum(getattr(self, name)(x) for name in self.order)


@torch.no_grad()
@pytest.mark.parametrize("order", [("conv", "linear"), ("linear", "conv")])
@pytest.mark.parametrize("scheme", ["W8A8", "W8A8-static", "W8A8-a:token"])
def test_a_convolution_and_a_linear_layer_share_codes(order, scheme):
    torch.manual_seed(0)
    net, x = Both(order).eval(), torch.randn(2, 4, 6)
    quantize(net, scheme, include_convolutions=True, calibration=[x])
    simulated = net(x)
    to_integer(net)
    for _ in range(3):  # the first passes find out who shares codes
        torch.testing.assert_close(net(x), simulated, rtol=1e-4, atol=1e-5)


def test_sixteen_bits_with_a_zero_point_do_not_wrap_around():
    """Codes of positive weights reach 65,535 once the zero point is taken off."""
    torch.manual_seed(0)
    matrix, scheme = torch.rand(4, 8) + 0.5, Scheme.parse("W16Afp-asym")
    codes = gptq(matrix, torch.eye(8), scheme)
    assert torch.allclose(codes.dequantize(), matrix, atol=1e-4)
    net, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(16, 8)
    net[0].weight.data = matrix
    with quantized(net, scheme, method="gptq", calibration=[x]):
        assert torch.allclose(net[0].weight, matrix, atol=1e-4)
        tensors, about = saved_form(net)
        fresh = nn.Sequential(nn.Linear(8, 4))
        resume(fresh, tensors, about)
        assert torch.equal(fresh[0].weight, net[0].weight)


@torch.no_grad()
@pytest.mark.parametrize("value", [0.8, 1e-3, -0.5])
def test_finish_keeps_what_a_learned_clip_has_become(value):
    """Also one that training has driven below zero, where everything is rounded to zero."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(16, 8)
    training = train_quantized(net, "W4A4 from=0", learned_clips=True, calibration=[x])
    training.at(1.0)
    training.clips[0].fill_(value)
    while_training = net(x)
    training.finish()
    torch.testing.assert_close(net(x), while_training)
    to_integer(net)
    torch.testing.assert_close(net(x), while_training)


class Mixer(nn.Module):
    """Tokens and channels of one tensor are mixed, and there are as many of each."""

    def __init__(self):
        super().__init__()
        self.channels, self.tokens = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.channels(x) + self.tokens(x.mT).mT


@torch.no_grad()
def test_a_tensor_and_its_transpose_are_two():
    torch.manual_seed(0)
    net, x = Mixer().eval(), torch.randn(3, 8, 8) * torch.linspace(0.1, 3, 8)
    assert [group.names for group in read_groups(net, x)] == [("channels",), ("tokens",)]
    scheme, rows = Scheme.parse("W3Afp-w:channel"), x.mT.reshape(-1, 8)
    expected = gptq(net.tokens.weight, rows.T @ rows, scheme).dequantize()
    with quantized(net, scheme, method="gptq", calibration=[x]):
        assert torch.equal(net.tokens.weight, expected)


@torch.no_grad()
def test_a_batch_may_hold_a_tensor_without_rows():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, scale):
            return self.linear(x) * scale

    net, batch = Scaled(), {"x": torch.randn(4, 8), "scale": torch.tensor(2.0)}
    exact = net(**batch)
    with quantized(net, "W8A8", method="smooth", calibration=[batch]):
        assert torch.allclose(net(**batch), exact, atol=0.1)


def test_a_model_that_the_file_does_not_cover_is_left_unquantised():
    torch.manual_seed(0)
    tensors, about = saved_form(quantize(nn.Sequential(nn.Linear(8, 8)), "W4A8"))
    larger = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    about["layers"] = []  # as of a model without blocks
    with pytest.raises(UserError, match=r"no codes of 1\.weight"):
        resume(larger, tensors, about)
    assert quantization(larger) is None
    larger(torch.randn(2, 8))


@torch.no_grad()
def test_parts_of_a_model_run_alone_without_piling_up():
    """Hooks of the whole model, which empty the memory of a pass, do not run then."""
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    quantize(net, "W8A8")
    x, state = torch.randn(4, 8), quantization(net).state
    for _ in range(5):
        net[0](x + 1)
    assert not state._pass.finite
    assert torch.equal(
        net[0](x), (fake_quantize(x, 8) @ net[0][0].weight.T + net[0][0].bias).relu()
    )
    with pytest.raises(UserError, match="NaN or infinity reached 0.0:input"):
        net(x * torch.nan)
    restore(net)


def test_codes_of_wide_asymmetric_values_fit():
    codes = integer_codes(torch.rand(64) + 1, 16, symmetric=False)
    assert int(codes.codes.max()) > 32767


class ByName(nn.Module):
    """Layers may get their input by torch's name of it."""

    def __init__(self, by_name):
        super().__init__()
        torch.manual_seed(0)
        self.by_name, self.norm = by_name, nn.LayerNorm(8)
        self.conv, self.up, self.down = nn.Conv1d(4, 4, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        for layer in (self.conv, self.norm, self.up, nn.ReLU(), self.down):
            x = layer(input=x) if self.by_name else layer(x)
        return x


@torch.no_grad()
@pytest.mark.parametrize("method", ["rtn", "smooth", "awq+gptq", "hadamard", "outliers:20%"])
def test_layers_that_get_their_input_by_name(method):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    options = {"method": method, "calibration": [x], "include_convolutions": True}
    named, plain = (quantize(ByName(how).eval(), "W6A6", **options) for how in (True, False))
    assert torch.equal(named(x), plain(x)) and not torch.equal(plain(x), ByName(False)(x))
    if not method.startswith("outliers"):
        assert torch.equal(to_integer(named)(x), to_integer(plain)(x))


@torch.no_grad()
def test_training_of_layers_that_get_their_input_by_name():
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    named, plain = ByName(True), ByName(False)
    for net in (named, plain):
        train_quantized(net, "W4A4 from=0", include_convolutions=True).at(1.0)
    assert torch.equal(named(x), plain(x))


class Doubled(nn.Linear):
    """As layers with adapters look: a linear layer and something more."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("how", ["class", "instance"])
def test_a_layer_with_a_forward_of_its_own_keeps_it(how):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Doubled(8, 8)).eval(), torch.randn(4, 8)
    if how == "instance":
        net[2] = nn.Linear(8, 8)
        plain = net[2].forward
        net[2].forward = lambda x: 2 * plain(x)
    quantize(net, "W8A8")
    with torch.no_grad():
        simulated = net(x)
        to_integer(net)
        torch.testing.assert_close(net(x), simulated, rtol=1e-4, atol=1e-5)
    assert "on integers: all but 2, which stay simulated" in quantization(net).describe()
    restore(net)
    with pytest.raises(UserError, match=r"2 \(.*\) has a forward of its own"):
        train_quantized(net, "W8A8")
    train_quantized(net, "W8A8 2=fp from=0")
    first = F.linear(fake_quantize(x, 8), fake_quantize(net[0].weight, 8), net[0].bias)
    expected = 2 * F.linear(first.relu(), net[2].weight, net[2].bias)
    torch.testing.assert_close(net(x), expected)
    with pytest.raises(UserError, match="nothing would run on integers"):
        to_integer(quantize(nn.Sequential(Doubled(8, 8)), "W8A8"))


class Adapted(nn.Linear):
    """W x + A x, where scaling x and W alone would leave A behind."""

    def __init__(self, width):
        super().__init__(width, width)
        self.adapter = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return super().forward(x) + x @ self.adapter.T


@torch.no_grad()
@pytest.mark.parametrize("method", ["smooth", "awq", "hadamard", "rotation:learned,steps=2"])
def test_methods_leave_the_inputs_of_adapters_alone(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), Adapted(8), nn.ReLU(), nn.Linear(8, 8)).eval()
    x = torch.randn(64, 8) * torch.linspace(0.1, 5, 8)
    exact = net(x)
    with quantized(net, "W8A8", method=method, calibration=[x]), paused(net):
        torch.testing.assert_close(net(x), exact, rtol=1e-4, atol=1e-5)
