"""A whole run on an accelerator that is not there: training, measuring, resuming, evaluating."""

import math
import shutil

import pytest
import torch
from pretend_device import pretend

from skipless.config import InitConfig, ModelConfig, OptimizerRecipe
from skipless.data import prepare
from skipless.evaluate import accuracy, error_propagation, loss, site_sqnr
from skipless.model import Transformer
from skipless.rundir import RunDir
from skipless.train import load_run, train
from skipless.train.distributed import choose_device
from skipless.train.loop import Loop


@pytest.fixture
def data(tiny_config, text_file):
    return prepare(tiny_config.data, 300, cache_dir=text_file.parent / "cache")


def losses(path):
    return [r["loss"] for r in RunDir(path).read_jsonl("metrics.jsonl") if "loss" in r]


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_run_gives_the_losses_of_the_cpu(kind, tiny_config, data, tmp_path):
    config = tiny_config.replace(optim=OptimizerRecipe(name="adamw", lr=1e-2))
    train(config, tmp_path / "cpu", data=data)
    with pretend(kind) as device:
        moved = config.replace(train={"device": "auto", "micro_batch_size": 2})
        result = train(moved, tmp_path / "device", data=data)
        assert device.ops["addmm"] or device.ops["mm"]
        assert (result.peak_memory_bytes == 1 << 20) == (kind == "cuda")
        found = losses(tmp_path / "device")
        assert found == pytest.approx(losses(tmp_path / "cpu"), abs=2e-3)
        row = RunDir(tmp_path / "device").read_json("probe.json")
        assert row["sites"] and row["geometry"] and row["attention"]


def test_a_run_stopped_on_a_device_goes_on_there(tiny_config, data, tmp_path):
    config = tiny_config.replace(
        train={"device": "auto", "precision": "bf16", "activation_checkpointing": True},
    )  # fmt: skip
    with pretend("cuda"):
        train(config, tmp_path / "whole", data=data)

        def stop(info):
            if info["step"] == 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts", data=data, on_step=stop)
        shutil.copytree(tmp_path / "parts", tmp_path / "elsewhere")
        train(config, tmp_path / "parts", data=data)
        found, expected = losses(tmp_path / "parts"), losses(tmp_path / "whole")
        assert found == expected and len(found) == 8
    # what was written is read without the device
    train(config, tmp_path / "elsewhere", data=data)
    assert losses(tmp_path / "elsewhere") == pytest.approx(expected, abs=0.05)
    run = load_run(tmp_path / "parts")
    assert next(run.model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("plan", ["W4A8 scope=block from=0.1 over=0.3"])
def test_a_run_that_trains_quantised(plan, tiny_config, data, tmp_path):
    config = tiny_config.replace(train={"device": "cuda", "quantize": plan})
    with pretend("cuda"):
        assert math.isfinite(train(config, tmp_path / "run", data=data).held_out_loss)


def test_a_step_waits_for_the_loss_the_norm_and_the_gradients(tiny_config, data, tmp_path):
    config = tiny_config.replace(train={"device": "cuda"}, probe={"every": 0, "trace_every": 0})
    with pretend("cuda") as device:
        from skipless.train.distributed import World

        world = World(device=torch.device("cuda", 0))
        loop = Loop(config, RunDir(tmp_path / "run"), data, world)
        (tmp_path / "run").mkdir()
        loop.resume()
        loop.advance()
        device.waits.clear()
        loop.advance()
        assert device.waits.total() == 3, device.waits


def test_the_device_of_a_process():
    with pretend("cuda") as device:
        assert choose_device("auto", 0) == torch.device("cuda", 0)
        assert choose_device("cuda", 3) == torch.device("cuda", 3)
        assert choose_device("cuda:1", 3) == torch.device("cuda", 1)
        assert device.calls["set_device"] == 3


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_evaluation(kind):
    settings = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                    max_position_embeddings=32, init=InitConfig(std=0.1))  # fmt: skip
    model = Transformer(ModelConfig(**settings))
    classifier = Transformer(ModelConfig(**settings, num_labels=3, causal=False))
    ids = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 1])
    expected = loss(model, [ids]), accuracy(classifier, [(ids, labels)])
    with pretend(kind):
        model.to(kind), classifier.to(kind)
        for batch in (ids, ids.to(kind)):
            assert loss(model, [batch]).nats == pytest.approx(expected[0].nats, abs=1e-4)
        for pair in ((ids, labels), (ids.to(kind), labels.to(kind))):
            found = accuracy(classifier, [pair])
            assert found.accuracy == expected[1].accuracy
            assert found.nats == pytest.approx(expected[1].nats, abs=1e-4)
        assert error_propagation(model, "W4A8", [ids])
        assert all(math.isfinite(r["gap"]) for r in site_sqnr(model, "W4A8", [ids]))
