"""Several checkpoints of one training by the same pass: our runs and a Trainer's folders."""

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


def test_find_checkpoints_orders_and_stamps(tiny_run):
    found = find_checkpoints(tiny_run, ["8", "4", "4"])
    assert [saved.step for saved in found] == [4, 8]
    assert found[0].stamp == find_checkpoints(tiny_run)[0].stamp
    assert found[0].stamp != found[1].stamp
