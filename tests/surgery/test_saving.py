"""Patched models on disk: what is restored, and that a plain load never returns one unpatched."""

import json

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.surgery import connections, load, patch, save_pretrained, set_training_progress
from skipless.surgery import unpatch as undo

FAMILIES = ("llama", "phi3", "mixtral", "gpt2", "bert", "vit", "clip", "whisper")


def patched(tiny, family):
    model = tiny.build(family)
    patch(model, ConnectionConfig(kind="interpolate", init=0.3), layers=0)
    patch(model, "layerscale", layers=1, sites="mlp")
    with torch.no_grad():
        for module in connections(model).values():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator()))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_restores_the_model_and_refuses_a_plain_load(tiny, family, tmp_path, monkeypatch):
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # What `import skipless.hf` in another test of this process has registered.
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "skipless-patched", raising=False)

    model, batch = patched(tiny, family), tiny.inputs(family)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob(".saving*"))
    loaded = load(tmp_path)
    assert type(loaded).__name__ == type(model).__name__ and not loaded.training
    state, other = model.state_dict(), loaded.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())
    with torch.no_grad():
        assert torch.equal(tiny.logits(loaded, batch), tiny.logits(model, batch))
    assert loaded.config.skipless_patch == model.config.skipless_patch
    with pytest.raises(ValueError, match="skipless-patched"):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        getattr(transformers, type(model).__name__).from_pretrained(tmp_path)
    with torch.no_grad():
        plain = tiny.logits(tiny.build(family), batch)
        assert torch.equal(tiny.logits(undo(loaded), batch), plain)
    loaded.save_pretrained(tmp_path / "plain")
    getattr(transformers, type(model).__name__).from_pretrained(tmp_path / "plain")


def test_shards_dtype_and_a_second_save(tiny, tmp_path):
    model = patched(tiny, "llama").to(torch.bfloat16)
    save_pretrained(model, tmp_path)
    assert save_pretrained(model, tmp_path, max_shard_size="4KB") == tmp_path
    assert len(list(tmp_path.glob("skipless-model-*.safetensors"))) > 1
    loaded = load(tmp_path)
    # not the logits: .to() also casts the rotary frequencies, which are no weights
    state = loaded.state_dict()
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert {p.dtype for p in load(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}


def test_an_annealed_model_comes_back_annealed(tiny, tmp_path):
    model, batch = patch(tiny.build("llama"), "anneal"), tiny.inputs("llama")
    set_training_progress(model, 0.25)
    save_pretrained(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(tiny.logits(load(tmp_path), batch), tiny.logits(model, batch))


def test_the_body_of_a_patched_model_saves_as_a_patched_model(tiny, tmp_path):
    model = patched(tiny, "llama")
    model.model.save_pretrained(tmp_path)
    ids = tiny.inputs("llama")["input_ids"]
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        assert torch.equal(load(tmp_path)(ids).last_hidden_state, expected)


def test_bad_folders_are_named(tiny, tmp_path):
    model = tiny.build("llama")
    with pytest.raises(UserError, match="LlamaForCausalLM is not patched"):
        save_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds an unpatched llama model"):
        load(tmp_path)
    with pytest.raises(UserError, match="belongs to an unpatched model"):
        save_pretrained(patch(model), tmp_path)
    with pytest.raises(UserError, match="nowhere is no folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load(tmp_path / "empty")
    with pytest.raises(UserError, match="upload the folder"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)
    folder = save_pretrained(model, tmp_path / "good")
    weights = folder / "skipless-model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(UserError, match="incomplete"):
        load(folder)
    weights.write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    config["skipless_patch"][0]["at"][0] = "model.layers.7.mlp_connection"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"model\.layers\.7\.mlp_connection"):
        load(folder)


def test_half_a_patch_is_not_saved(tiny, tmp_path):
    model = patch(tiny.build("llama"), "rezero")
    model.model.layers[1] = tiny.build("llama").model.layers[1]
    with pytest.raises(UserError, match="half of a patch was lost"):
        save_pretrained(model, tmp_path)


def test_a_folder_without_its_gains_is_refused(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_pretrained(patch(tiny.build("llama"), "rezero"), tmp_path)
    weights = folder / "skipless-model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if not k.endswith("mlp_connection.alpha")}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the gain model\.layers\.0\.mlp_connection\.alpha"):
        load(folder)
