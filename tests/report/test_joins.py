"""The comparison of connections: numbers against hand-made logs, criteria, page."""

import json
import math
import re

import pytest

from skipless import recipes
from skipless.errors import UserError
from skipless.files import to_strict_json
from skipless.jsonable import override
from skipless.recipes.connections import KINDS, name_of
from skipless.report import join_numbers
from skipless.report.join_page import build_connection_report
from skipless.report.load import load_run

STEPS, WARM_UP = 40, 10
UNIGRAM = 6.2


def fabricate(
    base, kind, *, seed=0, loss=4.7, ratio=1.0, swing=0.1, gain=None, authors=False, done=True,
    layers=4,
):  # fmt: skip
    """A run whose gradients fall by `ratio` from last to first layer and swing by +-swing (log)."""
    name = name_of(kind, layers, authors=authors)
    size = 32 * 32 if authors else 8 * 128
    config = override(
        recipes.get(name),
        {"train.num_tokens": STEPS * size, "train.warmup_steps": WARM_UP, "train.seed": seed},
    )
    path = base / f"{name}-seed{seed}"
    path.mkdir(parents=True)
    rows, seconds = [], 0.0
    for step in range(1, (STEPS if done else 20) + 1):
        seconds += 0.25
        rows.append({"step": step, "tokens": step * size, "loss": loss + 2 / step, "lr": 1e-3,
                     "grad_norm": 1.0, "seconds": seconds})  # fmt: skip
        if step == 1 or step % 5 == 0:
            up = math.exp(swing / 2 if step // 5 % 2 else -swing / 2)
            norms = {str(i): up * ratio ** (1 - i / (layers - 1)) for i in range(layers)}
            rows[-1]["gradient_norms"] = {"embed_tokens": 9.0, **norms, "norm": 9.0}
            rows[-1]["gains"] = {} if gain is None else {
                f"layers.{i}.{part}_connection.b": sign * gain * step / STEPS
                for i in range(layers) for part, sign in (("attention", 1), ("mlp", -1))
            }  # fmt: skip
        if step % 20 == 0:
            seconds += 3.0  # measuring is no part of a step
            rows.append({"step": step, "held_out_loss": loss + (STEPS - step) / STEPS})
    write(path / "config.json", config.to_dict())
    write(path / "metrics.jsonl", *rows)
    write(path / "data.json", {"unigram_loss": UNIGRAM})
    write(path / "environment.json", {"torch": "2.13.0"})
    if done:
        write(path / "train.json", {"held_out_loss": loss, "peak_memory_bytes": 400 * 2**20})
        if authors:
            write(path / "eval.json", {"accuracy": loss})
    return path


def write(path, *values):
    path.write_text("\n".join(map(to_strict_json, values)) + "\n")


def rows_of(*paths):
    (table,) = join_numbers.tables([load_run(path) for path in paths])
    return {row.kind: row for row in table.rows}, table


def test_numbers_against_the_hand_made_log(tmp_path):
    found, table = rows_of(
        fabricate(tmp_path, "residual"),
        fabricate(tmp_path, "rezero", loss=4.8, ratio=0.5, swing=0.15, gain=0.4),
        fabricate(tmp_path, "rezero", loss=4.9, ratio=0.5, swing=0.15, gain=0.4, seed=1),
    )
    row = found["rezero"]
    assert (row.num_seeds, row.tokens) == (2, STEPS * 1024)
    assert row.metric == pytest.approx(4.85)
    assert row.spread == pytest.approx(0.1 / math.sqrt(2))
    assert row.share == pytest.approx(4.7 / 4.85)
    assert row.learned == pytest.approx((UNIGRAM - 4.85) / (UNIGRAM - 4.7))
    assert row.ratio == pytest.approx(0.5) and row.first_step_ratio == pytest.approx(0.5)
    assert row.oscillation == pytest.approx(0.15)
    assert row.step_seconds == pytest.approx(0.25)  # not the 3 s of a measurement
    assert row.peak_memory == 400 * 2**20
    assert row.gains == {"b": pytest.approx(0.4)}  # half of them negative
    assert list(row.gradient_norms["first_step"]) == ["0", "1", "2", "3"]
    assert found["residual"].verdict == "baseline" and not found["residual"].criteria
    assert table.name == "4" and not table.authors


@pytest.mark.parametrize(
    ("changes", "failed", "words"),
    [
        ({}, set(), "keeps up"),
        ({"loss": 4.74}, set(), "keeps up"),
        ({"loss": 4.8}, {"same range", "learned"}, "loss +2.1%; learned 93%"),
        ({"loss": 5.2}, {"same range", "drop", "learned"}, "loss +10.6%; beyond 3%"),
        ({"ratio": 0.05}, {"even gradient"}, "gradient decays, first/last 0.05"),
        ({"ratio": 30.0}, {"even gradient"}, "gradient grows, first/last 30"),
        ({"swing": 0.25}, {"steady gradient"}, "gradient oscillates, x 2.5"),
    ],
)
def test_every_criterion_can_fail_alone(tmp_path, changes, failed, words):
    found, table = rows_of(fabricate(tmp_path, "residual"), fabricate(tmp_path, "gated", **changes))
    criteria = found["gated"].criteria
    assert {name for name, value in criteria.items() if not value} == failed
    assert words in found["gated"].verdict
    assert table.summary.startswith(f"{int(not failed)} of 1 keep up")


def test_seeds_widen_the_range_and_the_baselines_own_ratio_counts(tmp_path):
    found, _ = rows_of(
        *(fabricate(tmp_path, "residual", seed=s, loss=4.7 + d, ratio=5.0)
          for s, d in enumerate((-0.06, 0.0, 0.06))),
        *(fabricate(tmp_path, "learned", seed=s, loss=4.8, ratio=40.0) for s in range(3)),
    )  # fmt: skip
    assert found["learned"].criteria["same range"] and found["learned"].criteria["even gradient"]


def test_a_row_is_measured_against_the_baseline_of_its_optimiser(tmp_path):
    found, _ = rows_of(
        fabricate(tmp_path, "residual", loss=4.0), fabricate(tmp_path, "residual-muon", loss=4.5),
        fabricate(tmp_path, "none-orthogonal-muon", loss=5.0),
    )  # fmt: skip
    assert found["none-orthogonal-muon"].share == pytest.approx(0.9)
    assert found["residual-muon"].verdict == "baseline"


def test_a_baseline_that_learned_nothing_is_no_yardstick_for_learning(tmp_path):
    found, table = rows_of(
        fabricate(tmp_path, "residual", loss=6.3), fabricate(tmp_path, "none", loss=6.3)
    )
    assert found["none"].learned is None and "not known: learned" in found["none"].verdict
    assert table.summary.startswith("Too small for conclusions: no baseline is 0.5 nats better")
    assert "0 of 1 keep up" in table.summary
    _, learned = rows_of(fabricate(tmp_path / "b", "residual", loss=4.0))
    assert "Too small" not in learned.summary


def test_classifiers_are_judged_by_accuracy(tmp_path):
    found, table = rows_of(
        fabricate(tmp_path, "residual", loss=0.85, authors=True),
        fabricate(tmp_path, "none", loss=0.4, authors=True),
    )
    assert table.authors and table.name == "author-4"
    row = found["none"]
    assert row.share == pytest.approx(0.4 / 0.85)
    assert row.learned == pytest.approx(0.15 / 0.6)  # over guessing one of four
    assert row.criteria["same range"] is False and row.criteria["drop"] is False


def test_unfinished_runs_and_other_recipes(tmp_path, tiny_run):
    found, _ = rows_of(
        fabricate(tmp_path, "residual"), fabricate(tmp_path, "none"),
        fabricate(tmp_path, "none", seed=1, done=False),
        fabricate(tmp_path, "anneal", done=False), tiny_run,
    )  # fmt: skip
    assert found["none"].num_seeds == 1
    assert found["none"].verdict == "seed 1 stopped at step 20 of 40"
    assert found["anneal"].metric is None and "stopped at step 20" in found["anneal"].verdict
    with pytest.raises(UserError, match="none of the 1 runs"):
        build_connection_report([tiny_run], tmp_path / "report.html")


def test_the_page_its_numbers_and_its_tables(tmp_path):
    runs = [
        fabricate(tmp_path, kind, gain=0.3, seed=seed, ratio=0.5 if kind == "none" else 1.0)
        for kind in ("residual", "rezero", "none", "interpolate", "no-mlp-skip")
        for seed in (0, 1)
    ]
    runs += [fabricate(tmp_path, k, loss=0.9, authors=True) for k in ("residual", "none")]
    out = build_connection_report(runs, tmp_path / "report.html")
    page = out.read_text()
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")
    for kind in ("residual", "rezero", "none", "interpolate", "no-mlp-skip"):
        assert KINDS[kind].label in page and KINDS[kind].about in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"var\((--row-\d+)\)", page))
    assert used and all(f"{name}:" in page for name in used)
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert [t["name"] for t in numbers["tables"]] == ["4", "author-4"]
    assert {r["kind"]: r["num_seeds"] for r in numbers["tables"][0]["rows"]}["none"] == 2
    assert {"4-gains", "4-removed", "4-trajectories", "author-4-removed"} <= set(numbers["figures"])
    for name in numbers["figures"]:
        png = (tmp_path / f"report-{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
    table = (tmp_path / "report.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and "| ReZero | keeps up | 4.700" in table
    build_connection_report(runs, out)  # and again over its own files
