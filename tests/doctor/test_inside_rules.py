"""Illnesses inside a model, each in a model that has it, and a healthy twin without a finding."""

import dataclasses

import pytest
import torch
from torch import nn

from skipless.config import ConnectionConfig, InitConfig
from skipless.doctor import Evidence, check_model, examine, inside
from skipless.doctor.measuring import find_leak, measure

from .illnesses import IDS, SequenceMean, averaging, decoder, with_sink

IDENTITY = InitConfig(value_output="haar", query_key="unit", mlp="suo", identity_bias=5.0)
"""The start that lets a model without skips train (I2, I4, I7)."""
WITH_CONNECTIONS = ("residual", "none", "rezero", "layerscale", "universal", "gated", "learned")


@pytest.mark.parametrize("kind", WITH_CONNECTIONS)
def test_an_ordinary_start_has_no_finding_inside(kind):
    settings = {"init": IDENTITY} if kind == "none" else {}
    found = check_model(decoder(connection=ConnectionConfig(kind=kind), **settings), IDS)
    assert not found.findings, found.lines()
    assert {"finite numbers", "causality", "soft attention", "attention sinks"} <= set(
        found.healthy
    )


def test_every_layer_an_average_makes_tokens_alike():
    found = check_model(averaging(), IDS).findings["distinct tokens"]
    assert found.numbers["similarity"] > inside.SIMILARITY
    assert found.numbers["rank_share"] < inside.RANK_SHARE
    assert "layer 7 mlp" in found.evidence and "identity_bias" in found.remedy


def test_a_remedy_is_none_that_the_model_has_already():
    e = measure(averaging(), IDS)
    start = "model.init.identity_bias=5 (I7)"
    assert e.settings["model.init.identity_bias"] is None
    assert start in inside.rank_collapse(e).remedy
    has = {"model.init.identity_bias": 5.0, "model.temperature.beta": 1.0}
    told = []
    for kind in ("none", "anneal", "rezero"):
        settings = has | {"model.connection.kind": kind}
        told.append(inside.rank_collapse(dataclasses.replace(e, settings=settings)).remedy)
    assert told == [
        "a skip or an annealed one (model.connection.kind=anneal); more steps; fewer layers",
        "a skip that stays (model.connection.kind=rezero); more steps; fewer layers",
        "more steps; fewer layers",
    ]
    foreign = dataclasses.replace(e, settings={})
    assert f"{start}, model.temperature.beta=1, a skip" in inside.rank_collapse(foreign).remedy
    other = dataclasses.replace(e, settings={"model.init.identity_bias": 3.0})
    assert start in inside.rank_collapse(other).remedy


def test_without_skips_an_ordinary_start_collapses_too():
    model = decoder(connection=ConnectionConfig(kind="none"))
    assert "distinct tokens" in check_model(model, IDS).findings


def test_a_common_direction_alone_is_no_collapse():
    """Similar tokens that still differ in every other direction, as in GPT-2."""
    model = decoder()
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] += 0.5
    e = measure(model, IDS)
    assert e.joins[0]["token_similarity"] > inside.SIMILARITY
    assert inside.rank_collapse(e) is None


def test_queries_three_thousand_times_too_large_saturate_their_layer_only():
    model = decoder()
    with torch.no_grad():
        model.layers[2].self_attn.q_proj.weight.mul_(3000)
    found = check_model(model, IDS).findings["soft attention"]
    assert found.numbers["layer"] == 2 and "1 of 4 layers" in found.evidence


def test_a_mark_that_every_query_looks_for_is_a_sink():
    ids = IDS.clone()
    ids[:, 0] = 0
    found = check_model(with_sink(), ids).findings["attention sinks"]
    assert found.level == "note" and found.numbers["layers"] == 4
    elsewhere = IDS.clone()
    elsewhere[elsewhere == 0] = 1
    assert "attention sinks" in check_model(with_sink(), elsewhere).healthy


def test_an_output_matrix_that_grew_is_named():
    model = decoder()
    with torch.no_grad():
        model.layers[2].mlp.down_proj.weight.mul_(1000)
    found = check_model(model, IDS).findings["branch sizes"]
    assert found.numbers["place"] == "layer 2 mlp" and found.level == "harmful"


def test_a_giant_activation_is_told_from_a_matrix_that_grew():
    """One hidden unit of the MLP, open for one token, writes into one channel."""
    model = decoder()
    with torch.no_grad():
        mlp = model.layers[2].mlp
        seen = {}
        handle = mlp.up_proj.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        model(IDS)
        handle.remove()
        mlp.up_proj.weight[0] = seen["x"][0, 0] / seen["x"][0, 0].norm()
        mlp.down_proj.weight[:, 0] = 0
        mlp.down_proj.weight[3, 0] = 100.0
    found = check_model(model, IDS).findings["branch sizes"]
    assert found.numbers["giant"] and found.level == "costly" and "giant" in found.cause


def test_a_branch_behind_a_gain_of_zero_is_none():
    model = decoder(connection=ConnectionConfig(kind="rezero"))
    with torch.no_grad():
        model.layers[2].mlp.down_proj.weight.mul_(1000)
    assert "branch sizes" in check_model(model, IDS).healthy


@pytest.mark.parametrize("causal", [False, True])
def test_a_mean_over_all_positions_leaks(causal):
    found = check_model(SequenceMean(causal), IDS, causal=True)
    if causal:
        assert "causality" in found.healthy
        return
    leak = found.findings["causality"]
    assert next(iter(found.findings)) == "causality"  # worst first
    assert leak.level == "broken" and leak.numbers["first"] == "mix"


def test_a_model_without_causal_mask_leaks_and_an_encoder_is_not_asked():
    model = decoder(causal=False)
    found = check_model(model, IDS, causal=True).findings["causality"]
    assert found.numbers["first"] == "layers.0.self_attn.probabilities" or "self_attn" in str(
        found.numbers["first"]
    )
    assert "causality" in check_model(model, IDS).unchecked


def test_a_leak_is_found_in_tokens_of_one_kind_and_in_vectors():
    same = torch.full((1, 8), 5)
    leak = find_leak(SequenceMean(False), same)
    assert leak is not None and leak.difference > 0
    zeros = find_leak(SequenceMean(False), torch.zeros(1, 8, dtype=torch.long))
    assert zeros is not None and zeros.difference > 0
    vectors = torch.randn(2, 8, 32)
    bidirectional = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0).eval()
    found = find_leak(bidirectional, vectors)
    assert found is not None and found.difference > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_and_activations(value):
    model = decoder()
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[0, 0] = value
    found = check_model(model, IDS).findings["finite numbers"]
    assert "layers.1.mlp.up_proj.weight" in found.evidence
    large = decoder(norm_placement="none")
    with torch.no_grad():
        for block in large.blocks:
            block.mlp.down_proj.weight.mul_(1e30)
            block.mlp.up_proj.weight.mul_(1e30)
    assert "values at" in check_model(large, IDS).findings["finite numbers"].evidence


def test_what_is_not_finite_is_the_only_finding():
    """NaN is no leak, no unequal gradient and no loud gate, though no threshold holds it."""
    model = decoder(connection=ConnectionConfig(kind="rezero"))
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    found = check_model(model, IDS)
    assert list(found.findings) == ["finite numbers"]
    assert found.unchecked["causality"] == "numbers that are finite"
    assert "gate gradients" in found.unchecked and "gradients by depth" in found.unchecked


def test_a_gradient_that_is_not_finite_is_named():
    model = decoder()
    found = check_model(model, IDS, loss=lambda result: result.logits.sum().mul(0).sqrt())
    assert list(found.findings) == ["finite numbers"]
    assert found.findings["finite numbers"].evidence.startswith("the gradient of ")


def test_files_that_were_finite_do_not_hide_weights_that_are_not():
    attention = ({"layer": 0, "first_token_mass": 0.5, "saturated": 0.0},)
    files = Evidence(name="run", nonfinite="", num_keys=1024)
    model = Evidence(name="model", nonfinite="the weight a", num_keys=4, attention=attention)
    assert files.joined(model).nonfinite == "the weight a"
    # an even look is that of the sequences which attention was measured on
    assert files.joined(model).num_keys == 4
    assert model.joined(files).num_keys == 4 and files.joined(files).nonfinite == ""


def test_the_model_is_left_as_it_was():
    model = decoder().train()
    model.layers[0].eval()
    model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    model.norm.weight.grad = torch.ones(32)
    before = model(IDS).logits
    check_model(model, IDS)
    assert torch.equal(model(IDS).logits, before)
    assert model.training and not model.layers[0].training
    assert not model.layers[1].mlp.up_proj.weight.requires_grad
    assert torch.equal(model.norm.weight.grad, torch.ones(32))
    assert model.layers[2].mlp.up_proj.weight.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_without_evidence_nothing_is_healthy():
    found = examine(Evidence(name="nothing"))
    assert not found.healthy and not found.findings and len(found.unchecked) == 14
    assert all(needs for needs in found.unchecked.values())
    assert found.lines()[0] == "nothing: no findings"
