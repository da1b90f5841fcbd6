"""Tables by method: of a run, of any model, and on the command line."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from skipless.cli import main
from skipless.diagnose.methods import compare_methods
from skipless.errors import UserError
from skipless.evaluate import precision_table, sensitivity
from skipless.measure import quantize_run
from skipless.quant import METHODS, paused, quantization, quantize, restore
from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.transforms.sources import all_outputs
from skipless.rundir import RunDir
from skipless.train import load_run

from .foreign_models import FAMILIES


def test_a_run_keeps_methods_apart(copy_run, tmp_path):
    run = load_run(copy_run(tmp_path / "run"))
    before = RunDir(run.path).read_json("quant.json", {})
    result = quantize_run(
        run, schemes=("W3Afp",), scopes=("linear",), methods=("gptq", "rtn"),
        overrides=("layers.0=fp",),
    )  # fmt: skip
    (row,) = result["methods"]
    assert row["method"] == "gptq" and row["scheme"] == "W3Afp layers.0=fp"
    assert [r["method"] for r in result["rows"]] == ["rtn"]
    written = RunDir(run.path).read_json("quant.json", {})
    assert len(written["rows"]) == len(before["rows"]) + 1
    assert all("refused" not in r and r["loss"] is not None for r in written["rows"])


def test_the_command(copy_run, tmp_path, capsys):
    path = str(copy_run(tmp_path / "run"))
    words = ["quantize", path, "--schemes", "W3A8", "--scopes", "linear", "--num-tokens", "64"]
    assert main([*words, "--methods", "smooth+gptq", "--override", "layers.0.*=W8A8"]) in (0, None)
    out = capsys.readouterr().out
    assert "smooth+gptq" in out and "layers.0.*=W8A8" in out and "* is the least" in out
    assert main([*words, "--override", "layer.0=fp"]) == 2
    assert "matches nothing" in capsys.readouterr().err
    assert main([*words, "--methods", "gtpq"]) == 2
    assert "did you mean 'gptq'" in capsys.readouterr().err


def test_a_refused_method_is_a_row(plain, ids):
    rows = compare_methods(
        plain, [ids], ["W4A8"], methods=["rtn", "stream", "gptq"], calibration=[ids]
    )
    assert [row["method"] for row in rows] == ["rtn", "stream", "gptq"]
    assert "RMSNorm" in rows[1]["refused"] and rows[1]["increase"] is None
    assert rows[0]["increase"] is not None and rows[2]["refused"] is None
    assert json.dumps(rows)


def test_a_precision_table_by_method(make_transformer, ids):
    model = make_transformer("residual")
    rows = precision_table(
        model, [ids], ["W3Afp"], ["linear"], methods=["rtn", "gptq"], calibration=[ids]
    )
    assert [row["method"] for row in rows] == ["rtn", "gptq"]
    assert rows[0]["loss"] != rows[1]["loss"]
    with pytest.raises(UserError, match="gptq looks at activations"):
        precision_table(model, [ids], ["W3Afp"], methods=["gptq"])
    by_layer = sensitivity(model, "W3A8", [ids], method="gptq", calibration=[ids])
    assert [row["layer"] for row in by_layer] == [0, 1]


def test_a_model_without_tokens_is_judged_by_distance():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    x = torch.randn(128, 16) @ torch.randn(16, 16)
    rows = compare_methods(
        net, [x[:64]], ["W3Afp-w:channel"], methods=["rtn", "gptq"], calibration=[x[64:]]
    )
    assert rows[0]["unit"] == "relative distance of the outputs"
    assert rows[1]["increase"] < rows[0]["increase"]


REFUSED = {
    ("gpt2", "stream"): "no RMSNorm", ("bert", "stream"): "no RMSNorm",
    ("vit", "stream"): "no RMSNorm", ("clip", "stream"): "more than one list of blocks",
    ("whisper", "stream"): "more than one list of blocks",
}  # fmt: skip
"""What a method says to a family that it does not fit; every other pair works."""
SHORT = {"rotation": "rotation:learned,steps=2", "outliers": "outliers:10%"}


@pytest.mark.parametrize("make", FAMILIES, ids=lambda f: f.__name__)
def test_every_method_on_every_family(make, ids):
    torch.manual_seed(0)
    model, batch, _ = make(ids)
    model.eval()

    def outputs():
        with evaluation_mode(model):
            return all_outputs(run_batch(model, batch))

    before, state = outputs(), {k: v.clone() for k, v in model.state_dict().items()}
    for name in METHODS:
        method = SHORT.get(name, name)
        if (reason := REFUSED.get((make.__name__, name))) is not None:
            with pytest.raises(UserError, match=reason):
                quantize(model, "W4A8", method=method, calibration=[batch])
        else:
            quantize(model, "W4A8", method=method, calibration=[batch])
            rounded = outputs()
            assert all(bool(x.isfinite().all()) for x in rounded), method
            assert not all(torch.equal(x, y) for x, y in zip(rounded, before, strict=True))
            with paused(model):
                for one, other in zip(before, outputs(), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=method)
            restore(model)
        assert quantization(model) is None
        assert all(torch.equal(value, state[k]) for k, value in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(), strict=True))


def test_a_learned_rotation_says_what_it_found_in_a_family(ids):
    notes = {}
    for make in FAMILIES:
        torch.manual_seed(0)
        model, batch, _ = make(ids)
        model.eval()
        quantize(model, "W4A8", method="rotation:learned,steps=0", calibration=[batch])
        (note,) = quantization(model).notes
        notes[make.__name__] = note.removeprefix("rotation: ").removesuffix(" when the model runs")
    assert notes == {
        "llama": "2 values and the stream learned, 2 tensors by Hadamard",
        "gpt2": "2 values and no stream learned, 6 tensors by Hadamard",
        "bert": "2 values and no stream learned, 7 tensors by Hadamard",  # the pooler's as well
        "vit": "2 values and no stream learned, 7 tensors by Hadamard",
        "clip": "2 values and no stream learned, 6 tensors by Hadamard",
        "whisper": "5 values and no stream learned, 12 tensors by Hadamard",
    }
