"""A run that was interrupted anywhere and resumed equals one that was not, bit for bit."""

import os
import signal
import warnings

import pytest
import torch
from safetensors.torch import load_file

from skipless.config import ConnectionConfig, InitConfig
from skipless.errors import UserError
from skipless.rundir import RunDir
from skipless.train import load_run, loop, train
from skipless.train.checkpoint import found

NUM_STEPS = 8


def record(path):
    """All that must be equal: rows without timings, weights, the last checkpoint's tensors."""
    run = RunDir(path)
    metrics = [
        {k: v for k, v in row.items() if k != "seconds"} for row in run.read_jsonl("metrics.jsonl")
    ]
    probes = [*run.read_jsonl("probes.jsonl"), run.read_json("probe.json")]
    return metrics, probes, load_file(path / "model.safetensors"), optimizer_tensors(path)


def optimizer_tensors(path):
    import torch.distributed.checkpoint as dcp

    newest = found(path / "checkpoint")[0]
    stored = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    tensors = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is uninitialized": one process
        dcp.load(tensors, checkpoint_id=newest, no_dist=True)
    return tensors


def assert_equal(left, right):
    for a, b in zip(left[:2], right[:2], strict=True):
        assert a == b
    for a, b in zip(left[2:], right[2:], strict=True):
        assert a.keys() == b.keys() and len(a) > 10
        for name in a:
            assert torch.equal(a[name], b[name]), name


def interrupt_at(step, number=signal.SIGINT):
    """An on_step that asks for a stop once, after `step`."""

    def on_step(info):
        if info["step"] == step:
            os.kill(os.getpid(), number)

    return on_step


def variant(tiny, name):
    if name == "anneal":
        return tiny.replace(
            model={
                "connection": ConnectionConfig(kind="anneal"), "dropout": 0.1,
                "init": InitConfig(identity_bias=5.0),
            },
            optim={"name": "muon"},
        )  # fmt: skip
    return tiny.replace(optim={"name": name})


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Records of whole runs, made once a variant."""
    records = {}

    def get(config, name):
        if name not in records:
            path = tmp_path_factory.mktemp("whole") / name
            train(config, path, data=data)
            records[name] = record(path)
        return records[name]

    return get


CASES = [("adamw", step) for step in range(1, NUM_STEPS + 1)]
CASES += [(name, step) for name in ("muon", "kl_shampoo", "soap", "anneal") for step in (2, 5)]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_interrupted_and_resumed_equals_uninterrupted(
    tiny, data, tmp_path, uninterrupted, name, step
):
    config, path = variant(tiny, name), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(config, path, data=data, on_step=interrupt_at(step))
    assert found(path / "checkpoint")[0].name == f"step-{step:08d}"
    assert load_run(path).step == step and not load_run(path).is_finished
    # Rows that a killed process may have written past its checkpoint, the last one torn.
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 1.0}\n' if step < 7 else "")
        file.write('{"step": 8, "lo')
    steps = []
    train(config, path, data=data, on_step=lambda info: steps.append(info["step"]))
    assert steps == list(range(step + 1, NUM_STEPS + 1))
    assert_equal(record(path), uninterrupted(config, name))


def test_killed_between_checkpoints_repeats_the_steps_since(tiny, data, tmp_path, uninterrupted):
    def die(info):
        if info["step"] == 5:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(tiny, tmp_path / "run", data=data, on_step=die)
    steps = []
    train(tiny, tmp_path / "run", data=data, on_step=lambda info: steps.append(info["step"]))
    assert steps == [4, 5, 6, 7, 8]
    assert_equal(record(tmp_path / "run"), uninterrupted(tiny, "adamw"))


@pytest.mark.parametrize("where", ["held_out_loss", "probe_row"])
def test_interrupt_during_a_measurement(tiny, data, tmp_path, monkeypatch, uninterrupted, where):
    """The measurement is given up at once and made again on resumption."""
    original = getattr(loop, where)

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, where, signalled)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "run", data=data)
    step = 2 if where == "held_out_loss" else 4
    assert found(tmp_path / "run" / "checkpoint")[0].name == f"step-{step:08d}"
    monkeypatch.undo()
    train(tiny, tmp_path / "run", data=data)
    assert_equal(record(tmp_path / "run"), uninterrupted(tiny, "adamw"))


def test_interrupt_between_micro_batches_abandons_the_step(tiny, data, tmp_path, monkeypatch):
    config = tiny.replace(train={"micro_batch_size": 1})
    train(config, tmp_path / "whole", data=data)
    from skipless.model import Transformer

    calls, forward = [], Transformer.forward

    def signalled(self, *args, **kwargs):
        calls.append(self.training)
        if sum(calls) == 10:  # step 3, second micro-batch
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data=data)
    assert sum(calls) == 10
    assert found(tmp_path / "run" / "checkpoint")[0].name == "step-00000002"
    monkeypatch.undo()
    train(config, tmp_path / "run", data=data)
    assert_equal(record(tmp_path / "run"), record(tmp_path / "whole"))


def test_second_signal_ends_at_once(tiny, data, tmp_path, uninterrupted):
    before = signal.getsignal(signal.SIGINT)

    def twice(info):
        if info["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "run", data=data, on_step=twice)
    assert [p.name for p in found(tmp_path / "run" / "checkpoint")] == ["step-00000003"]
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert signal.getsignal(signal.SIGINT) is before
    train(tiny, tmp_path / "run", data=data)
    assert_equal(record(tmp_path / "run"), uninterrupted(tiny, "adamw"))


def spoil(path, how):
    """Damage one checkpoint folder."""
    tensors = next(path.glob("__0_*"))
    if how == "flipped":
        content = bytearray(tensors.read_bytes())
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
    elif how == "short":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif how == "missing":
        tensors.unlink()
    else:
        (path / "manifest.json").write_text("")


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "manifest"])
def test_a_damaged_checkpoint_falls_back_and_says_so(
    tiny, data, tmp_path, capfd, uninterrupted, how
):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny, path, data=data, on_step=interrupt_at(7))
    newest, before = found(path / "checkpoint")
    assert (newest.name, before.name) == ("step-00000007", "step-00000006")
    spoil(newest, how)
    capfd.readouterr()
    steps = []
    train(tiny, path, data=data, on_step=lambda info: steps.append(info["step"]))
    said = "".join(capfd.readouterr().err.split())
    assert "step-00000007cannotbeused" in said and "atstep6of8" in said
    assert steps == [7, 8]
    assert_equal(record(path), uninterrupted(tiny, "adamw"))


def test_no_readable_checkpoint_is_an_error_and_not_a_fresh_start(tiny, data, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(tiny, path, data=data, on_step=interrupt_at(5))
    for folder in found(path / "checkpoint"):
        spoil(folder, "flipped")
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="none of the 2 checkpoints.*--fresh"):
        train(tiny, path, data=data)
    assert (path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("keep", [1, 3])
def test_old_checkpoints_are_removed(tiny, data, tmp_path, keep):
    config = tiny.replace(train={"keep_checkpoints": keep, "checkpoint_every": 2})
    train(config, tmp_path / "run", data=data)
    names = [p.name[-1] for p in found(tmp_path / "run" / "checkpoint")]
    assert names == ["8", "6", "4"][:keep]
