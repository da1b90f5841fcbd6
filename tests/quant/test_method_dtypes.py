"""Methods on models in other dtypes, cast meanwhile, and in inference mode."""

from __future__ import annotations

import pytest
import torch

from skipless.quant import paused, quantize, restore
from skipless.quant.transforms.rotation import Rotate

METHODS = ["smooth", "awq", "hadamard", "stream", "rotation:learned,steps=2", "outliers:10%",
           "gptq", "codebook", "stream+smooth+hadamard+outliers:10%+gptq:order"]  # fmt: skip


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("method", METHODS)
def test_models_in_float64_and_bfloat16(make_transformer, ids, method):
    for dtype, near in ((torch.float64, 1e-6), (torch.bfloat16, 5e-2)):
        model = make_transformer("residual").to(dtype)
        before = logits(model, ids)
        quantize(model, "W4A8", "block", method=method, calibration=[ids])
        assert logits(model, ids).dtype == dtype
        with paused(model):
            difference = (logits(model, ids) - before).norm() / before.norm()
        assert float(difference) < near
        assert torch.equal(logits(restore(model), ids), before)


@pytest.mark.parametrize("method", ["smooth", "stream+hadamard", "rotation:learned,steps=1"])
def test_casting_while_quantised_still_restores(make_transformer, ids, method):
    model = make_transformer("residual")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    quantize(model, "W4A8", method=method, calibration=[ids])
    model.bfloat16()
    assert logits(model, ids).dtype == torch.bfloat16
    restore(model, discard_changes=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].bfloat16())
    assert logits(model, ids).dtype == torch.bfloat16


def test_a_pass_in_inference_mode_leaves_nothing_in_the_way_of_gradients():
    rotate = Rotate(44)  # a width that no other test has, since what it needs is kept
    x = torch.randn(3, 44, dtype=torch.float16)
    with torch.inference_mode():
        turned = rotate(x)
    y = x.clone().requires_grad_()
    torch.testing.assert_close(rotate(y), turned.clone())
    rotate(y).sum().backward()
    assert bool(y.grad.isfinite().all())
