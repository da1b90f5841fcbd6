"""`skipless diagnose --against, --checkpoints, --over-time, --gradients`, and what they refuse."""

import json
import shutil

import pytest

from skipless.cli import main
from skipless.train import load_run, load_step

FEW = ["--num-tokens", "128", "--schemes", "W8A8"]


def test_two_models_and_then_their_diagnoses(saved, changed, tmp_path, capsys):
    a, b, text = str(saved / "model"), str(changed), str(saved / "text.txt")
    out = tmp_path / "out"
    words = ["diagnose", a, "--against", b, "--text", text, *FEW]
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(" 1. outputs: loss") and "gained channel 3" in shown
    found = json.loads((out / "comparison.json").read_text())
    assert found["about"].startswith("128 tokens of") and found["a"] == a
    assert main([*words, "--out", str(out)]) == 2, "it is not written over"
    slow = tmp_path / "slow"  # a block of weights at a time: the same numbers
    assert main([*words, "--layer-by-layer", "--out", str(slow)]) == 0
    assert json.loads((slow / "comparison.json").read_text()) == found
    capsys.readouterr()
    for name, model in (("a", a), ("b", b)):
        alone = ["diagnose", model, "--text", text, *FEW, "--no-layers"]
        assert main([*alone, "--out", str(tmp_path / name)]) == 0
    pair = ["diagnose", str(tmp_path / "a"), "--against", str(tmp_path / "b")]
    capsys.readouterr()
    assert main([*pair, "--out", str(tmp_path / "of-folders"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["sites"] == found["sites"] and again["outputs"] is None


def test_a_checkpoint_against_its_run(tiny_run, tmp_path, capsys, cache):
    early = f"{tiny_run}/checkpoint/step-4"
    out = str(tmp_path / "out")
    assert main(["diagnose", early, "--against", str(tiny_run), *FEW, "--out", out]) == 0
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["about"].endswith("held-out text") and found["outputs"]["loss_change"] != 0
    assert all(row["distance"] is not None for row in found["weights"])
    last = load_run(tiny_run)
    early = load_step(tiny_run, 4)
    theirs = dict(last.model.named_parameters())
    for row, (name, p) in zip(found["weights"], early.model.named_parameters(), strict=True):
        expected = ((theirs[name] - p).norm() / p.norm()).item()
        assert row["distance"] == pytest.approx(expected, rel=1e-5)


def test_the_log_of_a_run(tiny_run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["diagnose", str(tiny_run), "--over-time", "--out", str(out)]) == 0
    assert " 1. " in capsys.readouterr().out
    found = json.loads((out / "over-time.json").read_text())
    rows = [json.loads(line) for line in (tiny_run / "probes.jsonl").read_text().splitlines()]
    data = found["maps"]["kurtosis"]
    assert data["steps"] == [row["step"] for row in rows]
    for place, line in zip(data["places"], data["values"], strict=True):
        logged = [s["kurtosis"] for row in rows for s in row["sites"] if s["site"] == place]
        assert line == logged


def test_gradients_of_one_model(saved, tmp_path, capsys):
    words = ["diagnose", str(saved / "model"), "--text", str(saved / "text.txt"), *FEW]
    out = tmp_path / "out"
    assert main([*words, "--no-layers", "--gradients", "--out", str(out)]) == 0
    assert "gradients of the next-token loss" in capsys.readouterr().out
    assert (out / "gradients.png").exists() and (out / "gradients.csv").exists()


def test_what_is_refused(saved, changed, tiny_run, copy_run, tmp_path, capsys, cache):
    model, other, text = str(saved / "model"), str(changed), str(saved / "text.txt")
    cut = tmp_path / "cut"  # another tokenizer
    shutil.copytree(saved / "model", cut)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(cut)
    tokenizer.add_tokens(["king said"])
    tokenizer.save_pretrained(cut)
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "diagnosis.json").write_text("{}")
    bare = copy_run(tmp_path / "bare")
    (bare / "probes.jsonl").unlink()
    once = copy_run(tmp_path / "once")
    shutil.rmtree(once / "checkpoint")
    broken = copy_run(tmp_path / "broken")
    for file in (broken / "checkpoint" / "step-00000004").glob("__*"):
        file.write_bytes(b"no")
    run = str(tiny_run)
    cases = [
        ([model, "--against", str(cut), "--text", text], "into different tokens, first at"),
        ([model, "--against", other], "there is no text that all these models"),
        ([model, "--against", run, "--text", text], "different tokens"),
        ([model, "--against", str(finished)], f"{finished} is a finished diagnosis and {model}"),
        ([str(finished), "--against", str(finished)], "no diagnosis of this version"),
        ([str(finished), "--against", str(finished), "--text", text], "run no model"),
        ([str(finished), "--text", text], "is a finished diagnosis; open"),
        ([model, "--against", other, "--over-time"], "--against and --over-time are both"),
        ([model, "--against", other, "--text", text, "--gradients"], "leave it out of --against"),
        ([run, "--over-time", "--no-layers"], "--no-layers belongs to one model"),
        ([run, "--over-time", "--text", text], "reads a log and runs no model"),
        ([str(bare), "--over-time"], "trained without probes"),
        ([str(tmp_path / "nowhere"), "--over-time"], "does not exist"),
        ([run, "--checkpoints", "4", "5"], "keeps no checkpoint of step 5; it keeps steps 4, 8"),
        ([run, "--checkpoints", "last"], "give steps, such as 100,200, or all"),
        ([str(once), "--checkpoints", "all"], "has one checkpoint to measure (step 8)"),
        ([model, "--checkpoints", "all"], "keeps no checkpoints"),
        ([f"{run}/checkpoint/step-6", "--against", run], "no checkpoint of step 6"),
        ([f"{broken}/checkpoint/step-4", "--against", run], "cannot be used"),
    ]
    for words, said in cases:
        assert main(["diagnose", *words, *FEW, "--out", str(tmp_path / "o")]) == 2, words
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in last and last.startswith("skipless: "), (words, last)
    assert not (tmp_path / "o").exists()


def test_a_model_without_a_tokenizer_takes_the_others(saved, changed, tmp_path, capsys):
    dumb = tmp_path / "dumb"
    shutil.copytree(changed, dumb)
    for file in dumb.glob("tokenizer*"):
        file.unlink()
    words = ["diagnose", str(saved / "model"), "--against", str(dumb), "--text",
             str(saved / "text.txt"), *FEW]  # fmt: skip
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert "gained channel 3" in capsys.readouterr().out
