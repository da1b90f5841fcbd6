"""Run directories with every kind of hole in them still load, and the holes are named."""

import json
import math

import pytest

from skipless.config import ConnectionConfig, ConnectionOverride
from skipless.errors import UserError
from skipless.report import find_runs, load_run, load_runs
from skipless.report.load import PARTS, number


def test_a_whole_run_has_nothing_missing(make, tmp_path):
    run = load_run(make(tmp_path / "run", label="a label"))
    assert run.label == "a label"
    assert run.missing == ()
    assert (run.optimizer, run.family, run.tokens) == ("Muon", "residual", 200 * 1024)


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_part_is_named(make, tmp_path, name):
    run = load_run(make(tmp_path / "run", without=(name,)))
    assert any(name in sentence for sentence in run.missing)


@pytest.mark.parametrize("name", [n for n in PARTS if n.endswith(".json")])
@pytest.mark.parametrize("content", ["{", "", "[]", "3", "null", '"text"'])
def test_an_unreadable_part_is_named_and_does_no_harm(make, tmp_path, name, content):
    path = make(tmp_path / "run")
    (path / name).write_text(content)
    assert any(name in sentence for sentence in load_run(path).missing)


def test_a_torn_last_line_is_dropped(make, tmp_path):
    path = make(tmp_path / "run")
    whole = len(load_run(path).metrics)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 201, "lo')
    assert len(load_run(path).metrics) == whole


def test_a_run_that_stopped_early_says_so(make, tmp_path):
    path = make(tmp_path / "run", steps=100)
    config = json.loads((path / "config.json").read_text())
    config["train"]["num_tokens"] *= 2
    (path / "config.json").write_text(json.dumps(config))
    run = load_run(path)
    assert run.unfinished == "step 100 of 200"
    assert f"not finished, step 100 of 200; continue with: skipless train {path}" in run.missing


def test_what_is_no_run_is_refused_in_one_sentence(make, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="contains no run"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match="at least one"):
        load_runs([])
    path = make(tmp_path / "run")
    with pytest.raises(UserError, match="given twice"):
        load_runs([path, tmp_path / "." / "run"])


def test_a_directory_of_runs_stands_for_them(make, tmp_path):
    paths = [make(tmp_path / "all" / name) for name in ("b", "a")]
    (tmp_path / "all" / "report.html").write_text("")
    assert find_runs([tmp_path / "all"]) == sorted(paths)
    assert find_runs([paths[0], tmp_path / "all"]) == [paths[0], paths[1]]


@pytest.mark.parametrize(
    ("connection", "family"),
    [
        (ConnectionConfig(kind="none"), "residual-free"),
        (ConnectionConfig(kind="anneal"), "residual-free"),
        (ConnectionConfig(kind="fixed", a=0.0), "residual-free"),
        (ConnectionConfig(kind="fixed", a=0.5), "mixed"),
        (ConnectionConfig(kind="rezero"), "mixed"),
    ],
)
def test_family_of_a_connection(make, tmp_path, connection, family):
    assert load_run(make(tmp_path / "run", connection=connection)).family == family


def test_a_skip_in_one_sublayer_only_is_mixed(make, edit, tmp_path):
    path = make(tmp_path / "run")
    rule = ConnectionOverride(connection=ConnectionConfig(kind="none"), sublayer="mlp").to_dict()
    edit(path, "config.json", lambda c: c["model"].update(connection_overrides=[rule]))
    run = load_run(path)
    assert (run.family, run.connection) == ("mixed", "residual / none")


def test_number_tells_absent_from_not_finite():
    assert number({}, "x") is None
    assert number(None, "x") is None
    assert all(math.isnan(number({"x": v}, "x")) for v in (None, "text", "nan", math.inf, True))
    assert number({"x": 3}, "x") == 3.0
