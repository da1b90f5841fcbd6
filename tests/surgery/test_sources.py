"""What a command names: runs where models are wanted, files that disagree, weights that are NaN."""

import json
import os

import pytest
import torch

from skipless.cli import main
from skipless.diagnose.loading import load_subject
from skipless.errors import UserError
from skipless.surgery import connections, convert, fold, load, patch, prune
from skipless.surgery.reading import read_model
from skipless.surgery.sources import copy_tokenizer


def said(capsys):
    return capsys.readouterr().err.strip().splitlines()[-1]


def count_less(folder, **fewer):
    """The folder's config.json says fewer layers than its weights have."""
    config = json.loads((folder / "config.json").read_text())
    for path, number in fewer.items():
        *inner, name = path.split("__")
        part = config
        for key in inner:
            part = part[key]
        part[name] = number
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_run_is_no_hugging_face_model_and_the_other_way_round(tiny, copy_run, tmp_path, capsys):
    run, out = copy_run(tmp_path / "run"), tmp_path / "out"
    for command in ("patch", "convert"):
        assert main([command, str(run), "--out", str(out)]) == 2
        sentence = said(capsys)
        assert f"{run} is a run" in sentence and f"`skipless fold {run} --out FOLDER`" in sentence
    with pytest.raises(UserError, match=r"is a run and no patched model; .*load_run"):
        load(run)
    tiny.build("llama").save_pretrained(tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model")]) == 2  # takes both
    assert "is no run, which has its held-out text; give --text" in said(capsys)
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert "is no run, which has its held-out text; give --text FILE" in said(capsys)
    for command in ("probe", "show", "train", "report"):
        assert main([command, str(tmp_path / "model")]) == 2
        assert "is a Hugging Face model and no run; `skipless diagnose" in said(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("family", "fewer", "where"),
    [
        ("llama", {"num_hidden_layers": 1}, "model.layers"),
        ("gpt2", {"n_layer": 1}, "transformer.h"),
        ("bert", {"num_hidden_layers": 1}, "bert.encoder.layer"),
        ("whisper", {"decoder_layers": 1}, "model.decoder.layers"),
        ("clip", {"vision_config__num_hidden_layers": 1}, "vision_model.encoder.layers"),
    ],
)
def test_more_layers_in_the_file_than_in_the_config(tiny, family, fewer, where, tmp_path):
    tiny.build(family).save_pretrained(tmp_path / "plain")
    patch(tiny.build(family), "rezero", layers=0).save_pretrained(tmp_path / "patched")
    sentence = f"holds 2 layers in {where} and its config.json counts 1"
    with pytest.raises(UserError, match=sentence):
        read_model(count_less(tmp_path / "plain", **fewer))
    with pytest.raises(UserError, match=sentence):
        load_subject(str(tmp_path / "plain"))  # what diagnose and doctor read
    with pytest.raises(UserError, match=sentence):
        load(count_less(tmp_path / "patched", **fewer))


def test_a_body_read_as_a_language_model_counts_its_layers(tiny, tmp_path):
    import transformers

    tiny.build("llama").model.save_pretrained(tmp_path / "body")
    count_less(tmp_path / "body", num_hidden_layers=1)
    for cls in (None, transformers.LlamaModel):
        with pytest.raises(UserError, match="holds 2 layers in .*layers and .* counts 1"):
            read_model(tmp_path / "body", cls)


def test_weights_that_are_no_numbers_are_named(tiny, tmp_path, capsys):
    """By whoever computes with them, in a model and in a folder; patch in memory may be for it."""
    model = patch(tiny.build("llama"), "rezero")
    alpha = connections(model)["model.layers.1.mlp_connection"].alpha
    matrix = model.model.layers[0].self_attn.q_proj.weight
    ids = [torch.arange(3, 9)[None]]
    with torch.no_grad():
        alpha.fill_(torch.inf)
    for work in (fold, lambda m: prune(m, ids), lambda m: convert(m, ids, ids)):
        with pytest.raises(UserError, match=r"Llama.* no numbers: .*1.mlp_connection.alpha is inf"):
            work(model)
    with torch.no_grad():
        matrix[3, 5] = matrix[4, 0] = torch.nan
    where = r"q_proj.weight is nan at \[3, 5\] \(and 1 more\)"
    with pytest.raises(UserError, match=where):
        fold(model)
    model.save_pretrained(tmp_path / "patched")
    assert main(["fold", str(tmp_path / "patched"), "--out", str(tmp_path / "out")]) == 2
    assert "model.layers.0.self_attn.q_proj.weight is nan at [3, 5]" in said(capsys)
    assert not (tmp_path / "out").exists()


def test_finite_weights_that_overflow_are_told_apart(tiny):
    model = patch(tiny.build("llama"), "rezero")
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    with pytest.raises(UserError, match="logits of LlamaForCausalLM are not finite"):
        fold(model)


def test_a_tokenizer_is_copied_whole(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "model.safetensors", "source.json", "config.json"):
        (source / name).write_text(name)
    (target / "config.json").write_text("new")
    replace = os.replace

    def killed(old, new):
        if os.path.basename(new) == "vocab.txt":
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        copy_tokenizer(source, target)
    assert not (target / "vocab.txt").exists() and not list(target.glob(".*"))
    monkeypatch.undo()
    copy_tokenizer(source, target)
    found = {path.name: path.read_text() for path in target.iterdir()}
    assert found == {
        "tokenizer.json": "tokenizer.json", "vocab.txt": "vocab.txt", "config.json": "new"
    }  # fmt: skip
