"""Tracing: readers and sources found by what is computed, on models of many families."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from skipless.quant import paused, quantize, restore
from skipless.quant.transforms.sources import find_source, rotates_in_blocks
from skipless.quant.transforms.tracing import read_groups

from .foreign_models import FAMILIES, gpt2, whisper


def found(model: nn.Module, batch) -> dict[tuple[str, ...], str | None]:
    """{last part of the names of a group: last part of the source's name}, of the first block."""
    model.eval()
    rows = {}
    for group in read_groups(model, batch)[:4]:
        source = find_source(model, group, batch)
        readers = tuple(name.rpartition(".")[2] for name in group.names)
        rows[readers] = None if source is None else source.name.rpartition(".")[2]
    return rows


def test_ours(make_transformer, ids):
    expected = {
        ("q_proj", "k_proj", "v_proj"): "input_layernorm",
        ("o_proj",): "v_proj",
        ("up_proj",): "post_attention_layernorm",
        ("down_proj",): None,  # behind a GELU
    }
    for kind in ("residual", "none", "rezero"):
        assert found(make_transformer(kind), ids) == expected
    relu = make_transformer("residual", hidden_act="relu")
    assert found(relu, ids)[("down_proj",)] == "up_proj"
    squared = make_transformer("residual", hidden_act="relu2")  # s comes out squared
    assert found(squared, ids)[("down_proj",)] is None
    gated = make_transformer("residual", hidden_act="swiglu")
    assert found(gated, ids)[("gate_proj", "up_proj")] == "post_attention_layernorm"
    assert found(gated, ids)[("down_proj",)] == "up_proj"  # and not the gate


def test_post_norm_is_the_stream(make_transformer, ids):
    post = make_transformer("residual", norm_placement="post")
    rows = found(post, ids)
    assert rows[("q_proj", "k_proj", "v_proj")] is None and rows[("o_proj",)] == "v_proj"


def test_grouped_queries_repeat_heads(make_transformer, ids):
    model = make_transformer("residual", num_key_value_heads=2)
    group = read_groups(model, ids)[1]
    source = find_source(model, group, ids)
    assert source.name == "layers.0.self_attn.v_proj" and source.head == 8
    assert source.channels.tolist() == [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    assert rotates_in_blocks(model, group, source, ids, [32, 16, 8, 4]) == 8


@pytest.mark.parametrize("make", FAMILIES, ids=lambda f: f.__name__)
def test_families(make, ids):
    """Readers and sources, and that every method leaves the function of the model as it is."""
    torch.manual_seed(0)
    model, batch, expected = make(ids)
    rows = found(model, batch)
    if expected is not None:
        assert {k: v for k, v in rows.items() if k in expected} == expected

    def outputs():
        from skipless.quant.calibrate import run_batch
        from skipless.quant.transforms.sources import all_outputs

        with torch.no_grad():
            return all_outputs(run_batch(model, batch))

    before = outputs()
    for method in ("smooth+gptq", "hadamard"):
        quantize(model, "W8A8", method=method, calibration=[batch])
        with paused(model):
            for one, other in zip(before, outputs(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        restore(model)
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(), strict=True))


def test_cross_attention_reads_one_tensor_in_all_layers(ids):
    model, batch, _ = whisper(ids)
    groups = {group.names[0]: group for group in read_groups(model.eval(), batch)}
    keys = next(g for name, g in groups.items() if name.endswith("encoder_attn.k_proj"))
    assert len(keys.names) == 4
    # The encoder's final norm is their source, but the model also returns that tensor.
    assert keys.direct == "model.encoder.layer_norm" and find_source(model, keys, batch) is None


def test_gpt2_has_values_in_a_slice(ids):
    model, batch, _ = gpt2(ids)
    group = next(g for g in read_groups(model.eval(), batch) if g.names[0].endswith("attn.c_proj"))
    source = find_source(model, group, batch)
    assert source.name.endswith("c_attn") and source.channels.tolist() == list(range(64, 96))


def test_what_is_shared_or_runs_twice_is_left_alone():
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.out(torch.relu(self.inner(torch.relu(self.inner(self.norm(x))))))

    x = torch.randn(4, 8)
    groups = read_groups(Twice().eval(), x)
    assert groups[0].names == ("inner",) and groups[0].fixed
    assert find_source(Twice().eval(), groups[0], x) is None
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    net[2].weight = net[0].weight
    assert all(group.fixed for group in read_groups(net, x))
    before = net(x)
    quantize(net, "W8A8", method="smooth+gptq", calibration=[x])
    restore(net)
    assert torch.equal(net(x), before)


def test_a_second_reader_of_a_norm_forbids_folding():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.norm(x)
            return self.inner(y) + y

    net, x = Forked().eval(), torch.randn(4, 8)
    assert find_source(net, read_groups(net, x)[0], x) is None
