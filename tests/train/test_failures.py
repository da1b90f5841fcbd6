"""Failures end in one sentence and leave what was there: full disk, NaN, two runs in one place."""

import errno
import json
import math
import resource

import pytest
import torch
import torch.distributed.checkpoint as dcp

from skipless.errors import UserError
from skipless.model import Transformer
from skipless.rundir import RunDir
from skipless.train import load_run, loop, train
from skipless.train.checkpoint import found


def assert_one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 600, text


def test_full_disk_at_a_checkpoint(tiny, data, tmp_path, monkeypatch):
    path, original = tmp_path / "run", dcp.FileSystemWriter.write_data

    def full(self, *args, **kwargs):
        if "00000006" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(UserError, match="step-00000006: No space left.*untouched") as error:
        train(tiny, path, data=data)
    assert_one_sentence(error)
    assert [p.name for p in (path / "checkpoint").iterdir()] == ["step-00000003"]
    assert load_run(path).step == 3
    monkeypatch.undo()
    assert train(tiny, path, data=data).step == 8


def test_full_disk_for_real_by_a_file_size_limit(tiny, data, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(UserError, match="cannot write checkpoint .*: File too large;") as error:
            train(tiny, tmp_path / "run", data=data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_one_sentence(error)
    assert not list((tmp_path / "run" / "checkpoint").iterdir())
    assert train(tiny, tmp_path / "run", data=data).step == 8


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_full_disk_while_a_checkpoint_is_completed(tiny, data, tmp_path, monkeypatch, name):
    from skipless.train import checkpoint

    original = checkpoint.write_atomic

    def full(path, content):
        if path.name == name and "00000006" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, content)

    monkeypatch.setattr(checkpoint, "write_atomic", full)
    with pytest.raises(UserError, match="No space left"):
        train(tiny, tmp_path / "run", data=data)
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-00000003"]


def test_other_settings_in_the_same_directory(tiny, data, tmp_path):
    train(tiny, tmp_path / "run", data=data)
    with pytest.raises(UserError, match="optim.lr is 0.01 there and 0.02 here"):
        train(tiny.replace(optim={"lr": 2e-2}), tmp_path / "run", data=data)
    assert load_run(tmp_path / "run").step == 8


def test_two_processes_in_one_directory(tiny, data, tmp_path):
    held = RunDir.create(tmp_path / "run", tiny).lock()
    with held, pytest.raises(UserError, match="in use by another process"):
        train(tiny, tmp_path / "run", data=data)
    assert train(tiny, tmp_path / "run", data=data).step == 8


def poison(monkeypatch, act):
    """Call `act(model, number)` before every training-mode forward pass, counted from 1."""

    class Poisoned(Transformer):
        def forward(self, *args, **kwargs):
            if self.training:
                self.passes = getattr(self, "passes", 0) + 1
                act(self, self.passes)
            return super().forward(*args, **kwargs)

    monkeypatch.setattr(loop, "Transformer", Poisoned)


def spoil_output(model, number):
    if number == 5:
        model.layers[1].mlp.up_proj.register_forward_hook(lambda m, i, out: out * math.nan)


def spoil_parameter(model, number):
    if number == 5:
        with torch.no_grad():
            model.layers[0].self_attn.v_proj.weight[0, 0] = math.inf


def spoil_gradient(model, number):
    if number == 5:
        weight = model.layers[1].mlp.down_proj.weight
        weight.register_hook(lambda gradient: gradient / 0)


@pytest.mark.parametrize(
    ("act", "kind", "first"),
    [
        (spoil_output, "activation", "layers.1.mlp.up_proj"),
        (spoil_parameter, "parameter", "layers.0.self_attn.v_proj.weight"),
        (spoil_gradient, "gradient", "layers.1.mlp.down_proj.weight"),
    ],
)
def test_non_finite_numbers_stop_the_run_with_a_diagnosis(
    tiny, data, tmp_path, monkeypatch, act, kind, first
):
    path = tmp_path / "run"
    poison(monkeypatch, act)
    with pytest.raises(UserError, match=f"step 5 .*{first}.*diagnosis.json") as error:
        train(tiny, path, data=data)
    assert_one_sentence(error)
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    assert (diagnosis["step"], diagnosis["kind"], diagnosis["first"]) == (5, kind, first)
    assert [p.name for p in found(path / "checkpoint")] == ["step-00000003"]
    assert not (path / "model.safetensors").exists()
    losses = [r["loss"] for r in RunDir(path).read_jsonl("metrics.jsonl") if "loss" in r]
    assert len(losses) == 4 and all(math.isfinite(v) for v in losses)
    # Resumed from the intact checkpoint without the fault, it ends as if nothing had happened.
    monkeypatch.undo()
    resumed = train(tiny, path, data=data)
    assert resumed.held_out_loss == train(tiny, tmp_path / "clean", data=data).held_out_loss


def test_a_rate_that_explodes_is_diagnosed(tiny, data, tmp_path):
    wild = tiny.replace(
        optim={"lr": 1e30, "weight_decay": 0.0}, train={"warmup_steps": 0, "max_grad_norm": None}
    )
    with pytest.raises(UserError, match="lower optim.lr"):
        train(wild, tmp_path / "run", data=data)
    assert (tmp_path / "run" / "diagnosis.json").exists()


def test_bad_settings(tiny, data, tmp_path):
    with pytest.raises(UserError, match="micro_batch_size is 0"):
        tiny.replace(train={"micro_batch_size": 0})
    with pytest.raises(UserError, match="train.device is 'tpu9'"):
        train(tiny.replace(train={"device": "tpu9"}), tmp_path / "run", data=data)


def test_uneven_share_of_a_batch(tiny, data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="batch_size 4 does not divide over 3 processes"):
        train(tiny, tmp_path / "run", data=data)
