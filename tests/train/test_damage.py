"""Files of a run that were damaged, edited or left over: made anew, or refused in one sentence."""

import dataclasses
import json
import math
import shutil

import pytest
import torch

from skipless.data import PreparedData, prepare
from skipless.errors import UserError
from skipless.rundir import RunDir
from skipless.train import load_run, train
from skipless.train.checkpoint import found


@pytest.fixture(scope="module")
def whole(tiny, data, tmp_path_factory):
    """A finished run; copy it before changing it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(tiny, path, data=data)
    return path


@pytest.fixture
def run(whole, tmp_path):
    return RunDir(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def stopped(tiny, data, tmp_path):
    """A run that ended after step 3, with a checkpoint."""

    def stop(info):
        if info["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny.replace(train={"checkpoint_every": 1}), tmp_path / "stopped", data=data,
              on_step=stop)  # fmt: skip
    return RunDir(tmp_path / "stopped")


def one_sentence(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- a finished run -------------------------------------------------------------------------------

DAMAGE = {
    "truncated": lambda run: (run / "model.safetensors").write_bytes(
        (run / "model.safetensors").read_bytes()[:-50]
    ),
    "missing": lambda run: (run / "model.safetensors").unlink(),
    "list": lambda run: (run / "train.json").write_text("[1]"),
    "number": lambda run: (run / "train.json").write_text("3"),
    "text": lambda run: (run / "train.json").write_text('"a"'),
    "half": lambda run: (run / "train.json").write_text('{"step": 1}'),
    "not UTF-8": lambda run: (run / "train.json").write_bytes(b"\xff"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_end_is_made_again_from_the_last_checkpoint(run, whole, tiny, data, how, capfd):
    wanted = load_run(whole).model.state_dict()
    DAMAGE[how](run)
    loaded = load_run(run.path)
    assert "last checkpoint instead" in " ".join(capfd.readouterr().err.split())
    assert loaded.step == 8
    assert all(torch.equal(wanted[k], v) for k, v in loaded.model.state_dict().items())
    steps = []
    result = train(tiny, run.path, data=data, on_step=lambda info: steps.append(info["step"]))
    assert steps == []
    assert result.held_out_loss == RunDir(whole).read_json("train.json")["held_out_loss"]
    assert load_run(run.path).is_finished


@pytest.mark.parametrize("how", ["truncated", "list"])
def test_without_a_checkpoint_a_damaged_end_is_refused(run, tiny, data, how):
    shutil.rmtree(run / "checkpoint")
    DAMAGE[how](run)
    for act in (lambda: train(tiny, run.path, data=data), lambda: load_run(run.path)):
        with pytest.raises(UserError, match="no checkpoint is left.*--fresh") as error:
            act()
        one_sentence(error)


def test_edited_settings_that_do_not_fit_the_weights(run):
    shutil.rmtree(run / "checkpoint")
    settings = json.loads((run / "config.json").read_text())
    settings["model"]["hidden_size"] = 64
    (run / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="does not fit its config.json: .* shape .*64"):
        load_run(run.path)


# --- the text -------------------------------------------------------------------------------------


def other_text(data, tmp_path, tiny) -> PreparedData:
    (tmp_path / "other.txt").write_text("\n\n".join("no more of this my lord " * 60 for _ in "abc"))
    settings = dataclasses.replace(tiny.data, sources=(str(tmp_path / "other.txt"),))
    settings = dataclasses.replace(settings, held_out_fraction=0.3)
    return prepare(settings, 280, cache_dir=tmp_path / "cache")


def test_resuming_on_other_text_is_refused(stopped, tiny, data, tmp_path):
    config = stopped.config()
    with pytest.raises(UserError, match="trained on other text.*--fresh") as error:
        train(config, stopped.path, data=other_text(data, tmp_path, tiny))
    one_sentence(error)
    assert train(config, stopped.path, data=data).step == 8


def test_a_resumed_run_opens_the_text_it_noted(stopped, data, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("prepared again")

    monkeypatch.setattr("skipless.train.training.prepare", never)
    monkeypatch.setattr("skipless.train.load.prepare", never)
    assert train(stopped.config(), stopped.path).step == 8


@pytest.mark.parametrize("directory", ["", "/nowhere/at/all", "/tmp"])
def test_a_noted_folder_that_is_none_means_prepare_again(stopped, data, tmp_path, monkeypatch,
                                                         directory, tiny):  # fmt: skip
    note = stopped.read_json("data.json")
    stopped.write_json("data.json", {**note, "directory": directory})
    monkeypatch.setattr("skipless.train.load.prepare", lambda *a: data)
    assert load_run(stopped.path).data is data
    monkeypatch.setattr("skipless.train.load.prepare", lambda *a: other_text(data, tmp_path, tiny))
    with pytest.raises(UserError, match="other text"):
        _ = load_run(stopped.path).data


@pytest.mark.parametrize("note", ["[1]", '{"directory": 3}', '{"sha256": 1}', "{"])
def test_a_damaged_note_of_the_text(stopped, note, data):
    (stopped / "data.json").write_text(note)
    for act in (lambda: load_run(stopped.path).data, lambda: train(stopped.config(), stopped.path)):
        with pytest.raises(UserError, match=r"data.json.* delete") as error:
            act()
        one_sentence(error)


# --- logs and checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["[1]", '{"loss": 1}', '{"step": "x"}'])
def test_a_log_with_a_foreign_line_is_not_cut(stopped, data, row):
    log = stopped / "metrics.jsonl"
    text = row + "\n" + log.read_text()
    log.write_text(text)
    with pytest.raises(UserError, match=r"line") as error:
        train(stopped.config(), stopped.path, data=data)
    one_sentence(error)
    assert log.read_text() == text


SPOIL = {
    "manifest list": ("manifest.json", "[]"),
    "manifest entry": ("manifest.json", '{"a": 1}'),
    "manifest empty": ("manifest.json", "{}"),
    "manifest deep": ("manifest.json", "[" * 100_000),
    "state list": ("state.json", "[]"),
    "state empty": ("state.json", "{}"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_spoiled_json_of_a_checkpoint_falls_back(stopped, how, capfd):
    newest, before = found(stopped / "checkpoint")
    name, text = SPOIL[how]
    (newest / name).write_text(text)
    if name == "state.json":  # with a manifest that fits it
        from skipless.train.manifest import checksums

        sums = json.loads((newest / "manifest.json").read_text())
        sums |= checksums([newest / name])
        (newest / "manifest.json").write_text(json.dumps(sums))
    assert load_run(stopped.path).step == int(before.name[-1])
    assert "cannot be used" in " ".join(capfd.readouterr().err.split())


def test_a_file_in_place_of_a_checkpoint_is_passed_over_and_replaced(stopped, data):
    (stopped / "checkpoint" / "step-00000004").write_text("x")
    assert train(stopped.config(), stopped.path, data=data).step == 8
    assert all(p.is_dir() for p in found(stopped / "checkpoint"))


# --- numbers that are none ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_diverged_run_never_counts_as_finished(tiny, data, tmp_path, name):
    wild = tiny.replace(
        optim={"name": name, "lr": 1e38, "adamw_lr": 1e38, "weight_decay": 0.0},
        train={"num_tokens": 64, "warmup_steps": 0, "max_grad_norm": None},
    )
    for _ in range(2):  # the same command again says the same
        with pytest.raises(UserError, match="step 1 has .*no checkpoint yet.*lower optim.lr") as e:
            train(wild, tmp_path / "run", data=data)
        one_sentence(e)
    assert not (tmp_path / "run" / "train.json").exists()
    assert not found(tmp_path / "run" / "checkpoint")
    # Nothing was learned, so a corrected command may have the directory.
    mild = wild.replace(optim={"lr": 1e-3, "adamw_lr": None})
    assert math.isfinite(train(mild, tmp_path / "run", data=data).held_out_loss)


def test_a_held_out_loss_that_is_no_number_is_a_failure(tiny, data, tmp_path, monkeypatch):
    monkeypatch.setattr("skipless.train.loop.held_out_loss", lambda *a, **k: math.nan)
    with pytest.raises(UserError, match="step 2 has held-out loss nan: .*diagnosis.json"):
        train(tiny, tmp_path / "run", data=data)
    assert not (tmp_path / "run" / "train.json").exists()


# --- the directory --------------------------------------------------------------------------------


def test_a_wrong_setting_claims_no_directory_and_costs_no_former_run(run, tiny, data, tmp_path):
    before = sorted(p.name for p in run.path.iterdir())
    wrong = tiny.replace(data={"sources": ("no/such/text",)})
    for path, fresh in ((tmp_path / "new", False), (run.path, True)):
        with pytest.raises(UserError, match="no/such/text"):
            train(wrong, path, fresh=fresh)
        with pytest.raises(UserError, match="ids up to 279 but the model's vocab_size is 279"):
            train(tiny.replace(model={"vocab_size": 279}), path, data=data, fresh=fresh)
    assert not (tmp_path / "new").exists()
    assert sorted(p.name for p in run.path.iterdir()) == before


def test_measurements_of_earlier_weights_go_when_training_ends(stopped, data):
    for name in ("eval.json", "quant.json"):
        stopped.write_json(name, {"measured": {"step": 3}, "held_out_loss": 9.0})
    stopped.write_json("samples.json", {"measured": {"step": 8}, "greedy": "x"})
    train(stopped.config(), stopped.path, data=data)
    assert not (stopped / "eval.json").exists() and not (stopped / "quant.json").exists()
    assert stopped.read_json("samples.json")["greedy"] == "x"
