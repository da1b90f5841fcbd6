"""GPTQ against the definition in numpy, and against rounding to the nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.quant import fake_quantize, integer_codes, quantization, quantize, quantized
from skipless.quant.methods.gptq import gptq
from skipless.scheme import Scheme


def correlated(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    return torch.randn(rows, width, generator=generator) @ (mix + 0.3)


def oracle(w: np.ndarray, h: np.ndarray, steps: np.ndarray, largest: int, order: np.ndarray):
    """Optimal brain surgeon, one weight column at a time, with an explicit inverse of what is left
    (the definition, O(n^4)); no Cholesky, no blocks. Columns in `order`."""
    w, codes = w.copy(), np.zeros_like(w)
    rest = list(order)
    while rest:
        inverse = np.linalg.inv(h[np.ix_(rest, rest)])
        j, others = rest[0], rest[1:]
        codes[:, j] = np.clip(np.rint(w[:, j] / steps[:, j]), -largest, largest)
        error = (w[:, j] - codes[:, j] * steps[:, j]) / inverse[0, 0]
        w[:, others] -= np.outer(error, inverse[0, 1:])
        rest = others
    return codes


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "g8"])
def test_equals_the_definition(granularity, act_order):
    w = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    x = correlated(200, 24).double()
    h = x.T @ x
    scheme = Scheme.parse(f"W3Afp-w:{granularity}" if granularity != "tensor" else "W3Afp")
    found = gptq(w, h, scheme, act_order=act_order)
    plain = integer_codes(w, 3, granularity=granularity)
    assert torch.equal(found.scale, plain.scale) and found.codes.shape == plain.codes.shape
    damped = h.numpy() + 0.01 * h.diagonal().mean().item() * np.eye(24)
    steps = plain.scale.expand(plain.codes.shape).reshape(w.shape).double().numpy()
    order = np.argsort(-np.diag(damped), kind="stable") if act_order else np.arange(24)
    expected = oracle(w.double().numpy(), damped, steps, 3, order)
    np.testing.assert_array_equal(found.codes.reshape(w.shape).numpy(), expected)


@pytest.mark.parametrize("text", ["W2Afp", "W3Afp-w:channel", "W4Afp-w:g32", "W4Afp-asym",
                                  "W3Afp-w:channel-clip:mse"])  # fmt: skip
def test_output_error_is_below_rounding_to_the_nearest(text):
    scheme = Scheme.parse(text)
    for seed in range(3):
        w = torch.randn(32, 192, generator=torch.Generator().manual_seed(seed))
        x = correlated(400, 192, seed)
        nearest = fake_quantize(
            w, scheme.weight_bits, granularity=scheme.weight_granularity,
            symmetric=scheme.symmetric, clip=scheme.clip,
        )  # fmt: skip
        codes = gptq(w, x.T @ x, scheme)
        found = codes.dequantize().reshape(w.shape)
        assert (x @ (found - w).T).norm() < (x @ (nearest - w).T).norm()


def test_without_correlation_it_is_rounding_to_the_nearest():
    w = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    found = gptq(w, torch.diag(torch.linspace(1, 9, 16)), Scheme.parse("W4Afp-w:channel"))
    assert torch.equal(found.codes.int(), integer_codes(w, 4, granularity="channel").codes)


def test_dead_channels_are_rounded_and_disturb_nothing():
    w = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
    x = correlated(100, 12)
    x[:, 5] = 0
    h = x.T @ x
    found = gptq(w, h, Scheme.parse("W4Afp")).codes
    assert torch.equal(found[:, 5].int(), integer_codes(w, 4).codes[:, 5])
    nothing = gptq(w, torch.zeros(12, 12), Scheme.parse("W4Afp")).codes
    assert torch.equal(nothing.int(), integer_codes(w, 4).codes)


def test_one_token_and_few_tokens():
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(4))
    x = correlated(1, 32)
    found = gptq(w, x.T @ x, Scheme.parse("W4Afp")).dequantize()
    nearest = fake_quantize(w, 4)
    assert (x @ (found - w).T).norm() < (x @ (nearest - w).T).norm()


def test_not_finite_is_told():
    with pytest.raises(UserError, match="not finite or overflow"):
        gptq(torch.ones(2, 2), torch.full((2, 2), torch.inf), Scheme.parse("W4Afp"))


def test_the_model_gets_codes_on_the_grid(ids, plain):
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    quantize(plain, "W4A8-w:channel", method="gptq", calibration=[ids])
    for weight in quantization(plain).weights:
        codes = weight.codes()
        assert int(codes.codes.abs().max()) <= 7
        assert torch.equal(codes.dequantize(), weight.parameter.detach())
        expected = integer_codes(before[weight.name], 4, granularity="channel").scale
        assert torch.equal(codes.scale, expected)  # the grid of rounding to the nearest


def test_transposed_weights_equal_linear_ones():
    """transformers' Conv1D holds [in, out]."""

    class Conv1D(nn.Module):
        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.nf, self.nx = linear.out_features, linear.in_features
            self.weight = nn.Parameter(linear.weight.detach().t().clone())

        def forward(self, x):
            return x @ self.weight

    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 4)).eval()
    other = nn.Sequential(Conv1D(linear[0]), nn.ReLU(), linear[2]).eval()
    x = correlated(64, 16)
    with quantized(linear, "W3A8", method="smooth+gptq", calibration=[x]):
        expected = linear(x)
    with quantized(other, "W3A8", method="smooth+gptq", calibration=[x]):
        torch.testing.assert_close(other(x), expected)


def test_later_blocks_see_earlier_ones_quantised():
    """The second layer corrects for what the first one lost: better than each on exact inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = correlated(256, 32)
    exact = net(x)
    with quantized(net, "W3Afp-w:channel", method="gptq", calibration=[x]):
        second = net[2].weight.detach().clone()
        error = (net(x) - exact).norm()
    hidden = net[1](net[0](x)).detach()
    codes = gptq(net[2].weight.detach(), hidden.T @ hidden, Scheme.parse("W3Afp-w:channel"))
    assert not torch.equal(second, codes.dequantize())
    with quantized(net, "W3Afp-w:channel"):
        assert error < (net(x) - exact).norm()


def test_a_terminal_sees_how_far_it_is(monkeypatch):
    import io

    from rich.console import Console

    from skipless import log

    screen = io.StringIO()
    monkeypatch.setattr(log, "console", Console(file=screen, force_terminal=True, width=120))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    with quantized(net, "W4A8", method="gptq", calibration=[torch.randn(4, 16)]):
        assert "2/2" in screen.getvalue() and "matrices" in screen.getvalue()
