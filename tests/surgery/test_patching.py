"""patch and unpatch on every family: neutral starts, what keeps working, bad input."""

import copy
import pickle

import pytest
import torch

from skipless.config import ConnectionConfig, ModelConfig
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.surgery import connections, find_stacks, gains, patch, set_training_progress, unpatch
from skipless.surgery.patching import kinds

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "gpt2", "bert", "vit",
    "clip", "whisper",
)  # fmt: skip
NEUTRAL = tuple(kind for kind in kinds() if kind not in ("none", "sphere", "fixed"))


@pytest.mark.parametrize("family", FAMILIES)
def test_neutral_is_bit_equal_other_values_are_not_and_unpatch_restores(tiny, family):
    model, batch = tiny.build(family), tiny.inputs(family)
    before_state = {k: v.clone() for k, v in model.state_dict().items()}
    before_config, before_classes = model.config.to_dict(), [type(m) for m in model.modules()]
    with torch.no_grad():
        before = tiny.logits(model, batch)
        names = [type(m).__name__ for m in model.modules()]
        patch(model, "rezero")
        assert torch.equal(tiny.logits(model, batch), before)
        count = sum(len(layer.joins) for s in find_stacks(model) for layer in s.layers)
        assert len(connections(model)) == count == len(gains(model))
        kept = [n for n in (type(m).__name__ for m in model.modules()) if n != "ReZero"]
        assert kept == names
        for name, module in connections(model).items():
            module.alpha.fill_(0.5)
            assert not torch.equal(tiny.logits(model, batch), before), f"{name} has no effect"
            module.alpha.fill_(1.0)
        unpatch(model)
        assert torch.equal(tiny.logits(model, batch), before)
    state = model.state_dict()
    assert list(state) == list(before_state)
    assert all(torch.equal(state[k], v) for k, v in before_state.items())
    assert model.config.to_dict() == before_config
    assert [type(m) for m in model.modules()] == before_classes


@pytest.mark.parametrize("kind", NEUTRAL)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_every_kind_by_name_starts_neutral(tiny, family, kind):
    model, batch = tiny.build(family), tiny.inputs(family)
    with torch.no_grad():
        before = tiny.logits(model, batch)
        assert torch.equal(tiny.logits(patch(model, kind), batch), before)


def test_no_skip_computes_what_the_equation_says(tiny):
    model, batch = tiny.build("llama"), tiny.inputs("llama")
    patch(model, "none", sites="mlp", layers=-1)
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        last = model(**batch, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(model.model.norm(seen[0]), last)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_the_same_gradients_and_gains_get_one(tiny, family):
    model, batch = tiny.build(family), tiny.inputs(family)
    patch(model, ConnectionConfig(kind="layerscale", init=0.7)).train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        tiny.logits(model, batch).square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)
    for name in connections(model):
        assert found[0][name + ".gamma"].abs().sum() > 0, name


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "gpt2"])
def test_generation_with_cache_equals_without(tiny, family):
    model, batch = tiny.build(family), tiny.inputs(family)
    plain = model.generate(**batch, max_new_tokens=6, do_sample=False, eos_token_id=None)
    patch(model, ConnectionConfig(kind="rezero", init=0.3))
    arguments = {**batch, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = model.generate(**arguments, use_cache=True)
    assert torch.equal(cached, model.generate(**arguments, use_cache=False))
    assert not torch.equal(cached, plain)


def test_whisper_generates_and_only_the_encoders_last_layer_changes(tiny):
    model, batch = tiny.build("whisper"), tiny.inputs("whisper")
    patch(model, "none", stacks="encoder", layers=[-1])
    assert list(connections(model)) == [
        "model.encoder.layers.1.attention_connection", "model.encoder.layers.1.mlp_connection",
    ]  # fmt: skip
    arguments = {"input_features": batch["input_features"], "max_new_tokens": 5,
                 "decoder_input_ids": batch["decoder_input_ids"][:, :1]}  # fmt: skip
    cached = model.generate(**arguments, use_cache=True)
    assert torch.equal(cached, model.generate(**arguments, use_cache=False))


def test_eager_equals_sdpa_and_dtype_follows(tiny):
    batch = tiny.inputs("llama")
    found = []
    for implementation in ("eager", "sdpa"):
        model = tiny.build("llama", attn_implementation=implementation)
        patch(model, ConnectionConfig(kind="interpolate", scale=2.0, init=0.4))
        with torch.no_grad():
            found.append(tiny.logits(model, batch))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    model = tiny.build("llama").to(torch.bfloat16)
    before = tiny.logits(model, batch)
    patch(model, "layerscale")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(tiny.logits(model, batch), before)
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}


def test_outputs_are_recorded_and_hooks_stay(tiny):
    model, batch = tiny.build("llama", attn_implementation="eager"), tiny.inputs("llama")
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("layer"))
    patch(model, "rezero")
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2 and calls == ["layer"]
    unpatch(model)
    model(**batch)
    assert calls == ["layer"] * 2


def test_copies_and_pickles_are_patched_models_of_their_own(tiny):
    model, batch = tiny.build("gpt2"), tiny.inputs("gpt2")
    patch(model, ConnectionConfig(kind="rezero", init=0.5))
    with torch.no_grad():
        expected = tiny.logits(model, batch)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(tiny.logits(other, batch), expected)
            unpatch(other)
            assert not torch.equal(tiny.logits(other, batch), expected)
        assert torch.equal(tiny.logits(model, batch), expected)


def test_a_layer_traces_whole(tiny):
    model, batch = tiny.build("llama"), tiny.inputs("llama")
    patch(model, ConnectionConfig(kind="rezero", init=0.5))
    with torch.no_grad():
        expected = tiny.logits(model, batch)
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
        assert torch.equal(tiny.logits(model, batch), expected)


def test_annealing_ends_without_a_skip(tiny):
    model, other, batch = tiny.build("llama"), tiny.build("llama"), tiny.inputs("llama")
    patch(model, "anneal", sites="attention")
    patch(other, "none", sites="attention")
    set_training_progress(model, 1.0)
    with torch.no_grad():
        assert torch.equal(tiny.logits(model, batch), tiny.logits(other, batch))


def test_two_patches_at_different_places_are_both_recorded(tiny):
    model = tiny.build("llama")
    patch(patch(model, "none", layers=0), "rezero", layers=1, sites="mlp")
    assert [(r["connection"]["kind"], len(r["at"])) for r in model.config.skipless_patch] == [
        ("none", 2), ("rezero", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"connection": "rezzero"}, "rezero"),
        ({"sites": "mpl"}, "mlp"),
        ({"sites": "cross_attention"}, "has no cross_attention; it has attention, mlp"),
        ({"layers": 2}, "layer 2 is out of range: model.layers has layers 0 to 1"),
        ({"layers": [-3]}, "layer -3 is out of range"),
        ({"layers": []}, "layers is empty; leave the argument out"),
        ({"layers": 1.5}, "layers is 1.5; layer indices"),
        ({"layers": "0"}, "layers is '0'; layer indices"),
        ({"layers": [0, 1.0]}, "layers holds 1.0; layer indices"),
        ({"layers": True}, "layers holds True; layer indices"),
        ({"layers": slice(2)}, "range.4., were expected"),
        ({"sites": 3}, "sites is 3; names of sublayers"),
        ({"sites": []}, "sites is empty"),
        ({"stacks": 3}, "stacks is 3; names of stacks"),
        ({"stacks": []}, "stacks is empty"),
        ({"stacks": [3]}, "stacks holds 3"),
        ({"stacks": "encoder"}, "no stack of layers matches 'encoder'; the model has: model.layer"),
        ({"connection": ConnectionConfig(kind="fixed", c=1.0)}, "needs the embedding"),
        ({"connection": ConnectionConfig(kind="rezero", granularity="block")}, "granularity"),
        ({"connection": 3}, "connection is 3"),
    ],
)
def test_bad_requests_say_what_is_wrong_and_change_nothing(tiny, arguments, message):
    model = tiny.build("llama")
    with pytest.raises(UserError, match=message):
        patch(model, **arguments)
    assert not connections(model)


def test_models_in_a_wrong_state_are_refused(tiny):
    with pytest.raises(UserError, match="not patched; there is nothing to undo"):
        unpatch(tiny.build("llama"))
    with pytest.raises(UserError, match="no connection to anneal"):
        set_training_progress(tiny.build("llama"), 0.5)
    model = patch(tiny.build("llama"), "rezero", layers=1)
    with pytest.raises(UserError, match=r"model.layers.1.attention_connection is patched already"):
        patch(model, "none")
    assert len(connections(model)) == 2
    model = tiny.build("llama")
    model.model.layers[0].mlp.to(torch.bfloat16)
    with pytest.raises(UserError, match="model.layers.0 mixes bfloat16 and float32"):
        patch(model)
    model = tiny.build("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UserError, match=r"model.layers.0 and model.layers.1 are one layer"):
        patch(model)
    model = tiny.build("llama")
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(UserError, match="replaced on the object"):
        patch(model)
    ours = Transformer(ModelConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                   vocab_size=20))  # fmt: skip
    with pytest.raises(UserError, match=r"ModelConfig.connection"):
        patch(ours)


def test_indices_of_other_libraries_count(tiny):
    import numpy as np

    for layers in (np.int64(1), np.array([1]), torch.tensor([-1]), (i for i in [1]), range(1, 2)):
        assert len(connections(patch(tiny.build("llama"), layers=layers))) == 2
    assert len(connections(patch(tiny.build("llama"), sites=None))) == 4


def test_other_architectures_get_the_list_of_what_is_needed(tiny):
    import transformers

    with pytest.raises(UserError, match=r"no list of layers .* Needed: a ModuleList .*llama"):
        patch(torch.nn.Linear(2, 2))
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "vocab_size": 20}  # fmt: skip
    cohere = transformers.CohereForCausalLM(transformers.CohereConfig(
        **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2))  # fmt: skip
    with pytest.raises(UserError, match="adds more than one branch at once"):
        patch(cohere)
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings))
    with pytest.raises(UserError, match="GPTNeoXLayer adds no named stream"):
        patch(neox)


def test_frozen_weights_leave_trainable_gains(tiny):
    model = tiny.build("llama").requires_grad_(False)
    patch(model, "layerscale")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == [name + ".gamma" for name in connections(model)]


def test_fully_shard_wraps_a_patched_model_and_must_come_after(tiny):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs a process group of its own")
    model, batch = tiny.build("llama"), tiny.inputs("llama")
    patch(model, ConnectionConfig(kind="rezero", init=0.5))
    with torch.no_grad():
        expected = tiny.logits(model, batch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        out = tiny.logits(model, batch)
        assert torch.equal(out, expected)
        out.square().mean().backward()
        for module in connections(model).values():
            assert float(module.alpha.grad.full_tensor().abs().sum()) > 0
        with pytest.raises(UserError, match="wrapped after patch"):
            unpatch(model)
        other = tiny.build("llama")
        fully_shard(other, mesh=mesh)
        with pytest.raises(UserError, match="patch it before fully_shard"):
            patch(other)
        parallel = torch.nn.parallel.DistributedDataParallel(tiny.build("llama"))
        with pytest.raises(UserError, match="patch the model, then wrap it"):
            patch(parallel)
    finally:
        dist.destroy_process_group()
