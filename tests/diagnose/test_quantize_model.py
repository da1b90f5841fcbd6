"""`skipless quantize MODEL`: a Hugging Face folder on a text, method by method."""

from __future__ import annotations

import json

import pytest
import torch

from skipless.cli import main


def test_a_folder_is_measured_on_the_second_half_of_a_text(saved, capsys):
    words = ["quantize", str(saved / "model"), "--text", str(saved / "text.txt"),
             "--num-tokens", "128", "--schemes", "W3Afp-w:channel"]  # fmt: skip
    assert main([*words, "--methods", "gptq", "stream", "--json"]) in (0, None)
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["rtn", "gptq", "stream"]
    assert all(row["unit"] == "nats a token" and row["increase"] is not None for row in rows)
    assert main([*words, "--override", "*layers.0.*=fp"]) in (0, None)
    out = capsys.readouterr().out
    assert "in nats a token, by method" in out and "W3Afp-w:channel *layers.0.*=fp" in out


def test_by_layer_and_all_but_one(saved, capsys):
    words = ["quantize", str(saved / "model"), "--text", str(saved / "text.txt"), "--num-tokens",
             "64", "--schemes", "W8A8", "W3A4", "--by-layer", "--all-but-one"]  # fmt: skip
    assert main([*words, "--json"]) in (0, None)
    found = json.loads(capsys.readouterr().out)
    alone, but_one = found["sensitivity"]["rows"], found["sensitivity"]["all_but_one"]
    assert found["sensitivity"]["scheme"] == "W3A4" and len(found["rows"]) == 2
    assert [row["layer"] for row in alone] == [row["layer"] for row in but_one] != []
    everything = next(row["increase"] for row in found["rows"] if row["scheme"] == "W3A4")
    total = but_one[0]["increase"] + but_one[0]["recovered"]
    assert total == pytest.approx(everything, abs=1e-3)
    assert main(words) in (0, None)
    out = capsys.readouterr().out
    assert "paired standard errors up to 0." in out
    assert "one layer alone at W3A4" in out and "one layer in full precision takes off" in out


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--methods", "gtpq"], "did you mean 'gptq'"),
        (["--override", "nothing=fp"], "matches nothing"),
        (["--schemes", "W99A8"], "W99A8"),
    ],
)
def test_mistakes(saved, capsys, extra, says):
    words = ["quantize", str(saved / "model"), "--text", str(saved / "text.txt"),
             "--num-tokens", "64"]  # fmt: skip
    assert main([*words, *extra]) == 2
    assert says in capsys.readouterr().err


def test_a_model_needs_a_text(saved, capsys):
    assert main(["quantize", str(saved / "model")]) == 2
    assert "is no run" in (err := capsys.readouterr().err) and "--text FILE" in err


def test_text_is_not_for_runs(saved, tiny_run, capsys):
    assert main(["quantize", str(tiny_run), "--text", str(saved / "text.txt")]) == 2
    assert "leave out --text" in capsys.readouterr().err


def test_a_scheme_is_suggested_for_a_folder(saved, capsys):
    words = ["quantize", str(saved / "model"), "--text", str(saved / "text.txt"),
             "--num-tokens", "64", "--suggest", "W2A8", "W8A8"]  # fmt: skip
    assert main([*words, "--max-bits", "6", "--json"]) in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["met"] and found["weight_bits"] <= 6 and found["scheme"].startswith("W2A8")
    assert main(["quantize", str(saved / "model"), "--suggest", "W2A8", "W8A8"]) == 2
    assert "give --text FILE" in capsys.readouterr().err
    assert main([*words, "--include-convolutions"]) == 2
    assert "takes no --include-convolutions" in capsys.readouterr().err


def test_a_name_of_the_catalog_needs_a_text(capsys):
    """It was taken for a run directory, which it is not."""
    for more in ([], ["--suggest", "W4A8", "W8A8"]):
        assert main(["quantize", "smollm2-135m", *more]) == 2
        err = capsys.readouterr().err
        assert "smollm2-135m is no run" in err and "--data NAME" in err


@pytest.fixture
def vit(tmp_path):
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    size = {"height": 8, "width": 8}
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size=size).save_pretrained(tmp_path / "vit")
    (tmp_path / "pictures").mkdir()
    pixels = torch.randint(256, (5, 8, 8, 3), generator=torch.Generator().manual_seed(0))
    for number, one in enumerate(pixels.to(torch.uint8).numpy()):
        image.fromarray(one).save(tmp_path / "pictures" / f"{number}.png")
    return [str(tmp_path / "vit"), "--images", str(tmp_path / "pictures")]


def test_convolutions_of_a_model_of_images(vit, capsys):
    words = ["quantize", *vit, "--schemes", "W8A8-static", "--json"]
    found = []
    for more in ([], ["--include-convolutions"], ["--override", "*projection=fp"]):
        if more[:1] == ["--override"]:
            more = ["--include-convolutions", *more]
        assert main([*words, *more]) in (0, None)
        (row,) = json.loads(capsys.readouterr().out)
        found.append(row["increase"])
    without, with_, left_out = found
    assert with_ > without > 0 and left_out == without  # the one convolution, rounded or not
    assert main(["quantize", *vit, "--suggest", "W4A8", "W8A8"]) == 2
    assert "does not predict the next token" in capsys.readouterr().err
    one = ["quantize", vit[0], "--images", vit[2] + "/0.png"]
    assert main([*one, "--schemes", "W8A8-static"]) == 2
    assert "there is one image" in capsys.readouterr().err
    assert main(one) in (0, None), "nothing is calibrated"
    assert main(["quantize", *vit, "--by-layer"]) == 2
    assert "does not predict the next token, whose loss --by-layer" in capsys.readouterr().err
    assert main(["quantize", *vit, "--num-tokens", "64"]) == 2
    assert "belongs to models of text" in capsys.readouterr().err


def test_a_run_has_no_convolutions(tiny_run, capsys):
    assert main(["quantize", str(tiny_run), "--include-convolutions"]) == 2
    assert "has no convolutions" in capsys.readouterr().err
