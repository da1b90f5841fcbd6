"""Logs over time: maps hold the log's numbers, what moved most and when, `skipless report LOG`."""

import csv
import json
import math
import re

import numpy as np
import pytest

from skipless.cli import main
from skipless.errors import UserError
from skipless.report.timeline import QUANTITIES, make_timeline, read_timeline
from skipless.report.timeline_page import draw, page_text, values
from skipless.rundir import RunDir

SITES = ["embed", "layers.0:output", "layers.1:output", "layers.2:output"]


def log(path, steps=(1, 5, 10, 20), seed=0):
    """A log with every followed quantity of sites, heavy-tailed and of both signs."""
    rng = np.random.default_rng(seed)
    run = RunDir(path)
    path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        run.append("probes.jsonl", {
            "step": step,
            "sites": [
                {"site": site, "layer": None, "mean": rng.normal(), "std": rng.exponential(),
                 "kurtosis": float(rng.standard_t(1)), "max_over_std": 1 + rng.exponential(),
                 "gradient_norm": rng.exponential(), "token_sqnr W8A8": 30 * rng.random()}
                for site in SITES
            ],
            "gradient_norms": {"0": rng.exponential(), "1": rng.exponential()},
        })  # fmt: skip
    return run


def test_the_maps_are_the_numbers_of_the_log(tmp_path):
    run = log(tmp_path / "log")
    timeline = read_timeline(tmp_path / "log")
    rows = run.read_jsonl("probes.jsonl")
    assert list(timeline.maps) == [
        "kurtosis", "max_over_std", "rms", "token_sqnr W8A8", "gradient_norm", "gradient_norms"
    ]  # fmt: skip
    for key in ("kurtosis", "max_over_std", "token_sqnr W8A8", "gradient_norm"):
        data = timeline.maps[key]
        assert data.places == tuple(SITES) and data.steps == (1, 5, 10, 20)
        expected = [[row["sites"][i][key] for row in rows] for i in range(len(SITES))]
        assert [list(line) for line in data.values] == expected
    rms = np.array(timeline.maps["rms"].values)
    mean, std = (
        np.array([[s[k] for s in row["sites"]] for row in rows]).T for k in ("mean", "std")
    )
    np.testing.assert_allclose(rms, np.sqrt(mean**2 + std**2), rtol=1e-14)
    norms = timeline.maps["gradient_norms"]
    assert norms.values[1] == tuple(row["gradient_norms"]["1"] for row in rows)
    assert len(values(timeline)) == 5 * 16 + 8


@pytest.mark.parametrize("seed", range(3))
def test_moves_are_ranges_and_steepest_stretches(tmp_path, seed):
    log(tmp_path / "log", seed=seed)
    timeline = read_timeline(tmp_path / "log")
    sizes = {
        "kurtosis": lambda x: np.sign(x) * np.log10(1 + np.abs(x)),
        "token_sqnr W8A8": lambda x: x / 20,
    }
    assert [m["moved"] for m in timeline.moves] == sorted(
        (m["moved"] for m in timeline.moves), reverse=True
    )
    assert len(timeline.moves) == 5 * 4 + 2
    for move in timeline.moves:
        data = timeline.maps[move["key"]]
        x = np.array(data.values[data.places.index(move["place"])])
        size = sizes.get(move["key"], np.log10)(x)
        assert move["moved"] == pytest.approx(np.ptp(size), rel=1e-12)
        at = int(np.abs(np.diff(size)).argmax())
        assert (move["from_step"], move["to_step"]) == (data.steps[at], data.steps[at + 1])
        assert (move["before"], move["after"]) == (x[at], x[at + 1])
        assert (move["first"], move["last"]) == (x[0], x[-1])


def test_a_planted_jump_is_named_with_its_steps(tmp_path):
    (tmp_path / "log").mkdir()
    run = RunDir(tmp_path / "log")
    for step in range(0, 50, 10):
        sites = [
            {"site": name, "kurtosis": 0.1 + (900.0 if i == 2 and step >= 30 else 0.0)}
            for i, name in enumerate(SITES)
        ]
        run.append("probes.jsonl", {"step": step, "sites": sites})
    lines = read_timeline(tmp_path / "log").lines()
    assert "excess kurtosis of layers.1:output" in lines[0]
    assert "most between steps 20 and 30, 0.10 to 900.10" in lines[0] and len(lines) == 1


def test_sites_of_one_tensor_take_one_line():
    rows = [
        {"step": step, "sites": [{"site": s, "kurtosis": 1.0 * step} for s in ("norm", "q", "k")]}
        for step in (1, 9)
    ]
    timeline = make_timeline(rows, name="x", about="", losses={})
    (line,) = timeline.lines()
    assert "norm (2 more like it)" in line and len(timeline.moves) == 3


def test_traced_gradients_and_losses_come_from_metrics(tmp_path):
    run = log(tmp_path / "log", steps=(10,))
    run.append("metrics.jsonl", {"step": 3, "loss": 2.5, "gradient_norms": {"0": 7.0}})
    run.append("metrics.jsonl", {"step": 4, "loss": 2.0, "held_out_loss": None})
    timeline = read_timeline(tmp_path / "log")
    assert timeline.maps["gradient_norms"].steps == (3, 10)
    assert timeline.maps["gradient_norms"].values[0][0] == 7.0
    assert timeline.losses["loss"] == [(3, 2.5), (4, 2.0)]
    assert math.isnan(timeline.losses["held_out_loss"][0][1])


def test_what_is_not_finite_comes_first(tmp_path):
    run = log(tmp_path / "log")
    sites = [{"site": "layers.1:output", "kurtosis": None, "nonfinite": 4}]
    run.append("probes.jsonl", {"step": 30, "sites": sites})
    timeline = read_timeline(tmp_path / "log")
    assert timeline.lines()[0] == "NaN or infinity at step 30, first in layers.1:output"
    assert "NaN" in timeline.missing[0] and len(timeline.lines()) <= 10


def test_what_has_no_measurements_says_what_to_do(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"without probes .*probe.every above 0.*--checkpoints all"):
        read_timeline(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no measurement over time"):
        read_timeline(tmp_path / "empty")
    with pytest.raises(UserError, match="does not exist"):
        read_timeline(tmp_path / "nowhere")
    RunDir(tmp_path / "empty").append("probes.jsonl", {"step": 1, "sites": [{"site": "a", "x": 1}]})
    with pytest.raises(UserError, match="no number that can be followed"):
        read_timeline(tmp_path / "empty")


def test_one_step_has_not_moved(tmp_path):
    log(tmp_path / "log", steps=(7,))
    timeline = read_timeline(tmp_path / "log")
    assert timeline.lines() == ["nothing moved between steps 7 and 7"]
    assert any("one measured step (7)" in text for text in timeline.missing)


def test_every_quantity_has_a_figure_and_names_are_escaped():
    rows = [
        {"step": step, "sites": [{"site": "<script>x$y$", "token_sqnr W8A8": 2.0 * step}
                                 | dict.fromkeys(QUANTITIES, 1.0 + step)]}
        for step in (1, 2)
    ]  # fmt: skip
    losses = {"held_out_loss": [(1, 2.0), (2, 1.5)]}
    timeline = make_timeline(rows, name="<img>", about="a & b", losses=losses)
    figures = draw(timeline)
    assert len(figures) == len(QUANTITIES) + 2
    assert len({figure.name for figure in figures}) == len(figures)
    text = page_text(timeline, figures)
    assert "<script>x" not in text and "<img>" not in text and "a &amp; b" in text
    assert "src=" not in text and "http" not in re.sub(r"http-equiv|www\.w3\.org", "", text)


def test_report_opens_a_foreign_log(tmp_path, capsys, tiny_run):
    log(tmp_path / "log")
    out = tmp_path / "r.html"
    for _ in range(2):  # its own files are written over
        assert main(["report", str(tmp_path / "log"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert " 1. " in shown and str(out) in shown
    with open(tmp_path / "r-values.csv") as file:
        assert len(list(csv.DictReader(file))) == 5 * 16 + 8
    assert set(json.loads((tmp_path / "r.json").read_text())["maps"]) >= {"kurtosis", "rms"}
    assert (tmp_path / "r-kurtosis.png").stat().st_size > 1000
    assert main(["report", str(tmp_path / "log"), str(tiny_run), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"`skipless report {tmp_path / 'log'}` alone" in error
    assert main(["report", str(tmp_path), "--out", str(out)]) == 2
    assert f"`skipless report {tmp_path / 'log'}` shows one" in capsys.readouterr().err


def test_a_run_of_ours_has_the_same_page(tiny_run):
    timeline = read_timeline(tiny_run)
    assert timeline.steps and {"kurtosis", "gradient_norms"} <= timeline.maps.keys()
    assert "loss" in timeline.losses and "held_out_loss" in timeline.losses
