"""`skipless doctor`: runs, logs, models; what it prints; bad input."""

import json
import shutil

import pytest
import torch

from skipless.cli import main
from skipless.doctor import collect, examine
from skipless.errors import UserError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama of three layers without a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=40, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_run_is_judged_by_its_files_and_its_model(tiny_run, capsys, cache):
    assert main(["doctor", str(tiny_run)]) == 0
    out = capsys.readouterr()
    assert "held-out tokens of the run" in out.err
    paragraphs = [" ".join(part.split()) for part in out.out.split("\n\n")]
    healthy, unchecked = paragraphs[-2:]
    assert healthy.startswith("healthy: finite numbers, causality")
    assert "speed, memory of training (needs a model to compare with (--against))" in unchecked
    assert "start of training" in unchecked  # 8 steps say nothing


def test_json_has_every_rule_once(tiny_run, capsys, cache):
    assert main(["doctor", str(tiny_run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rules = [f["rule"] for f in found["findings"]] + found["healthy"] + list(found["unchecked"])
    assert len(rules) == len(set(rules)) == 14


def test_a_run_whose_text_and_weights_are_gone_is_judged_by_its_files(copy_run, tmp_path, capsys):
    run = copy_run(tmp_path / "run")
    (run / "model.safetensors").unlink()
    shutil.rmtree(run / "checkpoint")
    evidence = collect(run)
    assert evidence.leak is None and evidence.joins
    assert examine(evidence).unchecked["causality"] == "weights to load"
    with pytest.raises(UserError, match=r"model\.safetensors"):
        collect(run, against=run)


def test_a_run_without_its_text_gets_random_tokens(copy_run, tmp_path):
    run = copy_run(tmp_path / "run")
    note = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps(note | {"directory": str(tmp_path / "gone")}))
    said = []
    evidence = collect(run, say=said.append)
    assert "random tokens (the run's text is not here)" in said[0]
    assert evidence.leak is not None and evidence.unigram == note["unigram_loss"]
    with pytest.raises(UserError, match="is not here any more"):
        collect(run, text=__file__)


def test_two_runs_are_compared(tiny_run, cache):
    evidence = collect(tiny_run, against=tiny_run)
    assert evidence.cost is not None and evidence.against is not None
    assert evidence.cost.flops == evidence.against.flops > 0
    assert {"speed", "memory of training"} <= set(examine(evidence).healthy)


def test_a_diagnosis_of_broken_numbers_is_read(copy_run, tmp_path):
    run = copy_run(tmp_path / "run")
    (run / "train.json").unlink()
    (run / "diagnosis.json").write_text(json.dumps({"step": 7, "text": "the output of x is NaN"}))
    found = examine(collect(run))
    assert found.findings["finite numbers"].evidence == "step 7: the output of x is NaN"


def test_the_weight_is_named_where_the_files_know_its_outputs(copy_run, tmp_path, cache):
    """Files that were measured when the weight was broken already, and files from before."""
    from safetensors.torch import load_file, save_file

    run = copy_run(tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    name = next(n for n in weights if n.endswith("mlp.up_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, run / "model.safetensors")
    assert examine(collect(run)).findings["finite numbers"].evidence == f"the weight {name}"
    probe = json.loads((run / "probe.json").read_text())
    probe["sites"][0]["nonfinite"] = 1024
    (run / "probe.json").write_text(json.dumps(probe))
    found = examine(collect(run)).findings["finite numbers"]
    assert found.evidence.startswith(f"the weight {name}; 1024 values at ")
    assert "overflow" not in found.cause


def test_a_model_folder(llama, capsys):
    assert main(["doctor", str(llama), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"causality", "gradients by depth", "soft attention"} <= set(found["healthy"])


def test_hardware_alone_prints_the_engines(capsys, monkeypatch):
    from skipless.quant.integers import hardware
    from skipless.quant.integers.engines import KernelEngine

    # Without the C++ kernels, whose building takes a minute; tests/quant probes them too.
    kept = {n: e for n, e in hardware.ENGINES.items() if not isinstance(e, KernelEngine)}
    monkeypatch.setattr(hardware, "ENGINES", kept)
    monkeypatch.setattr(hardware, "_probed", {})
    assert main(["doctor", "--hardware"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "integer engines on this cpu" and lines[1].split()[:2] == ["engine", "state"]
    assert any("exact" in line for line in lines[2:])


def test_a_log_of_another_training_and_its_heat_map(tmp_path, capsys):
    from skipless.probes.callbacks import ProbeLog

    from .illnesses import Chain

    model = Chain(0.3)
    log = ProbeLog(model, tmp_path / "log", every=1, stats=["moments"])
    for step in (1, 2):
        with log.step(step) as row:
            loss = model(torch.randn(16, 32)).square().mean()
            loss.backward()
            row["loss"] = loss
        model.zero_grad()
    log.close()
    out = tmp_path / "map.png"
    assert main(["doctor", str(tmp_path / "log"), "--heatmap", str(out), "--key", "std"]) == 0
    text = capsys.readouterr().out
    assert "1. gradients vanish towards the first layers (harmful)" in text
    assert "median of 2 steps" in text and out.exists() and str(out) in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "doctor needs a run or a model"),
        (["--text", "a.txt", "--hardware"], "need a run or a model"),
        (["nothing"], "neither a folder nor a named model"),
        (["EMPTY"], "holds neither config.json nor metrics.jsonl"),
        (["LOG", "--against", "x"], "holds a log and no model, so --against"),
        (["LLAMA", "--text", __file__], "has no tokenizer to read"),
        (["LLAMA", "--num-tokens", "0"], "--num-tokens is '0'"),
        (["LLAMA", "--against", "EMPTY"], "holds neither config.json"),
        (["--hardware", "--device", "cuda"], "--device is cuda and torch sees none"),
    ],
)
def test_bad_input_ends_in_one_sentence(words, said, llama, tmp_path, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    places = {"EMPTY": tmp_path / "empty", "LOG": tmp_path / "log", "LLAMA": llama}
    for name in ("EMPTY", "LOG"):
        places[name].mkdir()
    (places["LOG"] / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["doctor", *(str(places.get(word, word)) for word in words)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1]


def test_an_empty_log_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no rows"):
        collect(tmp_path)
