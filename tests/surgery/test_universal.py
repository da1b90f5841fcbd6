"""Universal interpolation in Hugging Face models: what it sees, what keeps working, the way back.

Caches and padding are in test_universal_caches.py.
"""

import copy
import pickle
from typing import Any

import pytest
import torch

from skipless.config import ConnectionConfig
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
from skipless.surgery.folders import patch_folder
from skipless.surgery.universal.causality import is_causal

from .universal_models import ALIGNERS, PADDED, build, config, difference, gradients, ids, lively

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


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_eager_equals_sdpa(tiny, family):
    # float32: transformers' eager softmax makes NaN of padding's rows in float64
    found, mask = [], PADDED if family == "llama" else PADDED.flip(1)
    for implementation in ("eager", "sdpa"):
        model = build(tiny, family, dtype=torch.float32, attn_implementation=implementation)
        with torch.no_grad():
            found.append(model(ids(), attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_gives_the_same_gradients(tiny, family, reentrant):
    model, batch = build(tiny, family).train(), tiny.inputs(family)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones(2, 6, dtype=torch.long)
        batch["attention_mask"][1, 4:] = 0
        batch["attention_mask"][1, :2] = 0 if family == "llama" else 1
    if family in ("llama", "gpt2", "whisper"):
        batch["use_cache"] = False  # as checkpointing does, or sums are in another order
    whole = ("pixel_values", "input_features", "use_cache")
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
