"""`skipless export --format`: which options belong to which format, ONNX of runs and folders."""

from __future__ import annotations

import json

import pytest
import torch

from skipless.cli import main
from skipless.cli.exporting import OPTIONS
from skipless.export import FORMATS, export_folder, load_quantized, open_session, quantized
from skipless.probes import sqnr
from skipless.train import load_run

IDS = torch.arange(2, 18)[None]


def test_options_name_formats_that_exist():
    assert all(set(formats) <= set(FORMATS) for formats in OPTIONS.values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cached"], "--cached is not for --format skipless, but for onnx"),
        (["--format", "onnx", "--cached", "--out", "a"], "a folder holds both"),
        (["--format", "onnx", "--dtype", "f16"], "--dtype is not for --format onnx"),
        (["--format", "llama", "--scheme", "W8A8"], "--scheme is not for --format llama"),
        (["--format", "gguf", "--text", "x"], "--text is not for --format gguf"),
        (["--format", "gguf", "--out", "a.bin"], "does not end in .gguf"),
        (["--format", "onnx"], "--out is missing"),
        (["--format", "onnx", "--scope", "block", "--out", "a.onnx"], "--scope rounds nothing"),
        (["--num-tokens", "0", "--out", "a"], "--num-tokens is '0'"),
        (["--format", "hf", "--num-tokens", "9"], "--num-tokens is not for --format hf"),
    ],
)
def test_misuse_is_told_before_anything_is_read(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", "no-such-run", *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_packed_folders_are_read_back(tiny_run, tmp_path, capsys, monkeypatch):
    for layout in ("skipless", "compressed-tensors"):
        out = str(tmp_path / layout)
        assert main(["export", str(tiny_run), "--format", layout, "--out", out, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["difference"] == 0
    save = quantized.saved_form

    def spoiled(model, form):
        tensors, settings = save(model, form)
        name = next(n for n in tensors if n.endswith("weight_scale"))
        return tensors | {name: 1.01 * tensors[name]}, settings

    monkeypatch.setattr(quantized, "saved_form", spoiled)
    for layout in ("skipless", "compressed-tensors"):
        out = tmp_path / f"{layout}-spoiled"
        assert main(["export", str(tiny_run), "--format", layout, "--out", str(out)]) == 2
        assert "what was read back from" in capsys.readouterr().err and not out.exists()


def test_a_run_as_onnx(tiny_run, tmp_path, capsys):
    pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
    pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
    folder, file = tmp_path / "folder", tmp_path / "a.onnx"
    assert main(["export", str(tiny_run), "--format", "onnx", "--out", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "model_cached.onnx  run by ONNX Runtime and compared with our model" in said
    assert "open_session" in said and "up to 32 tokens, past ones included" in said
    names = {entry.name for entry in folder.iterdir()}
    assert names == {
        "model.onnx",
        "model_cached.onnx",
        "weights.bin",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    words = ["export", str(tiny_run), "--format", "onnx", "--scheme", "W8A12-static"]
    assert main([*words, "--num-tokens", "256", "--out", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["files"]["a.onnx"]
    assert abs(found["sqnr_file"] - found["sqnr_simulated"]) < 0.1
    model = load_run(tiny_run).model
    mask = torch.ones_like(IDS)
    feed = {"input_ids": IDS.numpy(), "attention_mask": mask.numpy()}
    with torch.no_grad():
        exact = model(IDS).logits
    whole = open_session(folder / "model.onnx").run(["logits"], feed)[0]
    assert float(sqnr(exact, torch.from_numpy(whole))) > 100
    # a packed folder gives the same file as the run it was made of
    export_folder(str(tiny_run), tmp_path / "packed", "W8A12-static", num_tokens=256)
    again = tmp_path / "b.onnx"
    packed = str(tmp_path / "packed")
    assert main(["export", packed, "--format", "onnx", "--out", str(again)]) == 0
    outputs = [open_session(path).run(["logits"], feed)[0] for path in (file, again)]
    assert (outputs[0] == outputs[1]).all()
    with torch.no_grad():
        simulated = load_quantized(packed)(IDS).logits
    assert float(sqnr(simulated, torch.from_numpy(outputs[0]))) > 60
    assert main(["export", packed, "--format", "onnx", "--scheme", "W8A8", "--out", "c"]) == 2
    assert "is quantised already" in capsys.readouterr().err


def test_onnx_of_a_foreign_model_is_refused(tmp_path, capsys):
    pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
    pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    words = ["export", str(tmp_path / "llama"), "--format", "onnx", "--out", str(tmp_path / "o")]
    assert main(words) == 2
    assert "a model of transformers" in capsys.readouterr().err
