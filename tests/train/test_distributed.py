"""Two gloo processes under torchrun with FSDP2 give one process's losses, and checkpoints cross.

One torchrun launch does all the two-process work (starting processes is what costs time); the
tests compare its run directories with those of this process.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skipless.config import ConnectionConfig, RunConfig, UniversalConfig
from skipless.data import PreparedData
from skipless.rundir import RunDir
from skipless.train import load_run, train
from skipless.train.checkpoint import found

OPTIMIZERS = ("adamw", "muon", "kl_shampoo")
CROSSED = ("adamw", "kl_shampoo")  # Muon's state is sharded as AdamW's is
KINDS = [("two", name) for name in OPTIMIZERS]
KINDS += [(kind, name) for kind in ("two-then-one", "one-then-two") for name in CROSSED]


def variant(tiny, name):
    # A gentle rate: the update of a nearly unused token's embedding is +-lr whatever its size.
    optim = {"name": name, "lr": 1e-3, "eps": 1e-6}
    config = tiny.replace(optim=optim, train={"micro_batch_size": 1, "num_threads": 1})
    if name != "adamw":
        return config
    # The kind with most parameters of its own, and sides that two processes do not divide.
    join = ConnectionConfig(kind="universal", universal=UniversalConfig(rank=3))
    return config.replace(model={"connection": join, "vocab_size": 281})


def stop_after(step):
    """An on_step that asks for a stop once, after `step`; rank 0 alone gets the signal."""

    def on_step(info):
        if info["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def work_of_two(folder: Path) -> None:
    """What torchrun starts: whole runs, one interrupted, one begun by a single process."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    plan = json.loads((folder / "plan.json").read_text())
    data = PreparedData.open(plan["data"])
    for name, values in plan["configs"].items():
        config = RunConfig.from_dict(values)
        train(config, folder / f"two-{name}", data=data)
        if name not in CROSSED:
            continue
        train(config, folder / f"one-then-two-{name}", data=data)
        try:
            train(config, folder / f"two-then-one-{name}", data=data, on_step=stop_after(4))
        except KeyboardInterrupt:
            continue
        raise AssertionError("not interrupted")
    gc.collect()  # as in skipless.train.distributed.start
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tiny, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    configs = {name: variant(tiny, name) for name in OPTIMIZERS}
    for name, config in configs.items():
        train(config, folder / f"one-{name}", data=data)
        if name in CROSSED:
            with pytest.raises(KeyboardInterrupt):
                train(config, folder / f"one-then-two-{name}", data=data, on_step=stop_after(4))
    plan = {"data": str(data.directory), "configs": {n: c.to_dict() for n, c in configs.items()}}
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        __file__, str(folder),
    ]  # fmt: skip
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr.split("Traceback (most recent call last)", 2)[1][:3000]
    for name in CROSSED:
        train(configs[name], folder / f"two-then-one-{name}", data=data)
    return folder


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_losses_equal_those_of_one_process(folder, kind, name):
    expected = RunDir(folder / f"one-{name}").read_jsonl("metrics.jsonl")
    rows = RunDir(folder / f"{kind}-{name}").read_jsonl("metrics.jsonl")
    assert len(rows) == len(expected) == 8 + 4
    for row, reference in zip(rows, expected, strict=True):
        assert row.keys() == reference.keys() and row["step"] == reference["step"]
        for key in ("loss", "held_out_loss", "grad_norm"):
            if key in row:
                assert row[key] == pytest.approx(reference[key], abs=1e-5), (row, reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_probes_are_whole(folder, name):
    one = load_file(folder / f"one-{name}" / "model.safetensors")
    two = load_file(folder / f"two-{name}" / "model.safetensors")
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=2e-4, rtol=0)
    rows = [RunDir(folder / f"{n}-{name}").read_jsonl("probes.jsonl") for n in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        assert a["gradient_norms"] == pytest.approx(b["gradient_norms"], rel=1e-4)
        assert a["isometry_drift"] == pytest.approx(b["isometry_drift"], rel=1e-3)
        kurtosis = [[s["kurtosis"] for s in r["sites"]] for r in (a, b)]
        assert kurtosis[0] == pytest.approx(kurtosis[1], abs=1e-3)


def test_a_sharded_run_loads_in_one_process(folder):
    run = load_run(folder / "two-adamw")
    assert run.step == 8 and run.is_finished
    newest = found(folder / "two-adamw" / "checkpoint")[0]
    assert json.loads((newest / "state.json").read_text())["world_size"] == 2
    assert len(list(newest.glob("__*.distcp"))) == 2  # both processes wrote their share


if __name__ == "__main__":
    work_of_two(Path(sys.argv[1]))
