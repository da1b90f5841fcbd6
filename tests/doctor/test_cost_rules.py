"""Time and memory that a change of structure did not save, and the change that saves them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from skipless.doctor import check_model, costs
from skipless.doctor.timing import saved_bytes, time_by_operator
from skipless.doctor.weights import weight_memory
from skipless.quant import fake_quantize

from .illnesses import IDS, decoder


def mlp(width: int = 1024) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128))


def masked() -> nn.Sequential:
    """Nine weights of ten are masked to 0, as torch's own pruning does."""
    model = mlp()
    for place in (0, 2):
        prune.random_unstructured(model[place], "weight", 0.9)
    return model


X = torch.randn(512, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_masked_weights_save_neither_time_nor_memory():
    found = check_model(masked(), X, against=mlp()).findings
    speed = found["speed"]
    assert speed.numbers["expected"] == pytest.approx(0.9, abs=0.01)
    assert "zeroing" in speed.remedy and "addmm" in speed.evidence
    assert found["memory of training"].numbers["saved"] < 0.1


def test_a_smaller_model_saves_both():
    found = check_model(mlp(width=128), X, against=mlp())
    assert {"speed", "memory of training"} <= set(found.healthy), found.lines()


def test_without_another_model_neither_is_judged():
    found = check_model(mlp(), X)
    assert found.unchecked["speed"] == "a model to compare with (--against)"


def test_operators_add_up_and_name_the_products():
    shares = time_by_operator(mlp(), X)
    assert sum(share for _, share in shares) == pytest.approx(1)
    assert "addmm" in dict(shares) and shares == tuple(sorted(shares, key=lambda s: -s[1]))


def test_saved_bytes_are_those_of_the_tensors_that_a_gradient_needs():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(10, 8)
    assert saved_bytes(model, x) == 4 * (10 * 8 + 10 * 16)  # the input, and ReLU's result once
    with torch.no_grad():
        assert saved_bytes(model, x) == 4 * (10 * 8 + 10 * 16)


def codes(model):
    for block in model.blocks:
        weight = block.mlp.up_proj.weight
        weight.data = fake_quantize(weight.data, bits=4)
        block.mlp.down_proj.weight.data = fake_quantize(block.mlp.down_proj.weight.data, bits=4)


def loose_tie(model):
    model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach().clone())
    for block in model.blocks:
        block.self_attn.q_proj.weight.data = block.self_attn.k_proj.weight.data.clone()


def slices(model):
    for block in model.blocks:
        whole = torch.randn(512, 32)
        block.mlp.up_proj.weight.data = whole[:128]


def empty_rows(model):
    for block in model.blocks:
        block.mlp.up_proj.weight.data[:100] = 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(codes, costs.CODES), (loose_tie, costs.COPIES), (slices, costs.VIEWS),
     (empty_rows, costs.ZEROS)],
)  # fmt: skip
def test_weights_that_keep_more_than_they_hold(spoil, reason):
    model = decoder()
    assert "memory of weights" in check_model(model, IDS).healthy
    spoil(model)
    found = check_model(model, IDS).findings["memory of weights"]
    assert found.cause == reason and found.remedy != "store the weights anew"


def test_weight_memory_counts_bytes():
    layer = nn.Linear(64, 32, bias=False)
    assert weight_memory(layer).stored == 4 * 64 * 32 and not weight_memory(layer).reasons
    layer.weight.data = torch.randn(320, 64)[:32]
    found = weight_memory(layer)
    assert found.stored == 4 * 320 * 64 and found.reasons == {costs.VIEWS: 4 * 288 * 64}
    zeros = nn.Linear(64, 32, bias=False)
    nn.init.zeros_(zeros.weight)  # a start, not something pruned
    assert not weight_memory(zeros).reasons


def test_a_matrix_without_numbers_takes_no_memory():
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(16, 0, bias=False), nn.Linear(0, 4, bias=False))
    assert weight_memory(model).stored == 0 and not weight_memory(model).reasons
