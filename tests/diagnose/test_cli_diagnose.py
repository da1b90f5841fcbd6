"""`skipless diagnose`: files, going on after an interruption, one sentence for what is wrong."""

import csv
import json
import math
import shutil

import pytest

from skipless.cli import main
from skipless.diagnose import sensitivity
from skipless.errors import UserError

FAST = ["--schemes", "W8A8,W4A4", "--num-tokens", "256", "--layer-tokens", "64"]


@pytest.fixture
def command(saved, tmp_path):
    return ["diagnose", str(saved / "model"), "--text", str(saved / "text.txt"),
            "--out", str(tmp_path / "out"), *FAST]  # fmt: skip


def test_a_report_is_written_whole(command, tmp_path, capsys):
    assert main(command) == 0
    shown = capsys.readouterr().out.strip().splitlines()
    numbered = [line for line in shown if line[2:4] == ". "]
    assert 6 <= len(numbered) <= 10 and "dB at W8A8" in numbered[0]
    # of a model of two layers, trained on nothing, no layer costs more than chance
    assert "layers alone at W8A8: none costs more than two standard errors" in "".join(numbered)
    out = tmp_path / "out"
    found = json.loads((out / "diagnosis.json").read_text())
    assert found["num_tokens"] == 256 and found["damage"]["kind"] == "loss"
    assert found["about"].startswith("256 tokens of")
    with open(out / "sites.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["sites"])
    for row, site in zip(rows, found["sites"], strict=True):
        assert row["site"] == site["site"]
        assert float(row["token_sqnr W4A4"]) == site["token_sqnr"]["W4A4"]
    assert {p.name for p in out.glob("*.png")} >= {"rounding.png", "layers.png", "tails.png"}
    assert (out / "index.html").stat().st_size > 20_000
    assert not (out / "parts").exists() and not list(out.glob(".*"))
    # it is not written over
    assert main(command) == 2
    assert "holds a finished report" in capsys.readouterr().err


def test_an_interrupted_diagnosis_goes_on(command, tmp_path, capsys, monkeypatch):
    out, count, real = tmp_path / "out", [], sensitivity.quantized

    def interrupted(model, *arguments, **options):
        count.append(options.get("layers"))
        if len(count) == 2:
            raise KeyboardInterrupt
        return real(model, *arguments, **options)

    monkeypatch.setattr(sensitivity, "quantized", interrupted)
    assert main(command) == 130
    assert "skipless: interrupted" in capsys.readouterr().err
    kept = json.loads((out / "parts" / "layers-W8A8.json").read_text())["value"]
    assert [row["layer"] for row in kept] == [0] and not (out / "index.html").exists()
    # another text is not mixed in
    other = [word if word != "256" else "128" for word in command]
    assert main(other) == 2
    assert "parts of a diagnosis of another model" in capsys.readouterr().err
    count[:] = [None, None, None]
    assert main([*command, "--json"]) == 0
    assert count[3] == [1], "layer 0 at W8A8 was measured before"
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [(r["scheme"], r["layer"]) for r in layers] == [
        ("W8A8", 0), ("W8A8", 1), ("W4A4", 0), ("W4A4", 1)
    ]  # fmt: skip


def test_a_run_directory_has_its_own_text(tiny_run, tmp_path, capsys, cache):
    out = tmp_path / "out"
    assert main(["diagnose", str(tiny_run), "--out", str(out), *FAST, "--no-layers"]) == 0
    assert "held-out text" in json.loads((out / "diagnosis.json").read_text())["about"]


def test_bad_input_is_one_sentence_and_exit_2(saved, tmp_path, capsys, tiny_run, cache):
    model, text, out = str(saved / "model"), str(saved / "text.txt"), str(tmp_path / "o")
    short = tmp_path / "short.txt"
    short.write_text("Go.")
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    dumb = tmp_path / "dumb"
    shutil.copytree(saved / "model", dumb)
    for file in dumb.glob("tokenizer*"):
        file.unlink()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("keep me")
    cases = [
        ([model, "--text", text], "--out is missing"),
        ([model, "--out", out], "there is no text"),
        ([model, "--text", text, "--data", "sotu", "--out", out], "both given"),
        ([model, "--text", "no.txt", "--out", out], "which does not exist"),
        ([model, "--text", str(short), "--out", out], "at least 16"),
        ([model, "--text", str(empty), "--out", out], "at least 16"),
        ([model, "--data", "stou", "--out", out], "sotu"),
        ([model, "--text", text, "--out", out, "--sequence-length", "64"], "takes 32 tokens"),
        ([model, "--text", text, "--out", out, "--schemes", "W8"], "does not say"),
        ([model, "--text", text, "--out", out, "--num-tokens", "0"], "--num-tokens is '0'"),
        ([model, "--text", text, "--out", str(taken)], "holds other files"),
        (
            [model, "--text", text, "--out", out, "--against", model, "--layer-tokens", "64"],
            "--layer-tokens belongs to one model alone",
        ),
        ([model, "--text", text, "--out", str(short)], "is a file"),
        ([str(dumb), "--text", text, "--out", out], "has no tokenizer"),
        (["smolm2-135m", "--text", text, "--out", out], "did you mean 'smollm2-135m'"),
        ([str(tmp_path), "--text", text, "--out", out], "cannot be loaded"),
    ]
    for words, said in cases:
        assert main(["diagnose", *words]) == 2, words
        error = capsys.readouterr().err.strip()
        last = error.splitlines()[-1]
        assert said in last and last.startswith("skipless: "), (words, error)
        assert "Traceback" not in error
    assert (taken / "mine.txt").read_text() == "keep me" and not (tmp_path / "o").exists()


def test_a_broken_weight_is_named(saved, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(saved / "model", broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    words = [str(broken), "--text", str(saved / "text.txt"), "--out", str(tmp_path / "o")]
    assert main(["diagnose", *words]) == 2
    assert "model.layers.1.mlp.up_proj.weight holds NaN" in capsys.readouterr().err


def test_a_vision_model_is_sent_to_images(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    text = tmp_path / "t.txt"
    text.write_text("words " * 100)
    words = [str(tmp_path / "vit"), "--text", str(text), "--out", str(tmp_path / "o")]
    assert main(["diagnose", *words]) == 2
    error = capsys.readouterr().err
    assert "takes pixel_values and no text; give --images" in error


def test_the_loss_of_an_encoder_is_refused(saved, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=280, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    for file in (saved / "model").glob("tokenizer*"):
        shutil.copy(file, folder)
    words = [str(folder), "--text", str(saved / "text.txt"), *FAST]
    assert main(["diagnose", *words, "--measure", "loss", "--out", str(tmp_path / "o")]) == 2
    assert "does not predict the next token" in capsys.readouterr().err
    assert main(["diagnose", *words, "--out", str(tmp_path / "p")]) == 0
    assert "relative distance of the outputs" in capsys.readouterr().out


def test_names_that_lead_nowhere_end_at_once(tmp_path, monkeypatch):
    """No retries of a hub that cannot be reached, and no hub for a path whose folder is here."""
    import socket

    from skipless.diagnose.loading import load_subject
    from skipless.pretrained.naming import check_named

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, said in (
        ("runs/nothing", "runs/nothing does not exist"),
        ("somebody/nothing", "somebody/nothing is no folder and not in the cache of the hub"),
        ("nothing", r"nothing is neither a folder nor a named model \(of a hub write OWNER/NAME\)"),
    ):
        for find in (load_subject, check_named):
            with pytest.raises(UserError, match=said):
                find(name)


def test_a_wrong_name_is_told_without_torch(tmp_path):
    """Whatever the machine: loading torch alone takes seconds on a busy one."""
    import subprocess
    import sys

    code = (
        "import sys; from skipless.cli import main; "
        "codes = [main(words.split()) for words in ('diagnose ./no --out out', 'doctor ./no', "
        "'diagnose no --against ./no --out out')]; print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[2, 2, 2] False", done.stderr
    assert done.stderr.count("does not exist") == 2


def test_a_long_reason_ends_at_a_sentence():
    from skipless.diagnose.loading import shortened

    assert shortened("Short. Reason.") == "Short. Reason."
    first = "The first sentence says most of what there is to say about it"
    assert shortened(f"{first}. {'word ' * 60}") == first
    cut = shortened("word " * 60)
    assert cut.endswith("word ...") and len(cut) <= 244


def test_a_missing_text_is_told_before_the_model_is_loaded(saved, tmp_path, capsys, monkeypatch):
    from skipless.diagnose import loading

    monkeypatch.setattr(loading, "load_subject", None)
    for name in (str(saved / "model"), "minilm-l6"):
        assert main(["diagnose", name, "--out", str(tmp_path / "out")]) == 2
        assert f"there is no text to run {name} on" in capsys.readouterr().err
