"""Simulation and execution, bit for bit: W{2,3,4,6,8} x A{4,6,8,10,12} on every engine (Q4).

The simulation here is an independent one: rounded values by `fake_quantize`, taken back to whole
numbers, multiplied in int64, scaled in float32 by numpy.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from skipless.quant import fake_quantize, integer_codes
from skipless.quant.integers.codes import activation_codes
from skipless.quant.integers.engines import ENGINES, KernelEngine, Problem
from skipless.quant.integers.hardware import probe, worst_case
from skipless.train import load_run

WIDTHS = list(itertools.product((2, 3, 4, 6, 8), (4, 6, 8, 10, 12)))
CHANNELS = 48


@pytest.fixture(scope="module")
def engines() -> list[str]:
    return [report.engine for report in probe() if report.usable]


@pytest.fixture(scope="module")
def real(tiny_run) -> list[tuple[str, Tensor, Tensor, Tensor | None]]:
    """(name, input, weight, bias) of every linear layer of a trained model, on held-out text."""
    run = load_run(tiny_run)
    seen = []

    def keep(name):
        def hook(module, args):
            bias = None if module.bias is None else module.bias.detach()
            seen.append((name, args[0].detach().flatten(0, -2), module.weight.detach(), bias))

        return hook

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in run.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        run.model.eval()(torch.arange(32)[None] % 300)
    for handle in handles:
        handle.remove()
    assert len(seen) >= 12
    return seen


def simulated(x: Tensor, w: Tensor, bias: Tensor | None, bits: tuple[int, int], kinds) -> Tensor:
    """y = (s_a s_w) sum + b of fake-quantised values, every float32 step rounded by itself."""
    rounded_w = fake_quantize(w, bits[0], granularity=kinds[0])
    rounded_x = fake_quantize(x, bits[1], granularity=kinds[1])
    s_w = integer_codes(w, bits[0], granularity=kinds[0]).scale.reshape(-1).numpy()
    s_x = integer_codes(x, bits[1], granularity=kinds[1]).scale.reshape(-1).numpy()
    whole_w = np.rint(rounded_w.double().numpy() / s_w.astype(np.float64)[:, None]).astype(np.int64)
    whole_x = np.rint(rounded_x.double().numpy() / s_x.astype(np.float64)[:, None]).astype(np.int64)
    assert np.abs(whole_w).max() < 2 ** (bits[0] - 1)
    assert np.abs(whole_x).max() < 2 ** (bits[1] - 1)
    out = (whole_x @ whole_w.T).astype(np.float32) * (s_x[:, None] * s_w[None, :])
    return torch.from_numpy(out if bias is None else out + bias.numpy())


def executed(name: str, x: Tensor, w: Tensor, bias, bits: tuple[int, int], kinds) -> list[Tensor]:
    """By an engine, from codes and, where it can, from the floats in one call; [] if refused."""
    engine = ENGINES[name]
    problem = Problem(
        weight_bits=bits[0], activation_bits=bits[1], in_features=w.shape[1],
        out_features=w.shape[0],
    )  # fmt: skip
    if engine.refuses(problem):
        return []
    codes = integer_codes(w, bits[0], granularity=kinds[0])
    scale = codes.scale.float().reshape(-1).expand(w.shape[0])
    prepared = engine.prepare(codes.codes.to(torch.int16), scale, problem)
    row_codes, row_scale = activation_codes(x, bits[1], granularity=kinds[1])
    results = [engine.linear(prepared, row_codes, row_scale, bias)]
    if isinstance(engine, KernelEngine):
        out, scales = engine.from_floats(prepared, x, kinds[1] == "token", -1.0, bias)
        assert torch.equal(scales, row_scale)
        results.append(out)
    return results


def check(engines: list[str], x: Tensor, w: Tensor, bias, bits, kinds) -> None:
    expected = simulated(x, w, bias, bits, kinds)
    ran = []
    for name in engines:
        for result in executed(name, x, w, bias, bits, kinds):
            ran.append(name)
            assert torch.equal(result.view(torch.int32), expected.view(torch.int32)), (name, bits)
    covering = {"float", "plain"} & set(engines)
    assert covering <= set(ran), (covering, ran)
    if bits[1] > 8:
        assert "onnxruntime" not in ran


@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("channel", "token")])
@pytest.mark.parametrize("bits", WIDTHS, ids=lambda bits: f"W{bits[0]}A{bits[1]}")
def test_random_and_real_activations(engines, real, bits, kinds):
    generator = torch.Generator().manual_seed(bits[0] * 16 + bits[1])
    for rows, width in ((1, 130), (21, 96)):
        x = torch.randn(rows, width, generator=generator)
        x[:, 3] *= 40  # an outlier channel
        w = torch.randn(CHANNELS + 5, width, generator=generator)
        bias = torch.randn(CHANNELS + 5, generator=generator)
        check(engines, x, w, bias, bits, kinds)
    for name, x, w, bias in real:
        if "layers.0" in name or "layers.1.mlp" in name:
            check(engines, x, w, bias, bits, kinds)


@pytest.mark.parametrize("bits", WIDTHS, ids=lambda bits: f"W{bits[0]}A{bits[1]}")
def test_worst_case_activations(engines, bits):
    """Codes at the ends of the range in every arrangement the probe knows, 768 inputs."""
    problem = Problem(
        weight_bits=bits[0], activation_bits=bits[1], in_features=768, out_features=24
    )
    for kind, codes, weights in worst_case(problem):
        if kind in ("small codes", "random codes"):
            continue
        # times a power of two: the absmax codes of these values are the codes themselves
        check(
            engines, codes.float() * 2**-6, weights.float() * 2**-9, None, bits,
            ("tensor", "tensor"),
        )  # fmt: skip


def test_what_an_engine_does_not_cover_is_refused_with_a_reason(engines):
    for name in ENGINES:
        for bits in ((12, 8), (8, 16), (8, 9)):
            problem = Problem(
                weight_bits=bits[0], activation_bits=bits[1], in_features=64, out_features=8
            )
            reason = ENGINES[name].refuses(problem)
            covers = {"float": True, "int_mm": bits == (8, 9), "onnxruntime": False}
            if name in engines and covers.get(name, bits[0] <= 8):
                assert not reason
            else:
                assert reason
