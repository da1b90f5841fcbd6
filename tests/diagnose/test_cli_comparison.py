"""`skipless diagnose --against, --checkpoints, --over-time, --gradients`, and what they refuse."""

import csv
import json
import shutil

import pytest
import torch

from skipless.cli import main
from skipless.diagnose.checkpoints import find_checkpoints, measure_checkpoints
from skipless.errors import UserError
from skipless.evaluate import sequence_losses
from skipless.train import checkpoint_steps, load_run, load_step

FEW = ["--num-tokens", "128", "--schemes", "W8A8"]


@pytest.fixture(scope="module")
def changed(saved, tmp_path_factory):
    """The saved Llama with a channel of one MLP blown up."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(saved / "model", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3] *= 100
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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


def test_checkpoints_are_measured_and_drawn(tiny_run, tmp_path, capsys, cache):
    out = tmp_path / "out"
    words = ["diagnose", str(tiny_run), "--checkpoints", "all", "--gradients", *FEW]
    assert main([*words, "--out", str(out)]) == 0
    assert "at step 4" in capsys.readouterr().out
    found = json.loads((out / "over-time.json").read_text())
    steps = list(checkpoint_steps(tiny_run))
    assert steps == [4, 8]
    kurtosis = found["maps"]["kurtosis"]
    assert kurtosis["steps"] == steps
    assert {"token_sqnr W8A8", "gradient_norm", "gradient_norms", "rms"} <= found["maps"].keys()
    # the same numbers as a diagnosis of one checkpoint alone
    alone = ["diagnose", f"{tiny_run}/checkpoint/step-00000004", "--no-layers", *FEW]
    assert main([*alone, "--out", str(tmp_path / "alone")]) == 0
    rows = json.loads((tmp_path / "alone" / "diagnosis.json").read_text())["sites"]
    for key, of in (("kurtosis", lambda r: r["kurtosis"]),
                    ("token_sqnr W8A8", lambda r: r["token_sqnr"]["W8A8"])):  # fmt: skip
        data = found["maps"][key]
        mine = {place: line[0] for place, line in zip(data["places"], data["values"], strict=True)}
        assert mine == {row["site"]: of(row) for row in rows if of(row) is not None}
    assert [step for step, _ in found["losses"]["held_out_loss"]] == steps
    with open(out / "values.csv") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"4", "8"}
    assert (out / "index.html").exists() and not (out / "parts").exists()
    assert (out / "kurtosis.png").exists()


def test_a_trainers_checkpoints(saved, changed, tmp_path, capsys):
    folder = tmp_path / "training"
    shutil.copytree(saved / "model", folder / "checkpoint-10")
    shutil.copytree(changed, folder / "checkpoint-20")
    words = ["diagnose", str(folder), "--checkpoints", "10,20", "--text", str(saved / "text.txt")]
    assert main([*words, *FEW, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("model.layers.1.mlp" in line and "steps 10 and 20" in line for line in lines[:3])


def test_measured_checkpoints_equal_the_models(planted, ids):
    models = {1: planted(), 5: planted(heavy=40.0)}
    loaded = []

    def load(step):
        loaded.append(step)
        return models[step]

    found = measure_checkpoints(
        [(5, lambda: load(5)), (1, models[1])], ids, "W8A8", gradients=True,
        loss=lambda model, batch: model(batch).square().mean(),
    )  # fmt: skip
    assert loaded == [5] and found.steps == [1, 5]
    x = models[5].embedding(ids).detach().double()
    place = found.maps["rms"].places.index("embedding:output")
    assert found.maps["rms"].values[place][1] == pytest.approx(float(x.square().mean().sqrt()))
    assert "gradient_kurtosis" in found.maps
    with pytest.raises(UserError, match="at least two, each once"):
        measure_checkpoints([(1, models[1])], ids)
    with pytest.raises(UserError, match="no batch"):
        measure_checkpoints([(1, models[1]), (2, models[5])], [])


def test_an_interrupted_measurement_goes_on(planted, ids, tmp_path):
    calls = []

    def load(step):
        calls.append(step)
        if calls == [1, 2]:
            raise KeyboardInterrupt
        return planted(heavy=float(step))

    pairs = [(step, lambda step=step: load(step)) for step in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        measure_checkpoints(pairs, ids, out=tmp_path / "out")
    measure_checkpoints(pairs, ids, out=tmp_path / "out")
    assert calls == [1, 2, 2] and (tmp_path / "out" / "index.html").exists()


def test_a_step_is_loaded_as_it_was(tiny_run):
    early, late = load_step(tiny_run, 4), load_step(tiny_run, 8)
    assert (early.step, early.is_finished, late.is_finished) == (4, False, True)
    known = load_run(tiny_run).model.state_dict()
    assert all(map(torch.equal, late.model.state_dict().values(), known.values()))
    ids = torch.randint(300, (2, 16))
    assert sequence_losses(early.model, ids).nats != sequence_losses(late.model, ids).nats


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
        ([str(finished), "--against", str(finished), "--text", text], "run no text"),
        ([str(finished), "--text", text], "is a finished diagnosis; open"),
        ([model, "--against", other, "--over-time"], "--against and --over-time are both"),
        ([model, "--against", other, "--text", text, "--gradients"], "leave it out of --against"),
        ([run, "--over-time", "--no-layers"], "--no-layers belongs to one model"),
        ([run, "--over-time", "--text", text], "reads a log and no text"),
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


def test_find_checkpoints_orders_and_stamps(tiny_run):
    found = find_checkpoints(tiny_run, ["8", "4", "4"])
    assert [saved.step for saved in found] == [4, 8]
    assert found[0].stamp == find_checkpoints(tiny_run)[0].stamp
    assert found[0].stamp != found[1].stamp
