"""Dropped sublayers are gone: logits of the model with those branches times 0, a smaller cache,
the same text with and without it, the same model from disk. Random subsets."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.model import KeyValueCache, Transformer
from skipless.quant import quantized
from skipless.surgery import connections, fold, load, patch, save_pretrained, to_stock, unpatch
from skipless.surgery.dropping import Absent, drop_modules, has_absent
from skipless.surgery.slimming.removal import remove, size_of
from skipless.surgery.stacks import find_stacks

BASE = ModelConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=40,
                   num_key_value_heads=1, max_position_embeddings=32, hidden_act="swiglu",
                   connection=ConnectionConfig(kind="rezero", init=0.7))  # fmt: skip
PLACES = [f"layers.{i}.{side}_connection" for i in range(3) for side in ("attention", "mlp")]
IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(5))
some = st.sets(st.sampled_from(PLACES), min_size=1, max_size=5)


def ours(**changes):
    model = Transformer(dataclasses.replace(BASE, **changes), seed=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * noise if parameter.ndim == 1 else 0.1 * noise)
    return model


def silenced(model, names):
    """A copy whose branches at `names` are multiplied by 0."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            copied.get_submodule(name).alpha.zero_()
    return copied


@settings(max_examples=25, deadline=None)
@given(
    names=some,
    placement=st.sampled_from(["pre", "post", "none"]),
    beta=st.sampled_from([1.0, 1.2]),
    granularity=st.sampled_from(["scalar", "channel"]),
)
@torch.no_grad()
def test_ours_computes_what_times_zero_computes(names, placement, beta, granularity):
    connection = dataclasses.replace(BASE.connection, granularity=granularity)
    model = ours(
        connection=connection, norm_placement=placement, temperature=TemperatureConfig(beta=beta)
    )
    expected = silenced(model, names)(IDS).logits
    before = size_of(model, IDS)
    removed, still = remove(model, names)
    assert torch.allclose(model(IDS).logits, expected, atol=1e-6) and not still
    whole = {n.rpartition(".")[0] for n in names if n.replace("mlp", "attention") in names
             and n.replace("attention", "mlp") in names}  # fmt: skip
    assert set(removed) == (whole if placement != "post" and beta == 1 else set())
    assert not any(name.startswith(tuple(names)) for name, _ in model.named_modules()) or removed
    # the same settings build the same model, and its cache holds what is left
    fresh = Transformer(model.config, seed=0)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)
    after, cache = size_of(model, IDS), KeyValueCache()
    assert after.num_parameters == sum(p.numel() for p in fresh.parameters())
    assert after.num_parameters < before.num_parameters
    attentions = 3 - sum("attention" in name for name in names)
    assert after.cache_bytes == attentions * 2 * 8 * 4
    model(IDS, cache=cache)
    held = sum(kind == "key" for _, kind in cache.stores)
    assert held == attentions
    assert torch.equal(model.generate(IDS, 6), model.generate(IDS, 6, use_cache=False))
    assert all(site.module in dict(model.named_modules()) for site in model.sites()
               if "probabilities" not in site.module)  # fmt: skip


@torch.no_grad()
def test_a_model_without_any_attention_or_mlp_still_runs():
    for side in ("attention", "mlp"):
        model = ours()
        remove(model, [name for name in PLACES if side in name])
        assert torch.equal(model.generate(IDS, 4), model.generate(IDS, 4, use_cache=False))
        assert (size_of(model, IDS).cache_bytes == 0) == (side == "attention")
        with quantized(model, "W8A8", scope="block"):
            assert bool(model(IDS).logits.isfinite().all())


@settings(max_examples=10, deadline=None)
@given(names=some)
@torch.no_grad()
def test_fold_and_stock_classes_keep_the_logits(names):
    model = ours()
    remove(model, names)
    found = fold(model)
    assert found.difference < 1e-5
    kinds = [
        found.model.config.connection_at(i, s).kind
        for i in range(found.model.config.num_hidden_layers)
        for s in ("attention", "mlp")
    ]
    assert kinds.count("fixed") == sum(b.self_attn is None for b in model.layers) + sum(
        b.mlp is None for b in model.layers
    )
    for norm_gains in (False, True):
        stock = to_stock(model, norm_gains=norm_gains)
        expected, got = model(IDS).logits, stock(IDS).logits
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "gpt2"]


def in_two_passes(model, ids):
    """Logits of the last tokens, the first four coming out of the cache."""
    first = model(ids[:, :4], use_cache=True)
    name = next(n for n in ("cache", "past_key_values") if getattr(first, n, None) is not None)
    return model(ids[:, 4:], **{name: getattr(first, name)}).logits


def patched(tiny, family, **settings):
    model = patch(tiny.build(family, **settings), ConnectionConfig(kind="rezero", init=0.8))
    assert all(c.config.kind == "rezero" for c in connections(model).values())
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_patched_decoder_loses_single_sublayers(tiny, family, tmp_path):
    model = patched(tiny, family)
    first = [name for name in connections(model) if "0.attention" in name]
    second = [name for name in connections(model) if "1.mlp" in name]
    batch = tiny.inputs(family)
    expected = tiny.logits(silenced(model, first + second), batch)
    before = size_of(model, batch)
    removed, still = remove(model, first + second)
    after = size_of(model, batch)
    assert not removed and not still and has_absent(model)
    assert torch.allclose(tiny.logits(model, batch), expected, atol=1e-6)
    assert after.num_parameters < before.num_parameters
    assert 2 * after.cache_bytes == before.cache_bytes > 0
    continued = in_two_passes(model, batch["input_ids"])
    assert torch.allclose(continued, expected[:, 4:], atol=1e-5)
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for more in ({}, {"num_beams": 3}):
        cached = model.generate(**batch, **arguments, **more)
        assert torch.equal(cached, model.generate(**batch, **arguments, **more, use_cache=False))
    loaded = load(save_pretrained(model, tmp_path))
    assert torch.equal(tiny.logits(loaded, batch), tiny.logits(model, batch))
    assert size_of(loaded, batch) == after
    assert torch.equal(loaded.generate(**batch, **arguments), model.generate(**batch, **arguments))
    with pytest.raises(UserError, match="their weights are gone"):
        unpatch(model)
    if family != "mixtral":
        plain = fold(model)
        assert plain.difference < 1e-5 and len(plain.zeroed) == 2
        assert plain.folded["F1"] == len(connections(model)) - 2 and "F3" not in plain.folded
        assert not connections(plain.model) and has_absent(model)
        plain.model.save_pretrained(tmp_path / "plain")
        again = type(plain.model).from_pretrained(tmp_path / "plain").eval()
        got = tiny.logits(again, batch)
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5
        assert size_of(again, batch) == dataclasses.replace(
            before, num_parameters=before.num_parameters - 4
        )
        cached = again.generate(**batch, **arguments)
        assert torch.equal(cached, model.generate(**batch, **arguments))


@settings(max_examples=15, deadline=None)
@given(names=some, family=st.sampled_from(["llama", "gpt2"]))
@torch.no_grad()
def test_random_subsets_of_a_patched_decoder(tiny, names, family):
    settings_ = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    model, batch = patched(tiny, family, **settings_), tiny.inputs(family)
    root = "transformer.h" if family == "gpt2" else "model.layers"
    names = {name.replace("layers", root) for name in names}
    expected = tiny.logits(silenced(model, names), batch)
    before = size_of(model, batch)
    removed, still = remove(model, names)
    assert torch.allclose(tiny.logits(model, batch), expected, atol=1e-6)
    attentions = 3 - sum("attention" in n for n in names)
    assert size_of(model, batch).cache_bytes == before.cache_bytes // 3 * max(attentions, 1)
    assert len(still) == (attentions == 0)
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(**batch, **arguments)
    assert torch.equal(cached, model.generate(**batch, **arguments, use_cache=False))


@pytest.mark.parametrize(("family", "goes"), [("vit", True), ("clip", True), ("whisper", True),
                                              ("bert", False)])  # fmt: skip
@torch.no_grad()
def test_other_architectures_let_go_or_multiply_by_zero(tiny, family, goes, tmp_path):
    model, batch = patched(tiny, family), tiny.inputs(family)
    names = [name for name in connections(model) if "layer" in name and ".1." in name]
    expected = tiny.logits(silenced(model, names), batch)
    count = sum(p.numel() for p in model.parameters())
    removed, still = remove(model, names)
    assert torch.allclose(tiny.logits(model, batch), expected, atol=1e-6)
    if family == "vit":
        assert removed and not still
    else:
        assert not removed and (still == () if goes else set(still) == set(names))
    assert (sum(p.numel() for p in model.parameters()) < count - len(names)) == goes
    loaded = load(save_pretrained(model, tmp_path))
    assert torch.equal(tiny.logits(loaded, batch), tiny.logits(model, batch))


@torch.no_grad()
def test_whisper_hears_the_same_with_and_without_cache(tiny):
    model, batch = patched(tiny, "whisper"), tiny.inputs("whisper")
    names = ["model.decoder.layers.0.attention_connection", "model.encoder.layers.1.mlp_connection",
             "model.decoder.layers.1.cross_attention_connection"]  # fmt: skip
    before = size_of(model, batch).cache_bytes
    remove(model, names)
    assert size_of(model, batch).cache_bytes * 2 == before
    assert sum(isinstance(m, Absent) for m in model.modules()) == 3
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None,
                 "input_features": batch["input_features"]}  # fmt: skip
    cached = model.generate(**arguments)
    assert torch.equal(cached, model.generate(**arguments, use_cache=False))


@torch.no_grad()
def test_layers_of_several_types_keep_their_attentions(tiny):
    kinds = ["full_attention", "sliding_attention"]
    model = patched(tiny, "qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=4)
    names = ["model.layers.0.attention_connection", "model.layers.0.mlp_connection"]
    expected = tiny.logits(silenced(model, names), tiny.inputs("qwen2"))
    removed, still = remove(model, names)
    assert removed == () and still == (names[0],)
    assert torch.allclose(tiny.logits(model, tiny.inputs("qwen2")), expected, atol=1e-6)


@torch.no_grad()
def test_lists_by_layer_follow_the_layers_that_stay(tiny, tmp_path):
    model = patched(tiny, "smollm3", no_rope_layers=[1, 0, 0], num_hidden_layers=3)
    ids = tiny.inputs("smollm3")
    remove(model, [n for n in connections(model) if ".layers.1." in n])
    assert model.config.no_rope_layers == [1, 0] and model.config.num_hidden_layers == 2
    loaded = load(save_pretrained(model, tmp_path))
    assert torch.equal(tiny.logits(loaded, ids), tiny.logits(model, ids))


def test_a_module_that_something_else_uses_stays(tiny):
    model = patched(tiny, "vit")  # one dropout serves both sublayers
    layer = find_stacks(model)[0].layers[0]
    names = [layer.path(layer.joins[0])]
    assert drop_modules(model, names) == tuple(names)
    assert type(layer.module.dropout).__name__ == "Dropout"
    assert type(layer.module.layernorm_before).__name__ == "PassThrough"
