"""fold: exact on our Transformer and on patched Hugging Face models, refused where it cannot be."""

import dataclasses

import pytest
import torch

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.surgery import connections, fold, patch

BASE = ModelConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=40,
                   max_position_embeddings=32, norm_eps=1e-9)  # fmt: skip


def ours(**changes):
    """A model whose gains, norm gains and temperatures are all off their start."""
    model = Transformer(dataclasses.replace(BASE, **changes), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(4)
        model.embed_tokens.weight.mul_(12)  # unit variance, so that eps is small against it (F3)
    return model


@pytest.mark.parametrize(
    ("kind", "settings", "tag"),
    [
        ("rezero", {}, "F1"), ("rezero", {"granularity": "block"}, "F1"),
        ("layerscale", {"init": 0.5}, "F2"), ("interpolate", {}, "F3"),
        ("interpolate", {"scale": 2.0}, "F3"), ("learned", {}, "F3"),
        ("fixed", {"a": 0.5, "b": 2.0}, "F3"),
    ],
)  # fmt: skip
def test_our_gains_are_gone_and_the_logits_are_not(kind, settings, tag, capsys):
    model = ours(connection=ConnectionConfig(kind=kind, **settings))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    folded = fold(model)
    assert folded.difference < 1e-5 and folded.folded[tag] == 6 and folded.folded["F4"] == 6
    assert folded.kept == ("norm: the head is tied to the embedding",)
    assert folded.model.config.connection.kind == "residual" and not folded.model.gains()
    assert all(bool((b.input_layernorm.weight == 1).all()) for b in folded.model.layers)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "not a copy"
    assert f"to the model before {folded.difference:.2g} of the" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["constant", "learned_layer", "learned_head"])
@pytest.mark.parametrize("heads", [2, 1])
def test_temperatures_go_into_the_queries(kind, heads):
    model = ours(temperature=TemperatureConfig(kind=kind, beta=1.3), num_key_value_heads=heads)
    folded = fold(model, norm_gains=False)
    assert folded.model.config.temperature == TemperatureConfig()
    assert folded.folded["F6"] == (2 if kind == "constant" else 3)  # beta^0 is no temperature
    assert "F4" not in folded.folded
    assert not any("tau" in name for name, _ in folded.model.named_parameters())


def test_residual_free_gated_untied_and_layer_by_layer():
    free = ours(connection=ConnectionConfig(kind="none"), hidden_act="swiglu",
                tie_word_embeddings=False)  # fmt: skip
    folded = fold(free)
    assert folded.model.config.connection.kind == "none" and folded.folded["F4"] == 7
    rule = ConnectionOverride(connection=ConnectionConfig(kind="none"), layers=(1,), sublayer="mlp")
    mixed = ours(connection=ConnectionConfig(kind="interpolate"), connection_overrides=(rule,))
    result = fold(mixed).model
    kinds = [result.config.connection_at(i, "mlp").kind for i in range(3)]
    assert kinds == ["residual", "none", "residual"]


def test_layernorm_keeps_a_bias_that_has_no_place_to_go():
    found = fold(ours(norm="layernorm", connection=ConnectionConfig(kind="rezero")))
    assert "F4" not in found.folded and len(found.kept) == 7
    assert "bias" in found.kept[1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt2", "bert", "vit", "whisper"])
def test_a_patched_model_becomes_a_plain_one_that_transformers_loads(tiny, family, tmp_path):
    model, batch = tiny.build(family), tiny.inputs(family)
    patch(model, "rezero", sites="attention")
    patch(model, "layerscale" if family == "bert" else "interpolate", sites="mlp")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.mul_(10)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.rand(parameter.shape))
    found = fold(model, batch)
    assert found.difference < 1e-5 and found.folded["F1"] >= 2
    assert not connections(found.model) and connections(model)
    found.model.save_pretrained(tmp_path)
    plain = type(found.model).from_pretrained(tmp_path).eval()
    assert plain.state_dict().keys() == tiny.build(family).state_dict().keys()
    with torch.no_grad():
        expected, got = tiny.logits(model, batch), tiny.logits(plain, batch)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5
    if family in ("llama", "gpt2"):
        assert found.folded["F4"] == 4
        norm = plain.get_submodule("model.layers.0.input_layernorm" if family == "llama"
                                   else "transformer.h.0.ln_1")  # fmt: skip
        assert bool((norm.weight == 1).all())


def test_what_cannot_be_exact_is_refused(tiny):
    with pytest.raises(UserError, match=r"layers\.0\.attention_connection weighs the stream"):
        fold(ours(connection=ConnectionConfig(kind="learned", granularity="channel")))
    for kind in ("universal", "gated", "sphere"):
        with pytest.raises(UserError, match=f"is {kind}: its weights depend on the token"):
            fold(ours(connection=ConnectionConfig(kind=kind)))
    with pytest.raises(UserError, match="times the embedding"):
        fold(ours(connection=ConnectionConfig(kind="fixed", c=0.5)))
    with pytest.raises(UserError, match="half annealed"):
        half = ours(connection=ConnectionConfig(kind="anneal"))
        half.set_training_progress(0.2)
        fold(half)
    with pytest.raises(UserError, match="norm_placement 'pre'"):
        fold(ours(connection=ConnectionConfig(kind="interpolate"), norm_placement="post"))
    with pytest.raises(UserError, match="fold in float32"):
        fold(ours().to(torch.bfloat16))
    with pytest.raises(UserError, match="is not patched, so there is no gain to fold"):
        fold(tiny.build("llama"))
    with pytest.raises(UserError, match="no skip, which a plain LlamaForCausalLM cannot express"):
        fold(patch(tiny.build("llama"), "none", layers=1, sites="mlp"))
    with pytest.raises(UserError, match="experts"):
        fold(patch(tiny.build("mixtral"), "rezero"))
    with pytest.raises(UserError, match="pass inputs="):
        fold(patch(tiny.build("vit"), "rezero"))


def test_a_finished_annealing_folds_to_none():
    model = ours(connection=ConnectionConfig(kind="anneal"))
    model.set_training_progress(1.0)
    assert fold(model).model.config.connection.kind == "none"


def test_f3_is_refused_where_eps_counts():
    model = ours(connection=ConnectionConfig(kind="interpolate"), norm_eps=1e-2)
    with pytest.raises(UserError, match="F3 changes what the norms' eps does"):
        fold(model)


def test_a_difference_above_the_limit_is_an_error(tiny, monkeypatch):
    from skipless.surgery.slimming import patched_folding

    model = patch(tiny.build("llama"), "rezero")
    monkeypatch.setattr(
        patched_folding, "scale_output", lambda linear, gain: linear.weight.data.mul_(2)
    )
    with pytest.raises(UserError, match="1e-05 is the limit"):
        fold(model, norm_gains=False)
