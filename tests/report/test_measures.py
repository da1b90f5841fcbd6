"""Numbers taken from a run's files, recomputed by hand."""

import json
import math

import pytest

from skipless.config import ConnectionConfig
from skipless.report import compare, load_run, load_runs, measures
from skipless.report.inside import (
    attention_by_depth,
    gains_over_time,
    gradients_by_depth,
    uniform_entropy,
)
from skipless.report.ranks import spearman

FREE = ConnectionConfig(kind="none")


@pytest.mark.parametrize(
    ("layers", "middle"), [(1, [0]), (2, [1]), (3, [1]), (8, [3, 4, 5]), (12, [4, 5, 6, 7])]
)
def test_middle_third(layers, middle):
    assert list(measures.middle_third(layers)) == middle


def test_kurtosis_is_taken_at_the_block_output_only():
    def site(layer, kurtosis, sublayer="mlp", kind="stream"):
        return {"kind": kind, "layer": layer, "sublayer": sublayer, "kurtosis": kurtosis}

    sites = [site(0, 100.0), site(1, -2.0), site(2, 100.0)]
    sites += [site(1, 55.0, "attention"), site(1, 77.0, kind="activation_output")]
    assert measures.middle_kurtosis({"sites": sites}, 3) == 2.0
    assert measures.middle_kurtosis({"sites": []}, 3) is None
    sites[1]["kurtosis"] = None
    assert math.isnan(measures.middle_kurtosis({"sites": sites}, 3))


def test_worst_site_and_its_gap(make, edit, tmp_path):
    path = make(tmp_path / "run")
    rows = [
        {"site": "exact", "layer": 0, "sqnr": None, "ideal": 18.9, "gap": None},
        {"site": "bad", "layer": 0, "sqnr": 5.0, "ideal": 18.9, "gap": 0.0},
        {"site": "good", "layer": 1, "sqnr": 20.0, "ideal": 18.9, "gap": 0.0},
    ]
    edit(path, "quant.json", lambda q: q["sqnr"].update(rows=rows))
    run = load_run(path)
    worst = measures.worst_site(run)
    assert (worst["site"], worst["sqnr"], worst["scheme"]) == ("bad", 5.0, "W4A4")
    assert worst["gap"] == pytest.approx(13.9)
    assert measures.sqnr_by_depth(run)[0] == ([0.0, 1.0], [5.0, 20.0])


def test_error_ends_with_the_last_layer_whatever_the_order(make, edit, tmp_path):
    path = make(tmp_path / "run", layers=2)
    rows = [{"layer": 1, "sublayer": "mlp", "r": 0.7}, {"layer": 0, "sublayer": "mlp", "r": 0.2},
            {"layer": 1, "sublayer": "attention", "r": 0.4}]  # fmt: skip
    edit(path, "quant.json", lambda q: q["error"].update(rows=rows))
    run = load_run(path)
    assert measures.error_by_depth(run) == ([1.0, 1.5, 2.0], [0.2, 0.4, 0.7])
    assert measures.final_error(run) == 0.7


def test_smoothing_keeps_a_constant_and_leaves_gaps(make, edit, tmp_path):
    path = make(tmp_path / "run")
    lines = [f'{{"step": {i}, "tokens": {i}, "loss": {"null" if i == 7 else 2.5}}}'
             for i in range(1, 200)]  # fmt: skip
    (path / "metrics.jsonl").write_text("\n".join(lines))
    tokens, losses = measures.training_curve(load_run(path))
    assert len(tokens) == 199
    assert math.isnan(losses[6])
    assert [v for v in losses if not math.isnan(v)] == pytest.approx([2.5] * 198)


def test_final_loss_falls_back_from_file_to_file(make, tmp_path):
    def loss(*without):
        name = str(len(list(tmp_path.iterdir())))
        return measures.held_out_loss(load_run(make(tmp_path / name, loss=3.25, without=without)))

    assert loss() == loss("eval.json") == loss("eval.json", "quant.json") == 3.25
    assert loss("eval.json", "quant.json", "metrics.jsonl") is None


def test_attention_entropy_is_a_share_of_uniform(make, tmp_path):
    run = load_run(make(tmp_path / "run"))
    expected = sum(math.log(n) for n in range(1, 129)) / 128
    assert uniform_entropy(run) == pytest.approx(expected)
    layers, values = attention_by_depth(run, "entropy")
    assert layers == list(range(8))
    assert values[0] == pytest.approx(1.6 / expected)


def test_gradients_and_gains_over_time(make, tmp_path):
    run = load_run(make(tmp_path / "run", connection=ConnectionConfig(kind="anneal")))
    layers, norms = gradients_by_depth(run, -1)
    assert layers == list(range(8))  # "embed_tokens" is no layer
    assert all(n > 0 for n in norms)
    tokens, a = gains_over_time(run, "a")
    assert tokens == [51_200, 102_400, 153_600, 204_800]
    assert a == [0.5, 0.0, 0.0, 0.0]
    assert gains_over_time(run, "b") == ([], [])


def test_seeds_become_one_row_with_their_spread(make, tmp_path):
    losses = [4.0, 4.2, 4.4]
    runs = [make(tmp_path / f"s{i}", label=f"row, seed {i}", seed=i, loss=loss)
            for i, loss in enumerate(losses)]  # fmt: skip
    (row,) = compare(load_runs(runs)).rows
    assert row.num_seeds == 3
    assert row.loss == pytest.approx(4.2)
    assert row.standard_error == pytest.approx(0.2 / math.sqrt(3))
    assert row.error_over == "seeds"


def test_rows_that_differ_keep_their_own_label(make, tmp_path):
    runs = [make(tmp_path / "a", label="same"), make(tmp_path / "b", label="same", layers=4)]
    comparison = compare(load_runs(runs))
    assert [row.label for row in comparison.rows] == ["same (a)", "same (b)"]
    assert any("shape" in c for c in comparison.caveats)


def test_unequal_tokens_compare_at_the_smaller_number(make, tmp_path):
    long = make(tmp_path / "long", steps=400, loss=4.0)
    short = make(tmp_path / "short", steps=200, loss=4.5, connection=ConnectionConfig(kind="none"))
    comparison = compare(load_runs([long, short]))
    (pair,) = comparison.pairs
    assert not pair.equal_tokens
    assert pair.loss == 4.5
    # The long run's curve at half its length: its end plus 3.1 exp(-3).
    assert pair.reference_loss == pytest.approx(4.0 + 3.1 * math.exp(-3))
    assert any("204,800 to 409,600" in caveat for caveat in comparison.caveats)


def test_the_reference_is_the_strongest_residual_row(make, tmp_path):
    runs = [make(tmp_path / "plain", label="plain", loss=4.6),
            make(tmp_path / "control", label="control", loss=4.4, note="same start", layers=4),
            make(tmp_path / "other", label="other", loss=4.0, optimizer="adamw"),
            make(tmp_path / "free", loss=4.62, connection=FREE)]  # fmt: skip
    (pair,) = compare(load_runs(runs)).pairs
    assert pair.reference.label == "control"
    assert pair.gap == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("xs", "ys"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40]),
        ([1, 2, 3, 4], [4, 3, 2, 1]),
        ([3.0, 1.0, 4.0, 1.0, 5.0, 9.0], [2.0, 7.0, 1.0, 8.0, 2.0, 8.0]),
        ([0.1, 7.0, -2.0, 3.0, 3.0, 8.0], [5, 5, 5, 1, 2, 9]),
    ],
)
def test_spearman_against_scipy(xs, ys):
    stats = pytest.importorskip("scipy.stats")
    assert spearman(xs, ys) == pytest.approx(stats.spearmanr(xs, ys).statistic, abs=1e-12)


def test_spearman_of_too_little():
    assert spearman([1, 2, 3], [1, 2, 3]) is None
    assert spearman([1, 2, 3], [1, 2, 3], least=3) == pytest.approx(1)
    assert spearman([1.0] * 4, [1.0, 2.0, 3.0, 4.0]) is None


def test_traced_steps_stand_in_where_no_probe_was_taken(make, tmp_path):
    """`probe.trace_every` writes gradient norms and gains to metrics.jsonl."""
    path = make(tmp_path / "traced", without=("probes.jsonl",))
    rows = [
        {"step": step, "tokens": step, "loss": 4.0, "gradient_norms": {"0": step, "1": 2.0 * step},
         "gains": {"layers.0.attention_connection.a": 1 / step,
                   "layers.0.mlp_connection.a": -1 / step}}
        for step in (1, 4)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    run = load_run(path)
    assert gradients_by_depth(run, 0) == ([0.0, 1.0], [1.0, 2.0])
    assert gradients_by_depth(run, -1) == ([0.0, 1.0], [4.0, 8.0])
    per_step = run.config.train.batch_size * run.config.train.sequence_length
    assert gains_over_time(run, "a") == ([per_step, 4.0 * per_step], [1.0, 0.25])
    assert gains_over_time(run, "b") == ([], [])
