"""Models in transformers equal our own Transformer; saving, loading, what a call may ask for."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from skipless.config import ConnectionConfig, ModelConfig
from skipless.errors import UserError
from skipless.hf import (
    SkiplessConfig,
    SkiplessForCausalLM,
    SkiplessForSequenceClassification,
    SkiplessModel,
)
from skipless.model import Transformer
from skipless.probes import Probe
from skipless.quant import quantize

from .hf_models import KINDS, build, ids, own, settings


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_own_model_bit_for_bit(kind):
    model, x = build(kind), ids()
    with torch.no_grad():
        plain = own(model)
        assert torch.equal(model(x, use_cache=False).logits, plain(x).logits)
        cached = plain(x, cache=plain.new_cache()).logits
        assert torch.equal(model(x, use_cache=True).logits, cached)
        assert torch.equal(model.model(x, use_cache=False)[0], model(x, output_hidden_states=True,
                           use_cache=False).hidden_states[-1])  # fmt: skip


OPTIONS = {
    "hidden_act": st.sampled_from(["gelu", "relu", "relu2", "swiglu"]),
    "norm": st.sampled_from(["rmsnorm", "layernorm"]),
    "norm_placement": st.sampled_from(["pre", "post", "none"]),
    "position": st.sampled_from(["rope", "learned", "none"]),
    "num_key_value_heads": st.sampled_from([None, 1, 2]),
    "tie_word_embeddings": st.booleans(),
    "attention_temperature": st.sampled_from(
        [None, {"beta": 1.1}, {"kind": "learned_head"}, {"length_scaled": True}]
    ),
    "init": st.sampled_from([None, {"identity_bias": 5.0}, {"value_output": "haar"}]),
    "attn_implementation": st.sampled_from(["sdpa", "eager"]),
    "kind": st.sampled_from(["none", "rezero", "universal"]),
}


@bounds(max_examples=25, deadline=None, derandomize=True)
@given(chosen=st.fixed_dictionaries(OPTIONS), padding=st.integers(0, 4))
def test_every_option_of_the_architecture_is_the_same(chosen, padding):
    model, x = build(**chosen), ids()
    expected = own(model)
    mask = torch.ones_like(x)
    mask[1, :padding] = 0
    for module in expected.modules():
        if hasattr(module, "implementation"):
            module.implementation = chosen["attn_implementation"]
    with torch.no_grad():
        found = model(x, attention_mask=mask, use_cache=False).logits
        assert torch.equal(found, expected(x, attention_mask=mask).logits)
    again = SkiplessConfig.from_dict(json.loads(model.config.to_json_string()))
    assert again.to_model_config() == model.config.to_model_config()


def test_the_start_is_by_the_role_of_each_matrix_and_by_torchs_seed():
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(SkiplessForCausalLM(settings(init={"value_output": "haar", "mlp": "suo"})))
    a, b, c = (dict(m.named_parameters()) for m in models)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    attention = models[0].model.blocks[0].self_attn
    product = attention.o_proj.weight @ attention.v_proj.weight  # I2: a_vo times the identity
    assert torch.allclose(product, 3 * torch.eye(32), atol=1e-4)
    assert torch.equal(a["model.norm.weight"], torch.ones(32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_folder_loads_bit_for_bit_through_auto_classes(kind, tied, tmp_path):
    model, x = build(kind, tie_word_embeddings=tied), ids()
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is SkiplessForCausalLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    with torch.no_grad():
        assert torch.equal(again(x).logits, model(x).logits)
        body = AutoModel.from_pretrained(tmp_path)
        assert type(body) is SkiplessModel and torch.equal(body(x)[0], model.model(x)[0])
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_block_gains_stay_shared_and_are_saved_once(tmp_path):
    model = build(connection={"kind": "rezero", "granularity": "block"}, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    again = SkiplessForCausalLM.from_pretrained(tmp_path)
    block = again.model.blocks[1]
    assert block.mlp_connection.alpha is block.attention_connection.alpha
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_missing_weights_get_their_start_and_the_others_stay(tmp_path):
    from safetensors.torch import load_file, save_file

    model = build("rezero")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.0.mlp_connection.alpha", "model.layers.1.self_attn.o_proj.weight"
    save_file({k: v for k, v in state.items() if k not in gone}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    again = SkiplessForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value) is (name not in gone), name
    assert again[gone[0]].tolist() == [0.0] and again[gone[1]].std() > 0


def test_loss_is_that_of_shifted_labels_and_equals_the_own_models():
    model, x = build(), ids(3, 12)
    labels = x.clone()
    labels[0, :5] = -100
    loss = model(x, labels=labels).loss
    expected = own(model)(x[:, :-1], labels=labels[:, 1:]).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    summed = model(x, labels=labels, num_items_in_batch=torch.tensor(4)).loss
    assert summed.item() == pytest.approx(loss.item() * int((labels[:, 1:] != -100).sum()) / 4)


def test_what_a_call_may_ask_for():
    model, x = build(num_hidden_layers=3), ids()
    with torch.no_grad():
        whole = model(x, output_hidden_states=True)
        assert torch.equal(model(x, logits_to_keep=2).logits, whole.logits[:, -2:])
        places = torch.tensor([0, 4])
        assert torch.equal(model(x, logits_to_keep=places).logits, whole.logits[:, places])
        embedded = model.get_input_embeddings()(x)
        assert torch.equal(model(inputs_embeds=embedded).logits, whole.logits)
        assert torch.equal(whole.hidden_states[0], embedded)
        assert len(whole.hidden_states) == 4
        assert torch.equal(model.lm_head(whole.hidden_states[-1]), whole.logits)
        after_first = model.model.layers[1].register_forward_pre_hook(
            lambda module, args: seen.append(args[0])
        )
        seen: list = []
        model(x)
        after_first.remove()
        assert torch.equal(seen[0], whole.hidden_states[1])
        assert isinstance(model(x, return_dict=False), tuple)
        moved = model(x, position_ids=torch.arange(3, 12)[None]).logits
        assert torch.allclose(moved, whole.logits, atol=1e-4)  # RoPE sees distances only
        learned = build(position="learned")
        a, b = (learned(x, position_ids=torch.arange(s, s + 9)[None]).logits for s in (0, 3))
        assert torch.equal(a, learned(x).logits) and not torch.allclose(a, b, atol=1e-2)
        model.set_attn_implementation("eager")
        shown = model(x, output_attentions=True).attentions
        assert len(shown) == 3 and shown[0].shape == (2, 4, 9, 9)
        assert torch.allclose(shown[0].sum(-1), torch.ones(2, 4, 9), atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "universal"])
def test_activation_checkpointing_changes_no_gradient(kind):
    gradients = []
    for every in (None, 1, 2):
        model = build(kind, num_hidden_layers=3).train()
        if every is not None:
            new = getattr(model, "activation_checkpointing_enable", None)  # since 5.24
            enable = new or model.gradient_checkpointing_enable
            enable({"use_reentrant": False}, every_n_layers=every)
        runs = []
        model.model.layers[0].register_forward_pre_hook(lambda *args, runs=runs: runs.append(1))
        model.model.layers[1].register_forward_pre_hook(lambda *args, runs=runs: runs.append(2))
        model(ids(), labels=ids(), use_cache=every is not None).loss.backward()
        assert runs.count(1) == (1 if every is None else 2)
        assert runs.count(2) == (2 if every == 1 else 1)
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for other in gradients[1:]:
        for name, value in gradients[0].items():
            assert torch.equal(other[name], value), name


def test_the_vocabulary_can_grow():
    model, x = build(), ids()
    with torch.no_grad():
        before = model(x).logits
        model.resize_token_embeddings(60, mean_resizing=False)
        after = model(x).logits
    assert after.shape[-1] == 60 and model.config.vocab_size == 60
    assert torch.equal(after[..., :50], before)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    new = model.model.embed_tokens.weight[50:]
    assert 0.01 < new.std() < 0.04
    with torch.no_grad():
        model(torch.full((1, 3), 59))


@pytest.mark.parametrize("scheme", ["W4A4", "W8A8-KV4"])
def test_quantisation_and_probes_find_the_sites_of_the_own_model(scheme):
    model, x = build(), ids()
    expected = own(model)
    with torch.no_grad(), Probe(model, stats=["moments", "attention"]) as probe:
        model(x, use_cache=False)  # as the other: keys in a cache lie otherwise, and round so
    with torch.no_grad(), Probe(expected, stats=["moments", "attention"]) as other:
        expected(x)
    assert probe.table()[0]["site"] == "model.embed_tokens:output"
    for row, same in zip(probe.table(), other.table(), strict=True):
        assert row["site"].removeprefix("model.") == same["site"]
        assert row["kurtosis"] == same["kurtosis"]
    assert len(probe.attention()) == len(other.attention()) == 2
    quantize(model, scheme, "all")
    quantize(expected, scheme, "all")
    found = model.generate(x, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected.generate(x, 8))
    body = model.model.sites()
    assert body[0].name == "embed_tokens:output" and body[-1].module == "norm"


@pytest.mark.parametrize("causal", [True, False])
def test_a_classifier_equals_the_own_one(causal, tmp_path):
    torch.manual_seed(0)
    config = settings(causal=causal, num_labels=3)
    model = SkiplessForSequenceClassification(config).eval()
    expected = Transformer(ModelConfig.from_dict(
        {**model.config.to_model_config().to_dict(), "num_labels": 3}))  # fmt: skip
    expected.load_state_dict({n.removeprefix("model."): v for n, v in model.state_dict().items()})
    expected.eval()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    labels = torch.tensor([2, 0])
    with torch.no_grad():
        found = model(ids(), attention_mask=mask, labels=labels)
        other = expected(ids(), attention_mask=mask, labels=labels)
    assert torch.equal(found.logits, other.logits)
    assert found.loss.item() == pytest.approx(other.loss.item(), rel=1e-6)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids(), attention_mask=mask).logits, found.logits)
    one = SkiplessForSequenceClassification(settings(num_labels=1)).eval()
    loss = one(ids(), labels=torch.tensor([0.5, -1.0]))
    assert loss.loss.item() == pytest.approx(
        F.mse_loss(loss.logits[:, 0], torch.tensor([0.5, -1.0])).item()
    )
    for wrong, told in (
        (torch.tensor([0, 3]), "labels hold 3; 0 to 2 were expected"),
        (torch.tensor([0]), r"shape \[1\]; one for each of the 2 texts"),
        (torch.tensor([0.0, 1.0]), "labels are float32 and config.problem_type is 'single"),
    ):
        with pytest.raises(UserError, match=told):
            model(ids(), labels=wrong)
    many = SkiplessForSequenceClassification(settings(num_labels=3)).eval()
    assert many(ids(), labels=torch.ones(2, 3)).loss > 0  # several classes a text
    assert many.config.problem_type == "multi_label_classification"


def test_defaults_are_the_papers():
    config = SkiplessConfig()
    assert (config.connection, config.intermediate_size, config.hidden_act) == (
        "none", 4 * 768, "gelu")  # fmt: skip
    assert config.tie_word_embeddings and config.max_position_embeddings == 512
    assert config.eos_token_id is config.pad_token_id is None
    rule = {"connection": "residual", "layers": [-1], "sublayer": "mlp"}
    mixed = settings(ConnectionConfig(kind="layerscale", init=0.1), connection_overrides=[rule])
    found = mixed.to_model_config()
    assert found.connection_at(1, "mlp").kind == "residual"
    assert found.connection_at(0, "mlp") == ConnectionConfig(kind="layerscale", init=0.1)
    assert SkiplessConfig.from_model_config(found).to_model_config() == found
