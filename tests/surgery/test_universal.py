"""Universal interpolation in Hugging Face models: what it sees, what it carries, and the way back.

`lively` gives every zero start a value, so that encoder, aligner and gate all act.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, UniversalConfig
from skipless.errors import UserError
from skipless.model import describe_interpolation
from skipless.model.context import ForwardContext
from skipless.model.interpolation import Universal
from skipless.surgery import (
    connections,
    find_stacks,
    fold,
    gains,
    load,
    patch,
    save_pretrained,
    unpatch,
)
from skipless.surgery.causality import is_causal
from skipless.surgery.folders import patch_folder

CAUSAL = {
    "llama": {"model.layers": True}, "mistral": {"model.layers": True},
    "qwen2": {"model.layers": True}, "qwen3": {"model.layers": True},
    "smollm3": {"model.layers": True}, "phi3": {"model.layers": True},
    "mixtral": {"model.layers": True}, "gpt2": {"transformer.h": True},
    "bert": {"bert.encoder.layer": False}, "vit": {"vit.layers": False},
    "clip": {"text_model.encoder.layers": True, "vision_model.encoder.layers": False},
    "whisper": {"model.encoder.layers": False, "model.decoder.layers": True},
}  # fmt: skip
FAMILIES = ("llama", "gpt2", "bert", "vit", "clip", "whisper")
ALIGNERS = ("mean", "diagonal", "cholesky", "bures")
GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
PADDED = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])


def config(aligner="diagonal", **settings: Any):
    small = {"rank": 4, "chunk_size": 3, "winsor": 1.5, "winsor_window": 4, "aligner": aligner}
    settings = small | {"rho": 0.0, "kappa": 2.0} | settings
    return ConnectionConfig(kind="universal", universal=UniversalConfig(**settings))


@torch.no_grad()
def lively(model, seed=3):
    """Every interpolator away from its neutral start."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "_connection." in name and name.endswith(("up", "gate_weight", "gate_bias", "rho")):
            p.add_(torch.randn(p.shape, generator=generator).to(p) / 2)
    return model


def build(tiny, family="llama", connection=None, dtype=torch.float64, **settings: Any):
    model = tiny.build(family, **settings)
    return lively(patch(model, connection or config())).to(dtype)


def ids(length=9, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 40, (batch, length), generator=generator)


def difference(a, b):
    return float((a - b).abs().max())


def cached(model, tokens, pieces, mask=None, cache: Any = None):
    """Logits [B, T, V] computed in pieces of the given lengths, and the cache."""
    out, start, past = [], 0, 0 if cache is None else int(cache.get_seq_length())
    for length in pieces:
        stop = start + length
        arguments = {} if mask is None else {
            "attention_mask": mask[:, : past + stop],
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, past + start : past + stop],
        }  # fmt: skip
        found = model(tokens[:, start:stop], cache=cache, use_cache=True, **arguments)
        cache, start = found.cache, stop
        out.append(found.logits)
    return torch.cat(out, dim=1), cache


@pytest.mark.parametrize("family", CAUSAL)
def test_starts_neutral_then_matters_and_unpatch_restores(tiny, family):
    model, batch = tiny.build(family), tiny.inputs(family)
    assert {s.name: is_causal(model, s) for s in find_stacks(model)} == CAUSAL[family]
    before_config, before_classes = model.config.to_dict(), [type(m) for m in model.modules()]
    before_state = set(model.state_dict())
    with torch.no_grad():
        before = tiny.logits(model, batch)
        names = [type(m).__name__ for m in model.modules()]
        patch(model, "universal")
        assert torch.equal(tiny.logits(model, batch), before)
        kept = [type(m).__name__ for m in model.modules()]
        assert [n for n in kept if n not in ("PatchedUniversal", "RelationEncoder")] == names
        for name in connections(model):
            only = copy.deepcopy(model)
            lively(only.get_submodule(name.rpartition(".")[0]))
            assert not torch.equal(tiny.logits(only, batch), before), f"{name} has no effect"
        assert not torch.equal(tiny.logits(lively(model), batch), before)
        unpatch(model)
        assert torch.equal(tiny.logits(model, batch), before)
    assert set(model.state_dict()) == before_state
    assert model.config.to_dict() == before_config
    assert [type(m) for m in model.modules()] == before_classes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_neutral_in_sixteen_bits(tiny, dtype):
    model, batch = tiny.build("llama").to(dtype), tiny.inputs("llama")
    with torch.no_grad():
        before = tiny.logits(model, batch)
        patch(model, "universal")
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert torch.equal(tiny.logits(model, batch), before)


def states(model, family, tokens):
    """Last hidden states of the causal stack."""
    if family == "clip":
        return model.text_model(tokens).last_hidden_state
    if family == "whisper":
        sound = torch.randn(len(tokens), 4, 16, generator=torch.Generator().manual_seed(1))
        return model(sound.to(next(model.parameters()).dtype), decoder_input_ids=tokens).logits
    return model(tokens).logits


@pytest.mark.parametrize("aligner", ALIGNERS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "clip", "whisper"])
def test_later_tokens_change_nothing_earlier(tiny, family, aligner):
    extra = {"sliding_window": 4} if family == "mistral" else {}
    model = build(tiny, family, config(aligner), torch.float32, **extra)
    tokens, other = ids(12), ids(12)
    other[:, 7:] = ids(5, seed=9)
    with torch.no_grad():
        a, b = states(model, family, tokens), states(model, family, other)
    assert torch.equal(a[:, :7], b[:, :7]) and difference(a[:, 7:], b[:, 7:]) > 1e-3


@pytest.mark.parametrize(
    ("family", "stack"),
    [("bert", "bert.encoder"), ("vit", "vit.layers"), ("clip", "vision"), ("whisper", "encoder")],
)
def test_encoders_see_whole_sequences(tiny, family, stack):
    model, batch = build(tiny, family, dtype=torch.float32), tiny.inputs(family)
    name = next(n for n in connections(model) if stack in n)
    seen = []
    model.get_submodule(name).register_forward_hook(
        lambda module, args, out: seen.append((module, *args[:2], out))
    )
    with torch.no_grad():
        tiny.logits(model, batch)
        ((module, stream, branch, out),) = seen
        whole = ForwardContext(is_causal=False)
        assert torch.equal(Universal.forward(module, stream, branch, whole), out)
        assert difference(Universal.forward(module, stream, branch, ForwardContext()), out) > 1e-3


@pytest.mark.parametrize("aligner", ALIGNERS)
def test_cached_equals_full_and_left_padding_equals_alone(tiny, aligner):
    model, tokens = build(tiny, "llama", config(aligner)), ids()
    with torch.no_grad():
        full = model(tokens, use_cache=False).logits
        for pieces in ((9,), (1,) * 9, (2, 1, 4, 2)):
            assert difference(cached(model, tokens, pieces)[0], full) < 1e-10, pieces
        mask = PADDED
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = model(tokens[1:, 3:]).logits
        assert difference(padded[1:, 3:], alone) < 1e-10
        assert difference(padded[:1], full[:1]) < 1e-10
        other = tokens.clone()
        other[1, :3] = 5
        again = model(other, attention_mask=mask, position_ids=positions).logits
        assert torch.equal(again[1, 3:], padded[1, 3:])
        assert difference(padded[1:, 3:], full[1:, 3:]) > 1e-3  # the mask matters
        for pieces in ((9,), (4,) + (1,) * 5, (2, 4, 3)):
            found = cached(model, tokens, pieces, mask)[0]
            assert difference(found[0], padded[0]) < 1e-10
            assert difference(found[1, 3:], padded[1, 3:]) < 1e-10, pieces


@pytest.mark.parametrize("family", ["gpt2", "mistral", "phi3", "whisper"])
def test_cached_equals_full_in_other_decoders(tiny, family):
    extra = {"sliding_window": 4} if family == "mistral" else {}
    model, tokens = build(tiny, family, **extra), ids()
    arguments = {}
    if family == "whisper":
        sound = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).double()
        arguments["encoder_outputs"] = model.model.encoder(sound)
    name = "decoder_input_ids" if family == "whisper" else "input_ids"
    with torch.no_grad():
        full = model(**{name: tokens}, **arguments, use_cache=False).logits
        found, cache = [], None
        for t in range(9):
            out = model(**{name: tokens[:, t : t + 1]}, **arguments, cache=cache, use_cache=True)
            cache = out.cache
            found.append(out.logits)
    assert difference(torch.cat(found, 1), full) < 1e-10


def test_bert_as_a_decoder_is_causal(tiny):
    import transformers

    model = transformers.BertLMHeadModel(tiny.build("bert", is_decoder=True).config).eval()
    model, tokens = lively(patch(model, config())).double(), ids()
    assert is_causal(model, find_stacks(model)[0])
    with torch.no_grad():
        full = model(tokens, use_cache=False).logits
        assert difference(cached(model, tokens, (4, 1, 4))[0], full) < 1e-10


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_eager_equals_sdpa(tiny, family):
    # float32: transformers' eager softmax makes NaN of padding's rows in float64
    found, mask = [], PADDED if family == "llama" else PADDED.flip(1)
    for implementation in ("eager", "sdpa"):
        model = build(tiny, family, dtype=torch.float32, attn_implementation=implementation)
        with torch.no_grad():
            found.append(model(ids(), attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_right_padding_equals_alone_in_encoders_and_decoders(tiny):
    mask = PADDED.flip(1)
    for family in ("llama", "bert", "clip"):
        model = build(tiny, family)
        body = model.text_model if family == "clip" else model
        with torch.no_grad():
            padded = body(ids(), attention_mask=mask)[0]
            assert difference(padded[1:, :6], body(ids()[1:, :6])[0]) < 1e-10
            assert difference(padded[:1], body(ids()[:1])[0]) < 1e-10


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_pieces_padding_and_rows_equal_the_full_pass(tiny, data):
    aligner = data.draw(st.sampled_from(ALIGNERS))
    model = build(tiny, "llama", config(aligner))
    pads = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    mask = torch.stack([(torch.arange(10) >= n).long() for n in pads])
    tokens, split = ids(10, batch=3), data.draw(st.integers(1, 8))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
    drop = data.draw(st.integers(0, split - 1))
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        _, cache = cached(model, tokens, (split,), mask)
        cache.reorder_cache(rows)
        cache.crop(-drop)
        rest, mask, positions = tokens[rows], mask[rows], positions[rows]
        rest = torch.cat((rest[:, : split - drop], ids(10 - split + drop, len(rows), seed=4)), 1)
        found, _ = cached(model, rest[:, split - drop :], (1, 9 - split + drop), mask, cache)
        full = model(rest, attention_mask=mask, position_ids=positions, use_cache=False).logits
    real = mask[:, split - drop :].bool()
    assert difference(found[real], full[:, split - drop :][real]) < 1e-10


def test_operations_on_caches(tiny):
    model, tokens = build(tiny), ids()
    rest = ids(4, seed=5)

    def go_on(cache, rows):
        return cached(model, rest[rows], (1, 3), cache=cache)[0]

    def fresh(rows, length=5):
        return model(torch.cat((tokens[rows, :length], rest[rows]), 1)).logits[:, length:]

    with torch.no_grad():
        _, cache = cached(model, tokens[:, :5], (3, 2))
        kept = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        assert type(cache).__name__ == "DynamicCache"
        assert difference(go_on(cache, [0, 1]), fresh([0, 1])) < 1e-10
        cache.crop(-2)  # as assisted decoding does after a wrong guess
        assert cache.get_seq_length() == 7
        again = cached(model, rest[:, 2:], (2,), cache=cache)[0]
        assert difference(again, fresh([0, 1])[:, 2:]) < 1e-10
        for change, rows in (
            (lambda c: c.reorder_cache(torch.tensor([1, 1])), [1, 1]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_select_indices(torch.tensor([True, False])), [0]),
        ):
            one = copy.deepcopy(kept)
            change(one)
            assert difference(go_on(one, rows), fresh(rows)) < 1e-10
        cache.reset()
        assert (
            difference(cached(model, tokens, (4, 5), cache=cache)[0], model(tokens).logits) < 1e-10
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "mixtral"])
def test_generation_is_the_same_with_every_cache(tiny, family):
    extra = {"sliding_window": 5} if family == "mistral" else {}
    model = build(tiny, family, dtype=torch.float32, **extra)
    mask = PADDED[:, :6]
    batch = {"input_ids": ids(6), "attention_mask": mask, "pad_token_id": 0, **GREEDY}
    plain = unpatch(copy.deepcopy(model)).generate(**batch)
    without = model.generate(**batch, use_cache=False)
    assert not torch.equal(without, plain)
    assert torch.equal(model.generate(**batch), without)
    assert torch.equal(model.generate(**batch, cache_implementation="static"), without)
    alone = model.generate(batch["input_ids"][1:, 3:], **GREEDY)
    assert torch.equal(alone[0], without[1, 3:])
    beams = {**batch, "num_beams": 3, "num_return_sequences": 2}
    without = model.generate(**beams, use_cache=False)
    assert torch.equal(model.generate(**beams), without)
    assert torch.equal(model.generate(**beams, cache_implementation="static"), without)


def test_assisted_generation_crops_and_agrees(tiny):
    model, assistant = build(tiny, dtype=torch.float32), build(tiny, dtype=torch.float32)
    lively(assistant, seed=8)  # guesses wrongly now and then
    batch = {"input_ids": ids(6, batch=1), **GREEDY, "max_new_tokens": 12}
    alone = model.generate(**batch)
    assert not torch.equal(alone, assistant.generate(**batch))
    assert torch.equal(model.generate(**batch, assistant_model=assistant), alone)


def test_whisper_generates_the_same_with_and_without_cache(tiny):
    model, batch = build(tiny, "whisper", dtype=torch.float32), tiny.inputs("whisper")
    arguments = {"input_features": batch["input_features"], "max_new_tokens": 6,
                 "decoder_input_ids": batch["decoder_input_ids"][:, :1]}  # fmt: skip
    for beams in (1, 3):
        found = model.generate(**arguments, num_beams=beams)
        assert torch.equal(found, model.generate(**arguments, num_beams=beams, use_cache=False))


def gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_gives_the_same_gradients(tiny, family, reentrant):
    model, batch = build(tiny, family).train(), tiny.inputs(family)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones(2, 6, dtype=torch.long)
        batch["attention_mask"][1, 4:] = 0
        batch["attention_mask"][1, :2] = 0 if family == "llama" else 1
    whole = ("pixel_values", "input_features")
    shorter = {k: v if k in whole else v[:, :-1] for k, v in batch.items()}

    def loss():  # two passes before one backward: the second must not stand for the first
        first, second = tiny.logits(model, batch), tiny.logits(model, shorter)
        return first.square().mean() + second.square().mean()

    plain = gradients(model, loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients(model, loss)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-9, atol=1e-12)
    for name in connections(model):
        for parameter in ("rho", "gate_weight", "encoder.up", "encoder.key", "encoder.down"):
            assert again[f"{name}.{parameter}"].abs().sum() > 0, f"{name}.{parameter}"


def test_training_with_a_cache_has_the_gradients_of_training_without(tiny):
    tokens = ids()
    for aligner in ALIGNERS:
        model = build(tiny, "llama", config(aligner)).train()
        with_cache = gradients(model, lambda m=model: m(tokens, labels=tokens).loss)
        arguments = {"labels": tokens, "use_cache": False}
        without = gradients(model, lambda m=model, a=arguments: m(tokens, **a).loss)
        assert with_cache.keys() == without.keys()
        for name, gradient in without.items():
            torch.testing.assert_close(with_cache[name], gradient, rtol=1e-8, atol=1e-12)


def test_nothing_leaks_from_one_call_into_the_next(tiny):
    model, tokens = build(tiny, dtype=torch.float32), ids()
    with torch.no_grad():
        expected = model(tokens).logits
        model(ids(5, batch=3, seed=7), attention_mask=torch.tensor([[0, 1, 1, 1, 1]] * 3))
        with pytest.raises(IndexError):
            model(torch.full((2, 4), 99))
        seen = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens)
        seen.remove()
        assert torch.equal(model(tokens).logits, expected)
        with torch.inference_mode():
            assert torch.equal(model(tokens).logits, expected)


def test_a_mask_that_is_handed_in_whole(tiny):
    model, tokens = build(tiny), ids()
    real = PADDED.bool()
    mask = (real[:, None, None] & torch.ones(9, 9, dtype=torch.bool).tril()) | torch.eye(9).bool()
    mask &= real[:, None, :, None]
    positions = (PADDED.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(tokens, attention_mask=PADDED, position_ids=positions).logits
        whole = model(tokens, attention_mask=mask, position_ids=positions).logits
    assert difference(plain[real], whole[real]) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_copied_and_pickled_models_compute_the_same(tiny, family, tmp_path):
    model, batch = build(tiny, family, dtype=torch.float32), tiny.inputs(family)
    save_pretrained(model, tmp_path / "patched")
    with torch.no_grad():
        expected = tiny.logits(model, batch)
        for other in (
            load(tmp_path / "patched"), copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
        ):  # fmt: skip
            for parameter in other.parameters():  # a file's are not aligned, and that moves sums
                parameter.data = parameter.data.clone()
            assert torch.equal(tiny.logits(other, batch), expected)
            assert other.config.skipless_patch == model.config.skipless_patch
            held, kept = gains(other), gains(model)
            assert held.keys() == kept.keys() and all(torch.equal(held[n], kept[n]) for n in kept)
            unpatch(other)
            assert not torch.equal(tiny.logits(other, batch), expected)
        assert torch.equal(tiny.logits(model, batch), expected)


def test_compiled_and_sharded_models_compute_the_same(tiny):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, tokens = build(tiny, "bert", dtype=torch.float32), ids()
    with torch.no_grad():
        expected = model(tokens).logits
        compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
        assert torch.equal(compiled(tokens).logits, expected)
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs a process group of its own")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in find_stacks(model)[0].layers:
            fully_shard(layer.module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        out = model(tokens).logits
        assert torch.equal(out, expected)
        out.square().mean().backward()
        for module in connections(model).values():
            gradient: Any = module.get_parameter("encoder.key").grad
            assert float(gradient.full_tensor().abs().sum()) > 0
        with pytest.raises(UserError, match="FSDPBertLayer was wrapped after patch"):
            unpatch(model)
    finally:
        dist.destroy_process_group()


def test_a_folder_is_patched_without_changing_an_output(tiny, tmp_path):
    tiny.build("clip").save_pretrained(tmp_path / "plain")
    done = patch_folder(str(tmp_path / "plain"), tmp_path / "patched", "universal")
    assert done.difference == 0 and done.largest > 0 and len(done.places) == 8
    assert {kind for _, _, kind in done.places} == {"universal"}
    model = load(tmp_path / "patched")
    assert done.num_parameters == sum(
        p.numel() for m in connections(model).values() for p in m.parameters()
    )


def test_stands_beside_other_kinds_whatever_comes_first(tiny):
    other = ConnectionConfig(kind="rezero", init=0.4)
    for family in ("llama", "bert"):
        found = []
        for first in (True, False):
            model, batch = tiny.build(family), tiny.inputs(family)
            kinds = [(config(), "attention"), (other, "mlp")]
            for kind, site in kinds if first else kinds[::-1]:
                patch(model, kind, sites=site)
            with torch.no_grad():
                found.append(tiny.logits(lively(model), batch))
            unpatch(model)
        assert torch.equal(*found)


def test_sinkhorn_is_for_encoders(tiny):
    for family, stacks in (("bert", None), ("whisper", "encoder"), ("clip", "vision_model")):
        model, batch = tiny.build(family), tiny.inputs(family)
        with torch.no_grad():
            before = tiny.logits(model, batch)
            patch(model, config("sinkhorn"), stacks=stacks)
            assert torch.equal(tiny.logits(model, batch), before)
            assert not torch.equal(tiny.logits(lively(model), batch), before)
    for family, stacks in (("llama", None), ("whisper", "decoder"), ("clip", "text_model")):
        model = tiny.build(family)
        with pytest.raises(UserError, match="'sinkhorn' pairs every token with every other"):
            patch(model, config("sinkhorn"), stacks=stacks)
        assert not connections(model)


def test_requests_that_cannot_be_met(tiny):
    model = tiny.build("llama")
    with pytest.raises(UserError, match="'entropy' cannot be patched in: transformers' attention"):
        patch(model, config(gate_feature="entropy"))
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UserError, match=r"model.layers see later tokens is unknown .*every layer"):
        patch(model, "universal")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UserError, match=r"is_causal=False, and the model makes a causal mask"):
        patch(model, "universal")
    assert not connections(model)
    with pytest.raises(UserError, match="no transformers model with readable source"):
        patch(tiny.build("bert").bert.encoder, "universal")
    with pytest.raises(UserError, match="universal"):
        fold(patch(tiny.build("llama"), "universal"))


def test_calls_that_cannot_be_met(tiny):
    model, tokens = build(tiny), ids(4)
    with torch.no_grad():
        unseen = unpatch(copy.deepcopy(model))(tokens, use_cache=True).cache
        with pytest.raises(UserError, match="cache holds 4 tokens and the universal .* seen 0"):
            model(tokens, cache=unseen)
        cache = model(tokens, use_cache=True).cache
        cache.layers[0].crop(-1)
        with pytest.raises(UserError, match="cache holds 3 tokens and the universal .* seen 4"):
            model(tokens, cache=cache)
        cache = model(tokens, use_cache=True).cache
        with pytest.raises(UserError, match="batch of 2 and the input has 1"):
            model(tokens[:1], cache=cache)
        with pytest.raises(UserError, match="called outside its layer"):
            model.model.layers[0].mlp_connection(torch.ones(1, 2, 16), torch.ones(1, 2, 16), None)
        with pytest.raises(UserError, match="cannot read padding off a dict"):
            model.model.layers[0](torch.ones(1, 2, 16).double(), attention_mask={})
        with pytest.raises(UserError, match="hides a token from its successor"):
            model(tokens, position_ids=torch.tensor([[0, 1, 0, 1]] * 2), use_cache=False)
        model = build(tiny, "bert", chunk_size_feed_forward=2)
        with pytest.raises(UserError, match="chunk_size_feed_forward to 0"):
            model(tokens)
        model = build(tiny, "bert")
        with pytest.raises(UserError, match="its attention mask hides later ones"):
            model(tokens, attention_mask=torch.ones(2, 1, 4, 4, dtype=torch.bool).tril())
        layer = model.bert.encoder.layer[0]
        with pytest.raises(UserError, match="see all tokens, and this call is causal"):
            layer(torch.ones(1, 2, 16).double(), is_causal=True)


def test_its_size_is_what_the_documentation_says():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=4096, intermediate_size=11008, num_hidden_layers=1, vocab_size=100
            )
        )
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    text = describe_interpolation(patch(model, "universal"))
    own = sum(p.numel() for m in connections(model).values() for p in m.parameters())
    assert own == 271_878 and own / layer < 0.0015
    assert "135,939 parameters; two sites are 0.135% of a layer of 12 D^2 at D = 4,096" in text
    assert text.startswith("model.layers.0.attention_connection: universal: encoder of rank 16")
