"""Static ranges from calibration batches: streaming, and what goes wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.quant import (
    RangeObserver,
    clip_range,
    fake_quantize,
    quantization,
    quantize,
    quantized,
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batches(count: int = 3, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, 8, generator=generator) * scale for _ in range(count)]


def test_ranges_are_the_extremes_of_all_batches():
    model, data = net(), batches()
    quantize(model, "W8A8-static", calibration=data)
    first = quantization(model).activations[0]
    assert first.clip == torch.cat(data).abs().max()
    assert not model[0]._forward_hooks


def test_static_forward_clips_at_the_calibrated_range():
    model, data = net(), batches()
    limit = torch.cat(data).abs().max()
    with quantized(model, "W16A4-static", calibration=data), torch.no_grad():
        seen = []
        handle = model[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        model(data[0] * 100)
        handle.remove()
    assert seen[0].abs().max() == pytest.approx(float(limit), rel=1e-6)
    assert torch.equal(seen[0], fake_quantize(data[0] * 100, 4, clip=limit))


@pytest.mark.parametrize("clip", ["absmax", "p99", "mse", "gauss"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_batch_gives_its_own_range(clip, symmetric):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    observer = RangeObserver(4, symmetric=symmetric, clip=clip)
    observer.update(x)
    observer.update(torch.empty(0))
    expected = clip_range(x, 4, symmetric=symmetric, clip=clip)
    found = observer.range()
    assert torch.equal(torch.stack(list(found)) if not symmetric else found,
                       torch.stack(list(expected)) if not symmetric else expected)  # fmt: skip


@pytest.mark.parametrize("symmetric", [True, False])
def test_observing_in_pieces_equals_observing_at_once(symmetric):
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) + 0.5
    whole = RangeObserver(8, symmetric=symmetric)
    whole.update(x)
    pieces = RangeObserver(8, symmetric=symmetric)
    for piece in x.split([1, 1000, 2999]):
        pieces.update(piece)
    assert whole.range() == pieces.range()
    gauss = RangeObserver(4, clip="gauss")
    for piece in x.split(500):
        gauss.update(piece)
    at_once = clip_range(x, 4, clip="gauss")
    assert gauss.range() == pytest.approx(float(at_once), rel=0.02)


def test_calibration_accepts_pairs_dicts_and_one_tensor(ids, make_transformer):
    for calibration in ([(ids, ids)], [{"input_ids": ids, "labels": ids}], ids, [ids]):
        model = make_transformer("none")
        model.train()
        with quantized(model, "W8A8-static", "all", calibration=calibration):
            assert all(isinstance(q.clip, torch.Tensor) for q in quantization(model).activations)
            model(ids)
        assert model.training and model.layers[0].self_attn.training


@pytest.mark.parametrize(
    ("calibration", "says"),
    [
        (None, "pass calibration="),
        ([], "empty"),
        ([torch.full((2, 8), math.nan)], "0:input saw NaN or infinity"),
        ([torch.zeros(0, 8)], "0:input saw no value"),
        (["text"], "batch is str"),
    ],
)
def test_bad_calibration_leaves_the_model_alone(calibration, says):
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match=says):
        quantize(model, "W8A8-static", calibration=calibration)
    assert quantization(model) is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_site_that_is_always_zero_stays_zero():
    model, data = net(), [torch.zeros(2, 8)]
    with torch.no_grad():
        model[0].bias.zero_()
    with quantized(model, "W8A8-static", calibration=data):
        found = model(batches(1)[0])
    expected = model(torch.zeros(5, 8))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-30)
