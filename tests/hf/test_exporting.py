"""A run as a folder of transformers: the same weights, tokenizer, logits and text."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skipless.cli import main
from skipless.config import ModelConfig
from skipless.diagnose.loading import load_subject
from skipless.errors import UserError
from skipless.export import load_quantized, save_quantized
from skipless.hf.converting import from_transformer, to_transformer
from skipless.hf.exporting import export_model
from skipless.model import Transformer
from skipless.quant import quantize
from skipless.serving import open_writer
from skipless.surgery.reading import read_language_model, read_model
from skipless.train import load_run

from .hf_models import KINDS, build, ids, own


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    """The tiny run, exported on the command line."""
    out = tmp_path_factory.mktemp("hf") / "out"
    assert main(["export", str(tiny_run), "--format", "hf", "--out", str(out)]) == 0
    return out


def test_the_command_says_what_was_compared(tiny_run, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["export", str(tiny_run), "--format", "hf", "--out", str(out), "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "SkiplessForCausalLM" and answer["difference"] == 0
    assert answer["num_tokens"] == 32  # the context holds 16 more, with and without a cache
    assert {file.name for file in out.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words[:-2], str(tmp_path / "b"), "--scheme", "W8A8"]) == 2
    assert "--scheme is not for --format hf" in capsys.readouterr().err


def test_text_and_padding_are_those_of_the_own_decoder(folder, tiny_run):
    run = load_run(tiny_run)
    model, tokenizer = (auto.from_pretrained(folder) for auto in (AutoModelForCausalLM,
                                                                  AutoTokenizer))  # fmt: skip
    for name, value in run.model.state_dict().items():
        key = name if name.startswith("lm_head") else f"model.{name}"
        assert torch.equal(model.state_dict()[key], value)
    texts = ["the king said", "lord", "not be thou art"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert set(batch) == {"input_ids", "attention_mask"} and not batch["attention_mask"].all()
    found = model.generate(**batch, max_new_tokens=12, do_sample=False)
    for row, text in enumerate(texts):
        ids = run.tokenizer.encode(text)
        assert tokenizer(text)["input_ids"] == ids
        alone = run.model.generate(torch.tensor([ids]), 12)[0]
        assert torch.equal(found[row, -len(alone) :], alone)
        assert tokenizer.decode(alone) == run.tokenizer.decode(alone.tolist())


def test_the_end_of_a_text_is_one_token_for_transformers_and_never_for_us(folder, tiny_run):
    """What people write to fine-tune, and a text from elsewhere."""
    run, tokenizer = load_run(tiny_run), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = "a<|endoftext|>"
    ids = run.tokenizer.encode(text)
    end = run.tokenizer.eos_id
    assert tokenizer("a" + tokenizer.eos_token)["input_ids"] == [*run.tokenizer.encode("a"), end]
    assert tokenizer(text, split_special_tokens=True)["input_ids"] == ids and len(ids) > 2
    assert tokenizer.decode(ids) == text
    subjects = [load_subject(str(name)) for name in (tiny_run, folder)]
    assert subjects[1].tokenizer(text)["input_ids"] == ids
    assert [open_writer(str(name)).encode(text) for name in (tiny_run, folder)] == [ids, ids]
    for settings in (model.config, model.generation_config):
        assert (settings.eos_token_id, settings.pad_token_id) == (end, tokenizer.pad_token_id)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every token is as likely: the first is taken
        assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=8).tolist() == [[5, 6, end]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_transformer_becomes_one_of_transformers(kind):
    model = own(build(kind, tie_word_embeddings=kind != "none"))
    made = from_transformer(model, eos_token_id=3)
    x = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(made(x, use_cache=False).logits, model(x).logits)
        next(model.parameters()).zero_()
        assert not torch.equal(made(x).logits, model(x).logits)  # copies, not views
    again = to_transformer(made)
    with torch.no_grad():
        assert torch.equal(again(x).logits, made(x, use_cache=False).logits)
    assert again.lm_head.weight.data_ptr() == made.lm_head.weight.data_ptr()
    assert (again.lm_head.weight is again.embed_tokens.weight) is (kind != "none")
    assert not again.training
    assert made.config.eos_token_id == 3
    assert (made.lm_head.weight is made.model.embed_tokens.weight) is (kind != "none")


def test_a_classifier_keeps_its_head():
    config = ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20,
                         max_position_embeddings=8, num_labels=3, causal=False)  # fmt: skip
    model = Transformer(config).eval()
    made = from_transformer(model, id2label={0: "a", 1: "b", 2: "c"})
    x = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(made(x).logits, model(x).logits)
    assert made.config.id2label[1] == "b"


def test_packed_folders_of_either_kind_are_told_apart(folder, tiny_run, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    quantize(model, "W8A8", "linear")
    save_quantized(model, tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert type(load_quantized(tmp_path / "packed")) is type(model)
    own_model = load_run(tiny_run).model
    quantize(own_model, "W8A8", "linear")
    save_quantized(own_model, tmp_path / "own")
    assert type(load_quantized(tmp_path / "own")) is Transformer
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, own_model(ids()).logits)


def test_surgery_names_the_run_where_a_folder_of_ours_is_given(folder):
    assert type(read_model(folder)).__name__ == "SkiplessForCausalLM"
    refused("made of a run of ours; name the run itself", lambda: read_language_model(folder))


def refused(match, call):
    with pytest.raises(UserError, match=match):
        call()


def test_what_is_damaged_or_of_another_kind_is_refused(folder, tmp_path):
    refused("is a Hugging Face folder already", lambda: export_model(folder, tmp_path / "x"))
    model = own(build())
    quantize(model, "W8A8", "linear")
    refused("the model is quantised", lambda: from_transformer(model))

    def changed(**values):
        config = json.loads((folder / "config.json").read_text()) | values
        target = tmp_path / "changed"
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps(config))
        (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        return lambda: AutoModelForCausalLM.from_pretrained(target)

    refused("format_version 2 and this skipless reads up to 1", changed(format_version=2))
    refused("format_version 'x'", changed(format_version="x"))
    refused("did you mean 'rezero'", changed(connection="rezeros"))
    refused("hidden_size is 'x'", changed(hidden_size="x"))
    refused("^connection is 3; a name or an object", changed(connection=3))
    refused("unknown setting hiden_size; did you mean 'hidden_size'", changed(hiden_size=3))
    refused("did you mean 'attention_temperature'", changed(temperature={"beta": 1.1}))
    refused("connection_overrides is 5; a list", changed(connection_overrides=5))
    refused("head_dim is 5; hidden_size / num_attention_heads = ", changed(head_dim=5))
    for value in ({"rope_type": "yarn", "factor": 4}, {"rope_theta": 5.0}, "linear"):
        refused("has no scaling: leave it out", changed(rope_scaling=value))
        refused("rope_parameters is", changed(rope_parameters=value))
    changed(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})()
    load = changed()
    weights = tmp_path / "changed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused("holds weights that cannot be read.*cut short", load)


def test_a_writer_that_reads_back_other_numbers_leaves_nothing(tiny_run, tmp_path, monkeypatch):
    from skipless.hf import SkiplessForCausalLM

    honest = SkiplessForCausalLM.save_pretrained

    def save(self, where, **options):
        honest(self, where, **options)
        file = where / "model.safetensors"
        state = load_file(file)
        state["model.norm.weight"] = state["model.norm.weight"] * 1.01
        save_file(state, file, metadata={"format": "pt"})

    monkeypatch.setattr(SkiplessForCausalLM, "save_pretrained", save)
    refused("norm.weight back as other numbers", lambda: export_model(tiny_run, tmp_path / "out"))
    assert not list(tmp_path.iterdir())
