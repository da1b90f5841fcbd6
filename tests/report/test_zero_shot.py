"""Zero-shot tasks in a report: where tasks.json is there, and nothing about them elsewhere."""

from __future__ import annotations

import json
import re

import pytest

from skipless.report import build_report
from skipless.report.comparing import compare
from skipless.report.html import page
from skipless.report.load import load_runs
from skipless.report.plots import OPTIONAL, draw_all
from skipless.report.verdict import verdict
from skipless.report.zero_shot import task_numbers

EIGHT = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "social_iqa",
         "winogrande")  # fmt: skip


def results(tasks=("boolq", "piqa"), shift=0.0, step=None):
    """tasks.json of `skipless eval`, at full precision and W8A6."""
    rows = []
    for scheme in ("full precision", "W8A6"):
        low = 0.0 if scheme == "full precision" else 0.1
        entries = {}
        for place, name in enumerate(tasks):
            value = 0.5 + 0.02 * place + shift - low
            entry = {"acc": value, "acc_stderr": 0.031, "num_ties": 0}
            if name in ("piqa", "hellaswag"):
                entry |= {"acc_norm": value + 0.011, "acc_norm_stderr": 0.032}
            if low:
                metric = "acc_norm" if "acc_norm" in entry else "acc"
                entry["against_full_precision"] = {
                    metric: {"difference": -0.1, "interval": [-0.15, -0.05]}
                }
            entries[name] = entry
        row = {"scheme": scheme, "tasks": entries, "average": 0.515 + shift - low}
        if low:
            row |= {"average_difference": -0.1, "average_interval": [-0.13, -0.07]}
        rows.append(row)
    about = [{"name": name, "chance": 0.5, "num_questions": 40} for name in tasks]
    found = {"tasks": about, "rows": rows, "scope": "linear"}
    return found if step is None else found | {"measured": {"step": step}}


def quick_page(runs):
    comparison = compare(load_runs(runs))
    return page(comparison, verdict(comparison), [], [], title="t", command="c")


@pytest.fixture
def two(make, tmp_path):
    """Two rows, of which the first was asked."""
    runs = [make(tmp_path / "one", label="one"), make(tmp_path / "two", label="two", loss=4.4)]
    (runs[0] / "tasks.json").write_text(json.dumps(results()))
    return runs


def test_table_of_what_was_asked(two):
    text = quick_page(two)
    (part,) = re.findall(r"<h2>Zero-shot tasks</h2>(.*?)</section>", text, re.S)
    plain = re.sub(r"<[^>]+>", " ", part)
    assert part.index("full precision") < part.index("W8A6")
    assert "0.500 ± 0.031" in plain and "0.531 ± 0.032" in plain, "acc, and acc_norm of piqa"
    assert "-0.100 [-0.150, -0.050]" in plain and "-0.100 [-0.130, -0.070]" in plain
    assert "guessing" in plain and "two" not in plain.split(), "which was not asked"
    assert "The paper's averages" not in text


def test_reports_without_tasks_say_nothing_of_them(two):
    (two[0] / "tasks.json").unlink()
    text = quick_page(two)
    assert "Zero-shot" not in text and "tasks.json" not in text


def test_figure_and_numbers_beside_the_page(two, tmp_path, monkeypatch):
    from skipless.report import plots

    monkeypatch.setattr(plots, "FIGURES", ())  # which take seconds
    figures, without = draw_all(compare(load_runs(two)))
    assert [figure.name for figure in figures] == ["tasks"] and not without
    assert draw_all(compare(load_runs(two[1:]))) == ([], [])
    out = build_report(two, tmp_path / "report.html")
    numbers = json.loads(out.with_suffix(".json").read_text())["tasks"]
    assert list(numbers) == ["one"]
    assert numbers["one"]["W8A6"]["average"]["low"] == -0.13
    assert numbers["one"]["full precision"]["piqa"]["value"] == pytest.approx(0.531)
    assert (tmp_path / "report-tasks.png").is_file()
    assert OPTIONAL[0][1] in out.read_text()


def test_the_papers_averages_beside_all_eight(two):
    (two[0] / "tasks.json").write_text(json.dumps(results(EIGHT)))
    text = quick_page(two)
    assert "The paper's averages over these tasks" in text and "0.449" in text


def test_results_of_lm_eval(two):
    """Which names no average, no chance and no number of questions."""
    found = results()
    del found["tasks"]
    for row in found["rows"]:
        row.pop("average")
    (two[0] / "tasks.json").write_text(json.dumps(found))
    row = compare(load_runs(two)).rows[0]
    average = task_numbers(row)["full precision"]["average"]
    assert average["value"] == pytest.approx((0.5 + 0.531) / 2) and average["chance"] is None
    assert "Zero-shot tasks" in quick_page(two)


def test_written_answers_and_a_ninth_task(two):
    """A task without acc is shown by what stands for it; eight other tasks are not the paper's."""
    found = results(("boolq", *(f"mine_{n}" for n in range(8))))
    for row in found["rows"]:
        row["tasks"]["gsm8k"] = {"exact_match (strict-match)": 0.377}
    (two[0] / "tasks.json").write_text(json.dumps(found))
    text = quick_page(two)
    assert "0.377" in text and "The paper's averages" not in text


def test_seeds_are_averaged(make, tmp_path):
    runs = [make(tmp_path / f"s{seed}", label="one", seed=seed) for seed in (0, 1)]
    for seed, run in enumerate(runs):
        (run / "tasks.json").write_text(json.dumps(results(shift=0.1 * seed)))
    (row,) = compare(load_runs(runs)).rows
    found = task_numbers(row)["full precision"]["boolq"]
    assert found["value"] == pytest.approx(0.55) and "error" not in found


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{", '{"rows": 3}', '{"rows": [3, {"scheme": null, "tasks": [1]}]}',
        '{"rows": [{"scheme": "W8A8", "tasks": {"piqa": 7, "boolq": {"acc": null}}}]}',
        json.dumps(results(step=12345)),
    ],
)  # fmt: skip
def test_damaged_files_and_other_weights_are_passed_over(two, content):
    (two[0] / "tasks.json").write_text(content)
    text = quick_page(two)
    assert "0.500 ± 0.031" not in text


def test_hostile_names_are_escaped(two):
    found = results(("<b>piqa</b>", "boolq"))
    found["rows"][0]["scheme"] = "<script>"
    (two[0] / "tasks.json").write_text(json.dumps(found))
    text = quick_page(two)
    assert "<b>piqa" not in text and "<script>" not in text and "&lt;script&gt;" in text
