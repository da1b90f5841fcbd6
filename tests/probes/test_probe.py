"""Probe on our model and on plain modules: values, masks, merging, broken values, errors."""

import json
import math

import pytest
import torch
from torch import nn

from skipless.config import ConnectionConfig, InitConfig, ModelConfig
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.probes import Probe, attention_statistics, excess_kurtosis, join_geometry
from skipless.sites import Site


def model_of(kind: str = "residual", **changes) -> Transformer:
    return Transformer(
        ModelConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
            max_position_embeddings=16, connection=ConnectionConfig(kind=kind),
            init=InitConfig(std=0.3), **changes,
        )
    ).eval()  # fmt: skip


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(0))


def record(model: nn.Module, module: str, run) -> list:
    """What a module receives and returns during `run`: [(args, result), ...]."""
    seen = []
    hook = dict(model.named_modules())[module].register_forward_hook(
        lambda _, args, result: seen.append((args, result))
    )
    run()
    hook.remove()
    return seen


@torch.no_grad()
def test_table_holds_what_the_hooks_see(ids):
    model = model_of()
    with Probe(model) as probe:
        model(ids[:1])
        model(ids[1:])
    rows = {row["site"]: row for row in probe.table()}
    seen = record(model, "layers.1.mlp.act", lambda: model(ids))[0][1]
    row = rows["layers.1.mlp.act:output"]
    assert (row["kind"], row["layer"], row["sublayer"]) == ("activation_output", 1, "mlp")
    assert row["count"] == 48 and row["nonfinite"] == 0
    # Batches of another size go through another matrix product: float32 rounding.
    assert row["kurtosis"] == pytest.approx(float(excess_kurtosis(seen)), rel=1e-4)
    assert row["kurtosis_per_token"] == pytest.approx(
        float(excess_kurtosis(seen, "per_token")), rel=1e-4
    )
    assert {row["kind"] for row in rows.values()} >= {
        "embedding", "stream", "norm_output", "sublayer_input", "sublayer_output",
        "activation_output",
    }  # fmt: skip
    assert all(row["count"] == 48 for row in rows.values())
    json.dumps(probe.table(), allow_nan=False)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["residual", "none", "layerscale"])
def test_geometry_of_our_connections(ids, kind):
    model = model_of(kind)
    with Probe(model, stats=("moments", "geometry")) as probe:
        model(ids)
    rows = probe.geometry()
    assert [(r["layer"], r["sublayer"]) for r in rows] == [
        (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp"),
    ]  # fmt: skip
    (args, y) = record(model, "layers.1.mlp_connection", lambda: model(ids))[0]
    expected = join_geometry(args[0], args[1], y)
    for key, value in expected.items():
        assert rows[3][key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    json.dumps(rows, allow_nan=False)


@torch.no_grad()
def test_attention_switches_to_eager_and_back(ids):
    model = model_of()
    attention = model.layers[0].self_attn
    with Probe(model) as probe:
        fused = model(ids).logits
        assert attention.implementation == "sdpa"
        model(ids)
    rows = probe.attention()
    assert [(r["layer"], r["count"]) for r in rows] == [(0, 48), (1, 48)]  # first batch only
    attention.implementation = "eager"
    seen = record(model, "layers.0.self_attn.probabilities", lambda: model(ids))[0][1]
    expected = attention_statistics(seen)
    for key, value in expected.items():
        assert rows[0][key] == pytest.approx(value, rel=1e-6), key
    torch.testing.assert_close(fused, model(ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_eager_is_left_even_when_the_forward_pass_fails(ids):
    model = model_of()
    with Probe(model), pytest.raises(UserError):
        model(ids.new_zeros(1, 99))
    assert model.layers[0].self_attn.implementation == "sdpa"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_padding_is_not_measured(ids):
    model = model_of()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with Probe(model) as padded:
        model(ids[:2], attention_mask=mask[:2])
    with Probe(model) as alone:
        model(ids[:1])
        model(ids[1:2, :5])
    for a, b in zip(padded.table(), alone.table(), strict=True):
        assert a["count"] == b["count"] == 17
        assert a["kurtosis"] == pytest.approx(b["kurtosis"], rel=1e-3, abs=1e-4), a["site"]
    assert padded.geometry()[0]["count"] == 17
    assert padded.attention()[0]["count"] == 17
    given = Probe(model, mask=mask[:2])
    with given:
        model(ids[:2])
    assert given.table()[0]["count"] == 17
    with Probe(model, mask=mask[:2, :3]) as wrong:
        model(ids[:2])
    with pytest.raises(UserError, match=r"mask of shape \(2, 3\) fitted no tensor"):
        wrong.table()


@torch.no_grad()
def test_merge_and_state_dict_equal_one_probe(ids, tmp_path):
    model = model_of()
    stats = ("moments", "geometry")  # attention would take the eager path in other batches
    with Probe(model, stats=stats) as whole:
        for row in ids.split(1):
            model(row)
    parts = []
    for chunk in (ids[:1], ids[1:]):
        with Probe(model, stats=stats) as probe:
            for row in chunk.split(1):
                model(row)
        parts.append(probe)
    torch.save(parts[1].state_dict(), tmp_path / "probe.pt")
    parts[0].merge(torch.load(tmp_path / "probe.pt", weights_only=False))
    for a, b in zip(parts[0].table(), whole.table(), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            near = isinstance(value, float)
            expected = pytest.approx(b[key], rel=1e-10, abs=1e-10) if near else b[key]
            assert value == expected, (a["site"], key)
    assert parts[0].num_passes == 4
    assert parts[0].geometry()[2]["cancellation"] == pytest.approx(
        whole.geometry()[2]["cancellation"], rel=1e-10
    )
    with pytest.raises(UserError, match="different sites cannot be merged"):
        parts[0].merge(Probe(model, sites="stream"))


@torch.no_grad()
def test_shared_tensors_are_measured_once_and_in_place_changes_are_seen(monkeypatch):
    calls = []
    import skipless.probes.probe as module

    real = module.batch_moments
    monkeypatch.setattr(module, "batch_moments", lambda *a: calls.append(1) or real(*a))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.relu = nn.Identity(), nn.Identity(), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.b(self.a(x * 1)))

    sites = [Site(name=n, module=n, direction="output") for n in ("a", "b", "relu")]
    x = torch.randn(50, 4)
    with Probe(model := Model(), sites=sites, stats="moments") as probe:
        model(x)
    a, b, relu = probe.table()
    assert len(calls) == 2 and a["kurtosis"] == b["kurtosis"]
    assert relu["kurtosis"] == pytest.approx(float(excess_kurtosis(x.relu())), rel=1e-9)
    with torch.inference_mode(), Probe(model, sites=sites, stats="moments") as probe:
        model(x)
    assert probe.table()[2]["mean"] == pytest.approx(float(x.relu().mean()), rel=1e-5)


@torch.no_grad()
def test_nonfinite_values_are_named(ids):
    model = model_of()
    model.layers[1].mlp.down_proj.weight[0] = math.nan
    with Probe(model) as probe:
        model(ids)
    named = probe.nonfinite()
    assert list(named)[0] == "layers.1.mlp:output" and named["layers.1.mlp:output"] == 48
    rows = {row["site"]: row for row in probe.table()}
    assert math.isnan(rows["layers.1.mlp:output"]["kurtosis"])
    assert math.isfinite(rows["layers.1.mlp.act:output"]["kurtosis"])
    assert probe.geometry()[3]["count"] == 48  # the stream was fine, the branch was not


def test_gradients_at_sites(ids):
    model = model_of()
    with Probe(model, sites="sublayer_output", stats=("moments", "gradients")) as probe:
        model(ids, labels=ids).loss.backward()
    rows = probe.table()
    assert len(rows) == 4 and all(row["gradient_norm"] > 0 for row in rows)
    with Probe(model, stats="gradients") as probe, torch.no_grad():
        model(ids)
    with pytest.raises(UserError, match=r"no gradients of Transformer.*backward"):
        probe.table()


def test_activation_checkpointing_does_not_count_twice():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.GELU())

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    with Probe(model := Model(), stats="moments") as probe:
        model(torch.randn(5, 4)).sum().backward()
    assert {row["count"] for row in probe.table()} == {5}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype, ids):
    model = model_of().to(dtype)
    with Probe(model) as probe:
        model(ids)
    reference = model_of()
    with Probe(reference) as full:
        reference(ids)
    for a, b in zip(probe.table(), full.table(), strict=True):
        assert a["std"] == pytest.approx(b["std"], rel=0.05), a["site"]


@torch.no_grad()
def test_plain_sequential_has_moments_only():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(40, 8)
    with Probe(model) as probe:
        model(x)
    rows = {row["site"]: row for row in probe.table()}
    assert set(rows) == {"0:input", "0:output", "1:output", "2:input", "2:output"}
    assert rows["0:input"]["kurtosis"] == pytest.approx(float(excess_kurtosis(x)), rel=1e-10)
    assert probe.geometry() == [] and probe.attention() == []
    with pytest.raises(UserError, match="no site of kind 'stream'"):
        Probe(model, stats=("moments", "geometry"))
    with Probe(model, stats=("moments", "attention")) as probe:
        model(x)
    with pytest.raises(UserError, match="showed no attention probabilities"):
        probe.attention()


@torch.no_grad()
def test_empty_batch_and_uncalled_modules():
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)})
    model.forward = lambda x: model["used"](x)
    with Probe(model, stats="moments") as probe:
        model(torch.randn(2, 3))
        model(torch.empty(0, 3))
    rows = {row["site"]: row for row in probe.table()}
    assert rows["used:output"]["count"] == 2
    assert rows["idle:output"]["count"] == 0 and rows["idle:output"]["kurtosis"] is None


@torch.no_grad()
def test_mistakes_are_told(ids):
    model = model_of()
    with pytest.raises(UserError, match="did you mean 'moments'"):
        Probe(model, stats=("moment",))
    with pytest.raises(UserError, match="stats is empty"):
        Probe(model, stats=())
    with pytest.raises(UserError, match="no site matches 'layers.9"):
        Probe(model, sites="layers.9.mlp:output")
    probe = Probe(model, sites="stream")
    with pytest.raises(UserError, match="seen nothing of Transformer yet; run .* `with Probe"):
        probe.table()
    with pytest.raises(UserError, match="showed no joins"):
        probe.geometry()
    with probe:
        with pytest.raises(UserError, match="already active"), probe:
            pass
        model(ids)
    assert len(probe.table()) == 4
    moments_only = Probe(model, stats="moments")
    with pytest.raises(UserError, match="geometry was not asked for"):
        moments_only.geometry()


@torch.no_grad()
def test_a_probe_can_be_entered_again(ids):
    model = model_of()
    probe = Probe(model, sites="stream", stats="moments")
    for part in ids.split(2):
        with probe:
            model(part)
    assert probe.table()[0]["count"] == 48


@torch.no_grad()
def test_generation_with_a_cache(ids):
    model = model_of()
    with Probe(model) as probe:
        model.generate(ids[:1, :4], 3)
    assert probe.table()[0]["count"] == 6  # 4 prompt tokens, then one at a time


def test_all_reduce_without_processes_is_a_no_op(ids):
    model = model_of()
    with Probe(model) as probe, torch.no_grad():
        model(ids)
    assert probe.all_reduce().table() == probe.table()


def test_a_batch_of_no_tokens_is_told_from_no_forward_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Probe(model) as probe:
        model(torch.ones(0, 4))
    with pytest.raises(UserError, match=r"was empty .*; give at least one token"):
        probe.table()
    with Probe(model) as probe:
        pass
    with pytest.raises(UserError, match="seen nothing of Sequential yet"):
        probe.table()


def test_a_layer_without_width_is_passed_over():
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4))
    with Probe(model) as probe:
        model(torch.ones(3, 4))
    counts = {row["site"]: row["count"] for row in probe.table()}
    assert counts["0:input"] == 3 and counts["0:output"] == 0
