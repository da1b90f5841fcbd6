"""Torch's default dtype and device are the user's: what is computed here does not hang on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from skipless.config import ModelConfig
from skipless.decoding import fuse
from skipless.model import Transformer
from skipless.quant import quantize, to_integer
from skipless.quant.integers.hardware import fastest_kernel, probe
from skipless.quant.saved import resume, saved_form
from skipless.quant.transforms.rotation import rotation

X = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def default(what: torch.dtype | str | None) -> Iterator[None]:
    """Another dtype, or another device, by default."""
    if isinstance(what, torch.dtype):
        torch.set_default_dtype(what)
    else:
        torch.set_default_device(what)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


OTHERS = [torch.float64, torch.bfloat16, "meta"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.LayerNorm(48), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 16)
    return nn.Sequential(*layers).eval()


@torch.no_grad()
@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("engine", [report.engine for report in probe() if report.usable])
@pytest.mark.parametrize("scheme", ["W4A8-a:token", "W8A8-static"])
def test_integers(other, engine, scheme):
    outputs = []
    for what in (None, other):
        model = net()
        with default(what):
            to_integer(quantize(model, scheme, calibration=[X]), engine)
            outputs += [model(X), model(X)]  # the second one in a single call
    assert all(torch.equal(found, outputs[0]) for found in outputs)


@torch.no_grad()
@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize(
    "method", ["smooth", "hadamard", "awq+gptq", "rotation:learned,steps=1", "codebook"]
)
def test_methods(other, method):
    outputs = []
    for what in (None, other):
        model = net()
        with default(what):
            quantize(model, "W8A8", method=method, calibration=[X])
            outputs.append(model(X))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_rotations_that_are_kept(other):
    """Widths that no other test has, since what is made first stays."""
    width = {torch.float64: 88, torch.bfloat16: 176, "meta": 352}[other]
    with default(other):
        turn = rotation(width)
    assert turn.dtype == torch.float32 and turn.device.type == "cpu"
    torch.testing.assert_close(turn @ turn.T, torch.eye(width), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_saving_and_fused_steps(other):
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31,
        max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.arange(5)[None]
    found = []
    for what in (None, other):
        model, again = (Transformer(config, seed=seed).eval() for seed in (0, 1))
        again.load_state_dict(model.state_dict())
        quantize(model, "W8A8-KV8-static", calibration=[ids])
        with default(what):
            resume(again, *saved_form(model))
            if fastest_kernel() is not None:
                fuse(to_integer(again))
        cache = again.new_cache()
        with default(what if isinstance(what, torch.dtype) else None):
            again(ids, cache=cache)
            found.append(again(ids[:, :1], cache=cache).logits)
    assert torch.equal(*found)
