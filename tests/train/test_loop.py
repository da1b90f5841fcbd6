"""The loop does what its settings say: loss falls, rates, accumulation, files, mirrors."""

import json
import math
import os
import platform
import subprocess
import sys

import pytest
import torch

from skipless.errors import UserError
from skipless.rundir import RunDir
from skipless.train import Loop, load_run, measure_sites, train
from skipless.train.distributed import World


def rows(path, name="metrics.jsonl"):
    return RunDir(path).read_jsonl(name)


def losses(path):
    return [r["loss"] for r in rows(path) if "loss" in r]


def test_loss_falls_and_the_directory_is_complete(tiny, data, tmp_path):
    config = tiny.replace(train={"num_tokens": 60 * 64, "eval_every": 20}, probe={"every": 20})
    seen = []
    result = train(config, tmp_path / "run", data=data, on_step=seen.append)
    values = losses(tmp_path / "run")
    assert len(values) == config.train.num_steps == 60
    assert values[-1] < values[0] - 1.0, values
    assert [s["step"] for s in seen] == list(range(1, 61))
    assert all(s["tokens_per_second"] > 0 and s["num_steps"] == 60 for s in seen)
    held_out = [r for r in rows(tmp_path / "run") if "held_out_loss" in r]
    assert [r["step"] for r in held_out] == [20, 40, 60]
    assert held_out[-1]["held_out_loss"] == result.held_out_loss < math.log(280)
    bits = result.held_out_loss / math.log(2) / data.bytes_per_token
    assert result.held_out_bits_per_byte == pytest.approx(bits)
    probes = rows(tmp_path / "run", "probes.jsonl")
    assert [r["step"] for r in probes] == [20, 40, 60]
    for row in [*probes, json.loads((tmp_path / "run" / "probe.json").read_text())]:
        assert {"0", "1", "embed_tokens"} <= set(row["gradient_norms"])
        assert all(math.isfinite(v) and v > 0 for v in row["gradient_norms"].values())
        assert "layers.1.mlp.down_proj.weight" in row["isometry_drift"]
        assert {s["kind"] for s in row["sites"]} >= {"stream", "activation_output"}
        assert row["geometry"] and row["attention"]


def test_a_finished_run_returns_at_once(tiny, data, tmp_path):
    first = train(tiny, tmp_path / "run", data=data)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = train(tiny, tmp_path / "run", on_step=lambda info: pytest.fail("it trained again"))
    assert again == first
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_fresh_starts_anew_with_the_same_numbers(tiny, data, tmp_path):
    train(tiny, tmp_path / "run", data=data)
    before, steps = losses(tmp_path / "run"), []
    train(tiny, tmp_path / "run", data=data, fresh=True, on_step=lambda i: steps.append(i["step"]))
    assert steps == list(range(1, 9))
    assert losses(tmp_path / "run") == before


def test_accumulation_equals_the_whole_batch(tiny, data, tmp_path):
    train(tiny, tmp_path / "whole", data=data)
    train(tiny.replace(train={"micro_batch_size": 1}), tmp_path / "parts", data=data)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    # 3 does not divide 4: the last part is smaller and counts less.
    train(tiny.replace(train={"micro_batch_size": 3}), tmp_path / "uneven", data=data)
    assert losses(tmp_path / "uneven") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_every_label_counts_alike_whatever_its_part_of_the_batch(tiny, data, tmp_path):
    found = []
    for size in (None, 3, 1):
        config = tiny.replace(train={"micro_batch_size": size})
        loop = Loop(config, RunDir(tmp_path), data, World())
        ids, labels = loop.loader.batch(0)
        labels[0], labels[1, 3:] = -100, -100
        loss = loop.backward((ids, labels))
        found.append((loss, [p.grad for p in loop.model.parameters()]))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        for ours, whole in zip(grads, found[0][1], strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-7)


def expected_rate(kind, step, num_steps=20, warmup=4, floor=0.1, fraction=0.25):
    """Written from the definition: warm-up to 1, then the fall to `floor` at the last step."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    share = (step - warmup) / (num_steps - 1 - warmup)
    if kind == "wsd":
        start = num_steps - 1 - round(fraction * num_steps)
        share = max(0.0, (step - start) / (num_steps - 1 - start))
    if kind == "cosine":
        return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2
    return floor + (1 - floor) * (1 - share)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_rates_of_every_step(tiny, data, tmp_path, kind):
    schedule = {
        "schedule": kind, "num_tokens": 20 * 64, "warmup_steps": 4, "decay_fraction": 0.25,
        "eval_every": 0,
    }  # fmt: skip
    train(tiny.replace(train=schedule, probe={"every": 0}), tmp_path / "run", data=data)
    rates = [r["lr"] / 1e-2 for r in rows(tmp_path / "run") if "lr" in r]
    assert rates == pytest.approx([expected_rate(kind, s) for s in range(20)])
    assert rates[3] < 1 and rates[4] == 1 and rates[-1] == pytest.approx(0.1)


def test_clipping_acts_and_the_norm_before_it_is_recorded(tiny, data, tmp_path):
    off = tiny.replace(train={"max_grad_norm": None, "num_tokens": 128})
    on = tiny.replace(train={"max_grad_norm": 1e-6, "num_tokens": 128})
    train(off, tmp_path / "off", data=data)
    train(on, tmp_path / "on", data=data)
    first = [rows(tmp_path / name)[0]["grad_norm"] for name in ("off", "on")]
    assert first[0] == first[1] > 0.1
    # A gradient of norm 1e-6 is small beside AdamW's eps only in part, so the step differs.
    assert losses(tmp_path / "off")[1] != losses(tmp_path / "on")[1]


def test_activation_checkpointing_changes_no_number(tiny, data, tmp_path):
    dropped = tiny.replace(model={"dropout": 0.1})  # recomputation must draw the same mask
    train(dropped, tmp_path / "plain", data=data)
    saving = dropped.replace(train={"activation_checkpointing": True})
    train(saving, tmp_path / "saving", data=data)
    assert losses(tmp_path / "saving") == losses(tmp_path / "plain")


def test_bf16_autocast_trains(tiny, data, tmp_path):
    train(tiny, tmp_path / "fp32", data=data)
    train(tiny.replace(train={"precision": "bf16"}), tmp_path / "bf16", data=data)
    assert losses(tmp_path / "bf16") != losses(tmp_path / "fp32")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "fp32"), abs=0.1)
    weights = load_run(tmp_path / "bf16").model.state_dict()
    assert all(w.dtype == torch.float32 for w in weights.values() if w.is_floating_point())


def test_tensorboard_gets_the_same_numbers(tiny, data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny.replace(train={"mirrors": ("tensorboard",)}), tmp_path / "run", data=data)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    mirrored = [(e.step, e.value) for e in events.Scalars("loss")]
    assert mirrored == [
        (r["step"], pytest.approx(r["loss"])) for r in rows(tmp_path / "run") if "loss" in r
    ]
    assert any(tag.startswith("kurtosis/") for tag in events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("mirror", "module"), [("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_mirror_that_is_not_installed_is_named(tiny, data, tmp_path, monkeypatch, mirror, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"{mirror}.*not installed.*pip install"):
        train(tiny.replace(train={"mirrors": (mirror,)}), tmp_path / "run", data=data)


def test_load_run_gives_the_trained_model(tiny, data, tmp_path):
    result = train(tiny, tmp_path / "run", data=data)
    run = load_run(tmp_path / "run")
    assert run.is_finished and run.step == 8 and run.config == tiny and not run.model.training
    assert run.data.directory == data.directory
    assert run.tokenizer.decode(run.tokenizer.encode("the king said")) == "the king said"
    assert run.model.lm_head.weight is run.model.embed_tokens.weight
    from skipless.data import evaluation_batches
    from skipless.evaluate import loss

    report = loss(run.model, evaluation_batches(data.held_out, 16, 4, 128))
    assert report.nats == pytest.approx(result.held_out_loss, abs=1e-6)
    row = measure_sites(run.model, tiny, data, final=True)
    last = json.loads((tmp_path / "run" / "probe.json").read_text())
    assert [s["kurtosis"] for s in row["sites"]] == [s["kurtosis"] for s in last["sites"]]


def test_a_run_that_is_moved_without_its_text_keeps_its_tokenizer(tiny, data, tmp_path):
    train(tiny, tmp_path / "run", data=data)
    note = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").write_text(json.dumps({**note, "directory": "/gone"}))
    run = load_run(tmp_path / "run")
    assert run.tokenizer_path == tmp_path / "run" / "tokenizer.json"
    assert run.tokenizer.decode(run.tokenizer.encode("the king said")) == "the king said"
    run.tokenizer_path.write_text("{}")
    with pytest.raises(UserError, match="not the tokenizer that the run was trained with"):
        _ = load_run(tmp_path / "run").tokenizer
    run.tokenizer_path.unlink()  # an older run: its text is asked, and here that is gone
    note["directory"] = str(data.directory)
    (tmp_path / "run" / "data.json").write_text(json.dumps(note))
    assert load_run(tmp_path / "run").tokenizer_path == data.tokenizer_path


def test_load_run_needs_weights(tiny, tmp_path):
    RunDir.create(tmp_path / "run", tiny)
    with pytest.raises(UserError, match="no weights yet"):
        load_run(tmp_path / "run")


@pytest.mark.slow
def test_compiled_blocks_train_the_same(tiny, data, tmp_path):
    train(tiny, tmp_path / "eager", data=data)
    train(tiny.replace(train={"compile": True}), tmp_path / "compiled", data=data)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), abs=1e-4)
    probes = [rows(tmp_path / name, "probes.jsonl") for name in ("eager", "compiled")]
    assert [len(r["sites"]) for r in probes[0]] == [len(r["sites"]) for r in probes[1]]


@pytest.mark.parametrize("said", ["no C++ compiler on this machine", ""])
def test_a_failing_compiler_is_said_and_training_goes_on(
    tiny, data, tmp_path, monkeypatch, capfd, said
):
    from skipless.model import Block

    def refuse(self):
        def call(*args, **kwargs):
            raise RuntimeError(said)

        self._compiled_call_impl = call

    monkeypatch.setattr(Block, "compile", refuse)
    train(tiny, tmp_path / "eager", data=data)
    train(tiny.replace(train={"compile": True}), tmp_path / "run", data=data)
    assert f"({said or 'RuntimeError'})" in " ".join(capfd.readouterr().err.split())
    assert losses(tmp_path / "run") == losses(tmp_path / "eager")


def test_malloc_is_left_to_those_who_tune_it(monkeypatch):
    from skipless.train.memory import keep_freed_memory

    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not keep_freed_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted on Linux")
def test_freed_memory_is_kept_between_steps():
    # In a process of its own: the test-suite's heap has its own history of large blocks. The first
    # rounds are not counted: the heap may place a second block beside the first before it settles.
    code = """
import resource, torch
from skipless.train.memory import keep_freed_memory
assert keep_freed_memory()
def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.ones(16 << 18)  # 16 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(8)
print(faults(16))
"""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("not glibc")
    tuned = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(tuned)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 1024  # 16 times 4,096 pages, had they gone back to the kernel
