"""`generate` and `eval --text` of folders in the layout of compressed-tensors."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from skipless.cli import main
from skipless.data.tokenizer import train_tokenizer
from skipless.errors import UserError
from skipless.export import export_folder
from skipless.quant import quantize
from skipless.serving import open_writer

LAYOUT = "compressed-tensors"


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8-w:channel-a:token", "W4Afp-w:g16"])
def test_a_run_in_that_layout_writes_and_is_measured(tiny_run, tmp_path, text_file, capsys, scheme):
    pytest.importorskip("compressed_tensors")
    folder = tmp_path / "out"
    export_folder(str(tiny_run), folder, scheme, layout=LAYOUT)
    assert main(["generate", str(folder), "--prompt", "the king", "--max-new-tokens", "5"]) == 0
    said = capsys.readouterr()
    what = "weights" if "Afp" in scheme else "weights and activations"
    assert f"{what} rounded by compressed-tensors" in said.err and "Decompress" not in said.err
    assert said.out.strip()
    words = ["generate", str(folder), "--prompt", "the king", "--kv-bits", "8", "--json"]
    assert main([*words, "--max-new-tokens", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "simulated"
    measured = []
    packed = tmp_path / "packed"
    export_folder(str(tiny_run), packed, scheme)
    for name in (folder, packed):
        words = ["eval", str(name), "--text", str(text_file), "--num-tokens", "256", "--json"]
        assert main(words) == 0
        measured.append(json.loads(capsys.readouterr().out)["held_out_loss"])
    loaded = open_writer(str(folder)).model  # the check whether it writes switched rounding off
    ids = torch.arange(2, 18)[None]
    with torch.no_grad():
        rounded = loaded(ids).logits
        for module in loaded.modules():
            module.quantization_enabled = False
        assert torch.equal(loaded(ids).logits, rounded) == ("Afp" in scheme)
    # ranges of activations are the package's own; weights are the same
    assert measured[0] == pytest.approx(measured[1], rel=1e-6 if "Afp" in scheme else 0.01)


def test_a_model_of_transformers_writes_what_it_computes(tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, vocab_size=300, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "plain")
    train_tokenizer(["the king said: come and go. " * 9], 300, tmp_path / "plain/tokenizer.json")
    export_folder(str(tmp_path / "plain"), tmp_path / "out", "W4Afp-w:g16", layout=LAYOUT)
    writer = open_writer(str(tmp_path / "out"))
    quantize(model, "W4Afp-w:g16")
    ids = torch.tensor([writer.encode("the king")])
    with torch.no_grad():
        assert torch.allclose(writer.model(ids).logits, model(ids).logits, atol=1e-5)
    assert writer.engine.startswith("weights rounded by compressed-tensors")
    assert main(["generate", str(tmp_path / "out"), "--prompt", "a", "--scheme", "W8A8"]) == 2
    assert "holds integers already; leave out --scheme" in capsys.readouterr().err


def test_a_range_of_all_tokens_is_no_look_ahead(tmp_path, monkeypatch):
    """The last of the tokens that are tried has the largest value, which all are rounded by."""
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=4, vocab_size=300)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.eye(32)[0]
    model.save_pretrained(tmp_path / "plain")
    train_tokenizer(["the king said: come and go. " * 9], 300, tmp_path / "plain/tokenizer.json")
    export_folder(str(tmp_path / "plain"), tmp_path / "out", "W8A8", layout=LAYOUT)
    assert "weights and activations" in open_writer(str(tmp_path / "out")).engine
    monkeypatch.setattr("skipless.serving.checking.rounded_by_others", lambda model: [])
    with pytest.raises(UserError, match="sees the token that it would have to predict"):
        open_writer(str(tmp_path / "out"))


def test_what_reads_it_is_named_where_it_is_refused(tiny_run, tmp_path, text_file, capsys, hidden):
    folder = str(tmp_path / "out")
    export_folder(str(tiny_run), folder, "W8A8", layout=LAYOUT)
    assert main(["diagnose", folder, "--text", str(text_file), "--out", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert f"`skipless generate {folder}` and `skipless eval {folder} --text FILE` read it" in error
    for words in (
        ["generate", folder, "--prompt", "a"],
        ["eval", folder, "--text", str(text_file)],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "compressed-tensors is not installed, without which" in error
        assert "install it with `pip install compressed-tensors" in error


@pytest.fixture
def hidden(monkeypatch):
    """As where the package is not installed."""
    import sys

    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
