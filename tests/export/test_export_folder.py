"""`skipless export`: a run and a Hugging Face folder as folders of packed integers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from skipless.cli import main
from skipless.errors import UserError
from skipless.export import load_quantized
from skipless.quant import quantization, quantize
from skipless.train import load_run

IDS = torch.arange(2, 18)[None]


def test_a_run(tiny_run, tmp_path, capsys):
    out = tmp_path / "packed"
    words = ["export", str(tiny_run), "--scheme", "W4A8-w:channel", "--out", str(out), "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_bytes"] < said["full_bytes"] and said["path"] == str(out)
    model = load_run(tiny_run).model
    quantize(model, "W4A8-w:channel")
    loaded = load_quantized(out)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert torch.equal(loaded.generate(IDS, 4), model.generate(IDS, 4))
    assert (out / "tokenizer.json").is_file()
    assert main(words) == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["--scheme", "W8A8-static"], ["--scheme", "W4A8", "--method", "gptq"]]
)
def test_text_of_a_run_calibrates(tiny_run, tmp_path, capsys, more):
    out = tmp_path / "packed"
    assert main(["export", str(tiny_run), "--out", str(out), "--num-tokens", "256", *more]) == 0
    assert "load_quantized, or transformers after" in capsys.readouterr().out
    record = quantization(load_quantized(out))
    assert str(record.scheme) == more[1] and record.method == (more[3:] or ["rtn"])[0]


def test_a_hugging_face_folder(tmp_path, capsys):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, vocab_size=61)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "plain")
    words = ["export", str(tmp_path / "plain"), "--scheme", "W8A8-w:channel"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    quantize(model, "W8A8-w:channel")
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(load_quantized(tmp_path / "a")(IDS).logits, expected)
    out = str(tmp_path / "b")
    assert main([*words, "--format", "compressed-tensors", "--out", out]) == 0
    assert "transformers, with the package compressed-tensors, reads it" in capsys.readouterr().out
    assert main([*words, "--text", "x", "--out", str(tmp_path / "c")]) == 2
    assert "leave the text out" in capsys.readouterr().err


def test_convolutions_and_processor_of_a_model_of_images(tmp_path, capsys):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                  image_size=8, patch_size=4)
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path / "plain")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "plain")
    words = ["export", str(tmp_path / "plain"), "--scheme", "W4A8-w:channel"]
    out = tmp_path / "a"
    assert main([*words, "--include-convolutions", "--out", str(out)]) == 0
    assert "convolution vit" not in capsys.readouterr().out
    quantize(model, "W4A8-w:channel", include_convolutions=True)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(load_quantized(out)(x).logits, model(x).logits)
    assert (out / "preprocessor_config.json").is_file()
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    assert "convolution vit" in capsys.readouterr().out
    more = ["--include-convolutions", "--format", "compressed-tensors", "--out", str(out) + "c"]
    assert main([*words, *more]) == 2
    assert "without head and convolutions" in capsys.readouterr().err
    assert main([*words[:-1], "W8A8-static", "--out", str(tmp_path / "d")]) == 2
    assert "takes more than one text" in capsys.readouterr().err


def test_text_calibrates_an_encoder_too(tmp_path, capsys):
    """It predicts no next token, which calibration does not need."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, vocab_size=40,
                        num_attention_heads=2, max_position_embeddings=32)  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "plain")
    letters = {letter: number for number, letter in enumerate("_abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "plain" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the king said come and go my lord " * 200)
    words = ["export", str(tmp_path / "plain"), "--scheme", "W8A8-static", "--method", "gptq",
             "--text", str(tmp_path / "text.txt"), "--num-tokens", "128"]  # fmt: skip
    assert main([*words, "--out", str(tmp_path / "a")]) == 0, capsys.readouterr().err
    record = quantization(load_quantized(tmp_path / "a"))
    assert str(record.scheme) == "W8A8-static" and record.method == "gptq"


@pytest.mark.parametrize("layout", ["skipless", "compressed-tensors"])
def test_a_patched_folder_is_refused_by_name_and_its_fold_is_packed(layout, tmp_path, capsys):
    """What the refusal names works."""
    from skipless.surgery import patch

    settings = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = patch(LlamaForCausalLM(settings).eval(), "layerscale")
    patched, stock, out = (tmp_path / name for name in ("patched", "stock", "out"))
    model.save_pretrained(patched)
    words = ["--format", layout, "--scheme", "W8A8-w:channel-a:token", "--out", str(out)]
    assert main(["export", str(patched), *words]) == 2
    error = capsys.readouterr().err
    assert f"{patched} is a patched model" in error and not out.exists()
    assert f"`skipless fold {patched} --out FOLDER`" in error
    assert main(["fold", str(patched), "--out", str(stock)]) == 0
    assert main(["export", str(stock), *words]) == 0 and out.exists()


def test_another_process_was_faster(tiny_run, tmp_path, monkeypatch):
    """Both looked before either wrote: the first folder stays."""
    from skipless.export import export_folder, folders

    def compare(*_):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text(packed)
        return 0.0

    packed = json.dumps({"quantization_config": {"quant_method": "skipless"}})
    monkeypatch.setattr(folders, "_difference", compare)
    with pytest.raises(UserError, match="out exists already; name a folder that does not"):
        export_folder(str(tiny_run), tmp_path / "out", "W8A8")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["config.json"]
