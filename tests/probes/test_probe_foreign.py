"""Probe on tiny random Hugging Face models and torch's own encoder."""

import pytest
import torch
from torch import nn

from skipless.probes import Probe, excess_kurtosis, join_geometry

transformers = pytest.importorskip("transformers")
TINY = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def llama():
    config = transformers.LlamaConfig(vocab_size=30, **TINY)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_llama():
    model, ids = llama(), torch.randint(30, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with Probe(model) as probe:
        model(ids, attention_mask=mask)
    assert model.config._attn_implementation == "sdpa"
    rows = {row["site"]: row for row in probe.table()}
    assert all(row["count"] == 11 for row in rows.values())
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    real = mask.bool()
    first_block = rows["model.layers.0:output"]
    assert first_block["kurtosis"] == pytest.approx(
        float(excess_kurtosis(states[1][real])), rel=1e-4
    )
    joins = probe.geometry()
    assert [(j["layer"], j["sublayer"]) for j in joins] == [
        (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp"),
    ]  # fmt: skip
    assert joins[1]["output_norm"] == pytest.approx(
        float(states[1][real].square().sum(-1).mean().sqrt()), rel=1e-4
    )
    assert joins[0]["output_norm"] == pytest.approx(joins[1]["stream_norm"], rel=1e-9)
    attention = probe.attention()
    assert [row["layer"] for row in attention] == [0, 1]
    assert all(row["count"] == 11 and 0 < row["entropy"] < 2 for row in attention)


@torch.no_grad()
def test_bert_is_post_norm_so_its_blocks_are_joins():
    config = transformers.BertConfig(vocab_size=30, **TINY)
    model, ids = transformers.BertModel(config).eval(), torch.randint(30, (2, 7))
    with Probe(model) as probe:
        model(ids)
    joins = probe.geometry()
    assert [(j["layer"], j["sublayer"]) for j in joins] == [(0, None), (1, None)]
    x, y = model(ids, output_hidden_states=True).hidden_states[:2]
    expected = join_geometry(x, y - x, y)
    for key, value in expected.items():
        assert joins[0][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    assert [row["layer"] for row in probe.attention()] == [0, 1]
    with torch.inference_mode(), Probe(model) as probe:
        model(ids)
    assert [row["module"] for row in probe.attention()] == [
        f"encoder.layer.{i}.attention.self" for i in (0, 1)
    ]


@torch.no_grad()
def test_vit():
    config = transformers.ViTConfig(image_size=16, patch_size=8, **TINY)
    model = transformers.ViTModel(config).eval()
    with Probe(model) as probe:
        model(pixel_values=torch.randn(3, 3, 16, 16))
    assert all(row["count"] == 15 for row in probe.table() if row["layer"] is not None)
    assert [(j["layer"], j["sublayer"]) for j in probe.geometry()] == [
        (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp"),
    ]  # fmt: skip
    assert len(probe.attention()) == 2


@torch.no_grad()
def test_bfloat16_llama():
    model = llama().to(torch.bfloat16)
    with Probe(model) as probe:
        model(torch.randint(30, (2, 7)))
    assert [j["sublayer"] for j in probe.geometry()] == ["attention", "mlp"] * 2
    assert not probe.nonfinite()


@torch.no_grad()
def test_torch_transformer_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with Probe(model) as probe:
        model(torch.randn(2, 5, 16))
    assert all(row["count"] == 10 for row in probe.table())
    assert len(probe.geometry()) == 2 and probe.attention() == []
