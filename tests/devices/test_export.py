"""What is on an accelerator that is not there is written as what is on the CPU."""

import copy

import numpy as np
import pytest
import torch
from device_models import llama, transformer
from pretend_device import pretend

from skipless.export import load_quantized, save_quantized
from skipless.export.graphs.checking import _of_model
from skipless.export.graphs.rounding import stored
from skipless.export.llama.tensors import stored_tensors
from skipless.quant import quantization, quantize

IDS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))


def test_packed_weights(tmp_path):
    own = quantize(transformer(), "W4A8")
    with pretend("cuda"):
        moved = quantize(transformer().to("cuda"), "W4A8")
        save_quantized(moved, tmp_path / "moved")
    save_quantized(own, tmp_path / "own")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "moved")]
    assert files[0] == files[1]
    assert load_quantized(tmp_path / "moved")(IDS).logits.equal(own(IDS).logits)


@pytest.mark.parametrize("scheme", ["W4A8", "W8A8-asym"])
def test_codes_and_checks_of_a_graph(scheme):
    own = quantize(transformer(), scheme)
    twin = copy.deepcopy(own)
    ones = torch.ones_like(IDS)
    with torch.no_grad(), pretend("cuda"):
        twin.to("cuda")
        pairs = zip(quantization(own).weights, quantization(twin).weights, strict=True)
        for a, b in pairs:
            for x, y in zip(stored(a), stored(b), strict=True):
                assert x is y is None or np.array_equal(x, y)
        found = _of_model(twin, [(IDS, ones)])
        torch.testing.assert_close(found, _of_model(own, [(IDS, ones)]), rtol=1e-3, atol=1e-3)


def test_tensors_of_a_llama():
    own = llama(num_hidden_layers=1)
    quantize(own, "W8Afp-w:g32")
    expected = stored_tensors(own, "f32")
    with pretend("cuda"):
        found = stored_tensors(own.to("cuda"), "f32")
    for name, tensor in expected.items():
        assert np.array_equal(found[name].values, tensor.values), name
