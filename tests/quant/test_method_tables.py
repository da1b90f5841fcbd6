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
from skipless.rundir import RunDir
from skipless.train import load_run


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
