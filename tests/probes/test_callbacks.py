"""ProbeLog in a plain loop, in Lightning, in transformers' Trainer; writers; the heat map."""

import json
import sys
import types

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.probes.callbacks import ProbeLog
from skipless.probes.heatmap import heatmap, over_time
from skipless.probes.hosts import lightning_callback, trainer_callback
from skipless.rundir import RunDir


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        return x + self.mlp(x)


class Net(nn.Module):
    """Three residual blocks: any module with a stream."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batches(number, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, 16, generator=generator) for _ in range(number)]


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(model, data, log=None, first=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(data, start=first):
        if log is None:
            model(x).square().mean().backward()
        else:
            with log.step(step) as row:
                loss = model(x).square().mean()
                loss.backward()
                row["loss"] = loss
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_plain_loop_is_measured_and_left_bit_for_bit_as_it_was(tmp_path):
    plain = train(Net(), batches(7))
    log = ProbeLog(watched := Net(), tmp_path, every=3, unigram_loss=2.5)
    train(watched, batches(7), log)
    log.close()
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert hooks(watched) == 0
    run = RunDir(tmp_path)
    rows = run.read_jsonl("probes.jsonl")
    assert [row["step"] for row in rows] == [1, 3, 6]
    stream = [s for s in rows[0]["sites"] if s["kind"] == "stream"]
    assert [s["layer"] for s in stream] == [0, 1, 2] and stream[0]["count"] == 32
    assert len(rows[0]["geometry"]) == 3 and rows[0]["num_keys"] == 8
    assert set(rows[0]["gradient_norms"]) == {"0", "1", "2"}
    metrics = run.read_jsonl("metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 8))
    assert metrics[0]["loss"] == pytest.approx(Net()(batches(1)[0]).square().mean().item())
    assert run.read_json("data.json") == {"unigram_loss": 2.5}


def test_the_rows_are_those_of_a_probe_of_the_same_pass(tmp_path):
    from skipless.probes import Probe, gradient_norms

    log = ProbeLog(watched := Net(), tmp_path, every=1)
    train(watched, batches(1), log)
    model = Net()
    with Probe(model, stats=("moments", "geometry")) as probe:
        model(batches(1)[0]).square().mean().backward()
    (row,) = RunDir(tmp_path).read_jsonl("probes.jsonl")
    assert row["sites"] == json.loads(json.dumps(probe.table()))
    assert row["geometry"] == json.loads(json.dumps(probe.geometry()))
    assert row["gradient_norms"] == gradient_norms(model)


def test_an_exception_leaves_no_hook_and_no_row(tmp_path):
    log = ProbeLog(model := Net(), tmp_path, every=1)
    with pytest.raises(ZeroDivisionError), log.step(1) as row:
        model(batches(1)[0])
        row["loss"] = 1 / 0
    assert hooks(model) == 0 and not RunDir(tmp_path).read_jsonl("probes.jsonl")


def test_a_resumed_training_continues_its_log(tmp_path):
    model = Net()
    train(model, batches(6), ProbeLog(model, tmp_path, every=2))
    train(model, batches(3), ProbeLog(model, tmp_path, every=2), first=5)  # from a checkpoint at 4
    run = RunDir(tmp_path)
    assert [r["step"] for r in run.read_jsonl("probes.jsonl")] == [1, 2, 4, 6]
    assert [r["step"] for r in run.read_jsonl("metrics.jsonl")] == list(range(1, 8))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"sites": "strem"}, "no site matches 'strem'"),
        ({"stats": ["momentss"]}, "did you mean 'moments'"),
        ({"writers": [3]}, "3 is no writer"),
        ({"writers": ["wandb"]}, "'wandb' is no writer"),
    ],
)
def test_bad_options_are_told_before_the_first_step(tmp_path, options, said):
    with pytest.raises(UserError, match=said):
        ProbeLog(Net(), tmp_path, **options)


def test_a_folder_of_a_run_or_model_is_not_written_into(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds a run or a model"):
        ProbeLog(Net(), tmp_path)


def test_the_report_reads_the_rows(tmp_path, copy_run):
    from skipless.model import Transformer
    from skipless.report import measures
    from skipless.report.inside import gains_over_time, gradients_by_depth
    from skipless.report.load import load_run

    run = copy_run(tmp_path / "run")
    ours = load_run(run)
    model = Transformer(ours.config.model)
    ids = torch.randint(ours.config.model.vocab_size, (2, 16))
    log = ProbeLog(model, tmp_path / "log", every=1)
    for step in (1, 2):
        with log.step(step):
            model(ids, labels=ids).loss.backward()
        model.zero_grad()
    (run / "probes.jsonl").write_bytes((tmp_path / "log" / "probes.jsonl").read_bytes())
    read = load_run(run)
    assert len(read.probes) == 2 and read.probes[0].keys() > {"sites", "geometry", "gains"}
    assert len(measures.block_outputs(read.probes[0])) == 2
    assert measures.middle_kurtosis(read.probes[0], 2) is not None
    assert gradients_by_depth(read, 0)[0] == [0.0, 1.0]
    assert len(gains_over_time(read, "a")[0]) == 2


def test_a_step_without_a_forward_pass_says_so(tmp_path):
    log = ProbeLog(model := Net(), tmp_path, every=1)
    with pytest.raises(UserError, match="seen nothing of Net"), log.step(1):
        pass
    assert hooks(model) == 0


# --- writers --------------------------------------------------------------------------------------


class Recorder:
    """The two documented methods of SummaryWriter."""

    def __init__(self):
        self.scalars, self.histograms = [], []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def add_histogram(self, tag, values, step):
        self.histograms.append((tag, values, step))


def test_scalars_and_histograms_go_to_a_summary_writer(tmp_path):
    log = ProbeLog(model := Net(), tmp_path, every=2, writers=[writer := Recorder()])
    train(model, batches(2), log)
    tags = {tag for tag, _, step in writer.scalars if step == 2}
    assert {"loss", "kurtosis/blocks.0:output", "gradient_norm/0"} <= tags
    assert "token_similarity/blocks.0.mlp" in tags
    tag, values, step = writer.histograms[0]
    assert (tag, step) == ("channel_rms/blocks.0:output", 1) and values.shape == (16,)
    with torch.no_grad():
        x = Net().blocks[0](batches(1)[0]).double()
    assert torch.allclose(values, x.square().mean((0, 1)).sqrt())


def test_tensorboard_files_hold_what_was_measured(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = ProbeLog(model := Net(), tmp_path, every=2, writers=["tensorboard"])
    train(model, batches(2), log)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2]
    assert events.Histograms("channel_rms/blocks.0:output")[0].histogram_value.num == 16
    rows = RunDir(tmp_path).read_jsonl("probes.jsonl")
    (kurtosis,) = [s["kurtosis"] for s in rows[1]["sites"] if s["site"] == "blocks.1:output"]
    assert events.Scalars("kurtosis/blocks.1:output")[1].value == pytest.approx(kurtosis)


def test_trackio_gets_scalars_and_histograms(tmp_path, monkeypatch):
    """A stub of trackio's interface: init, log(dict, step=), finish, Histogram(sequence)."""
    calls = []
    stub = types.ModuleType("trackio")
    stub.init = lambda **options: calls.append(("init", options))
    stub.log = lambda values, step=None: calls.append(("log", step, values))
    stub.finish = lambda: calls.append(("finish",))
    stub.Histogram = lambda sequence: ("histogram", len(sequence))
    monkeypatch.setitem(sys.modules, "trackio", stub)
    log = ProbeLog(model := Net(), tmp_path / "mine", every=1, writers=["trackio"])
    train(model, batches(1), log)
    log.close()
    settings = {"project": "skipless", "name": "mine", "config": None, "resume": "allow"}
    assert calls[0] == ("init", settings)
    assert calls[-1] == ("finish",)
    assert any(c[0] == "log" and c[2].get("channel_rms/blocks.0:output") == ("histogram", 16)
               for c in calls)  # fmt: skip


def test_the_real_trackio_has_that_interface():
    trackio = pytest.importorskip("trackio")
    assert all(callable(getattr(trackio, name)) for name in ("init", "log", "finish"))
    trackio.Histogram([1.0, 2.0, 3.0])


@pytest.mark.parametrize("package", ["trackio", "tensorboard"])
def test_a_writer_that_is_not_installed_is_only_missed_when_named(tmp_path, package, monkeypatch):
    module = {"trackio": "trackio", "tensorboard": "torch.utils.tensorboard"}[package]
    monkeypatch.setitem(sys.modules, module, None)
    train(model := Net(), batches(1), ProbeLog(model, tmp_path))
    with pytest.raises(UserError, match=f"{package}', which is not installed"):
        ProbeLog(model, tmp_path, writers=[package])


# --- hosts ----------------------------------------------------------------------------------------


def test_lightning_measures_optimiser_steps(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Net()

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(out, **options):
        module = Module()
        callback = lightning_callback(out, every=2, **options)
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
            accumulate_grad_batches=2, default_root_dir=tmp_path,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(batches(8), batch_size=None)
        trainer.fit(module, loader)
        return module

    module = fit(tmp_path / "log")
    assert hooks(module) == 0
    run = RunDir(tmp_path / "log")
    rows = run.read_jsonl("probes.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert rows[0]["sites"][0]["count"] == 2 * 32  # two accumulated batches
    assert set(rows[0]["gradient_norms"]) == {"0", "1", "2"} and len(rows[0]["geometry"]) == 3
    assert [(r["step"], r["lr"]) for r in run.read_jsonl("metrics.jsonl")] == [
        (1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1)
    ]  # fmt: skip
    with pytest.raises(UserError, match="no module 'modell'; did you mean 'model'"):
        fit(tmp_path / "wrong", module="modell")


def test_the_trainer_of_transformers_measures_its_steps(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=40, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(40, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=4, per_device_train_batch_size=2,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    callback = trainer_callback(tmp_path / "log", every=2)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[callback]
    )
    trainer.train()
    assert hooks(model) == 0
    run = RunDir(tmp_path / "log")
    rows = run.read_jsonl("probes.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert set(rows[1]["gradient_norms"]) >= {"0", "1", "2"} and len(rows[1]["geometry"]) == 6
    metrics = run.read_jsonl("metrics.jsonl")
    assert [r["step"] for r in metrics] == [1, 2, 3, 4]
    assert all({"loss", "lr", "grad_norm"} <= set(r) for r in metrics)
    from skipless.doctor import check_model

    found = check_model(model, {"input_ids": ids[:2]}, log=tmp_path / "log")
    assert "gradients by depth" in found.healthy and "distinct tokens" in found.healthy


def test_hosts_that_are_not_installed_are_named(tmp_path, monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pytorch-lightning is not installed, nor is lightning;"):
        lightning_callback(tmp_path)
    with pytest.raises(UserError, match="transformers is not installed"):
        trainer_callback(tmp_path)


# --- over time ------------------------------------------------------------------------------------


def test_the_heat_map_shows_sites_by_step(tmp_path):
    from PIL import Image

    log = ProbeLog(model := Net(), tmp_path, every=2)
    train(model, batches(6), log)
    data = over_time(tmp_path, "kurtosis")
    assert data.steps == (1, 2, 4, 6) and "blocks.1:output" in data.places
    rows = RunDir(tmp_path).read_jsonl("probes.jsonl")
    place = data.places.index("blocks.1:output")
    (expected,) = [s["kurtosis"] for s in rows[2]["sites"] if s["site"] == "blocks.1:output"]
    assert data.values[place][2] == expected
    assert over_time(tmp_path / "probes.jsonl", "gradient_norms").places == ("0", "1", "2")
    assert len(over_time(tmp_path, "token_similarity").places) == 3
    path = heatmap(tmp_path, tmp_path / "map.png")
    assert Image.open(path).size[0] > 400


def test_a_heat_map_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no measurement over time"):
        heatmap(tmp_path, tmp_path / "map.png")
    log = ProbeLog(model := Net(), tmp_path, every=1)
    train(model, batches(1), log)
    with pytest.raises(UserError, match="did you mean 'kurtosis'"):
        heatmap(tmp_path, tmp_path / "map.png", "kurtossis")
    with pytest.raises(UserError, match=r"does not end in \.png"):
        heatmap(tmp_path, tmp_path / "map.jpg")
    assert not (tmp_path / "map.png").exists()


def test_a_wide_range_is_coloured_by_its_logarithm(tmp_path):
    run = RunDir(tmp_path)
    for step in (1, 2):
        sites = [{"site": f"s{i}", "kurtosis": 10.0**i * step} for i in range(5)]
        run.append("probes.jsonl", {"step": step, "sites": sites})
    assert heatmap(tmp_path, tmp_path / "map.png").stat().st_size > 1000
