"""Measuring a finished run: every file, nothing twice, and what goes wrong in one sentence."""

import dataclasses
import json
import math

import pytest

from skipless.errors import UserError
from skipless.measure import (
    evaluate_run,
    held_out_batches,
    measure_all,
    probe_run,
    quantize_run,
    sample_run,
)
from skipless.train import load_run

FILES = ("eval.json", "quant.json", "probe.json", "samples.json")


@pytest.fixture
def run(copy_run, tmp_path):
    return load_run(copy_run(tmp_path / "run"))


def read(run, name):
    return json.loads((run.path / name).read_text())


def test_measure_all_writes_every_file_once(run):
    for name in FILES:
        (run.path / name).unlink()
    said = []
    measure_all(run, say=said.append)
    assert sorted(said) == sorted(f"writing {name}" for name in FILES)
    assert all((run.path / name).exists() for name in FILES)
    said.clear()
    (run.path / "samples.json").unlink()
    measure_all(run, say=said.append)
    assert said == ["writing samples.json"]


def test_what_does_not_belong_to_these_weights_and_settings_is_measured_again(run):
    whole = {name: read(run, name) for name in FILES}
    run.step -= 1
    evaluate_run(run)  # as of an earlier step
    run.step += 1
    probe_run(run, num_tokens=32)
    (run.path / "samples.json").write_bytes(b"\xff")
    (run.path / "quant.json").write_text('{"mine": 1}')
    said = []
    measure_all(run, say=said.append)
    assert said[0:2] == ["writing eval.json", "writing samples.json"]
    assert {f"writing {name}" for name in FILES} <= set(said)
    after = {name: read(run, name) for name in FILES}
    assert after["quant.json"] == whole["quant.json"]
    assert after["eval.json"] == whole["eval.json"]
    assert after["probe.json"]["measured"] == whole["probe.json"]["measured"]


def test_an_incomplete_table_is_completed_and_a_complete_one_is_kept(run):
    whole = read(run, "quant.json")
    (run.path / "quant.json").unlink()
    result = quantize_run(run, schemes=("W8A8", "W8A8"), scopes=("linear", "linear"))
    assert [(r["scheme"], r["scope"]) for r in result["rows"]] == [("W8A8", "linear")]
    said = []
    measure_all(run, say=said.append)
    assert said[0] == "writing quant.json"
    table = read(run, "quant.json")
    assert sorted(map(str, table["rows"])) == sorted(map(str, whole["rows"]))
    # A row more joins the table; rows on other tokens do not replace it.
    quantize_run(run, schemes=("W6A6",), scopes=("linear",))
    table = read(run, "quant.json")
    assert len(table["rows"]) == len(whole["rows"]) + 1 and table["error"] == whole["error"]
    said.clear()
    quantize_run(run, schemes=("W8A8",), num_tokens=64, say=said.append)
    assert read(run, "quant.json") == table and "only shown" in said[-1]


def test_static_schemes_are_calibrated_on_training_text(run):
    (row,) = quantize_run(run, schemes=("W8A8-static",), scopes=("linear",))["rows"]
    assert row["scheme"] == "W8A8-static" and abs(row["increase"]) < 0.5


def test_the_files_agree_with_each_other(run):
    evaluation, quant, trained = (
        read(run, "eval.json"),
        read(run, "quant.json"),
        read(run, "train.json"),
    )
    assert math.isclose(evaluation["perplexity"], math.exp(evaluation["held_out_loss"]))
    assert math.isclose(quant["full_precision"], evaluation["held_out_loss"], rel_tol=1e-9)
    assert abs(evaluation["held_out_loss"] - trained["held_out_loss"]) < 0.2  # other batches
    bits = evaluation["held_out_loss"] / math.log(2) / run.data.bytes_per_token
    assert math.isclose(evaluation["bits_per_byte"], bits)
    settings = run.config.evaluate
    assert [(r["scheme"], r["scope"]) for r in quant["rows"]] == [
        (scheme, scope) for scheme in settings.schemes for scope in settings.scopes
    ]
    for row in quant["rows"]:
        assert math.isclose(row["loss"] - row["increase"], quant["full_precision"])
    layers = range(run.config.model.num_hidden_layers)
    joins = [(layer, sub) for layer in layers for sub in ("attention", "mlp")]
    assert [(r["layer"], r["sublayer"]) for r in quant["error"]["rows"]] == joins
    assert all(0 < r["r"] < 10 for r in quant["error"]["rows"])
    assert all(math.isclose(r["gap"], r["ideal"] - r["sqnr"]) for r in quant["sqnr"]["rows"])


def test_probe_rows_have_the_shape_of_training_rows(run):
    last = [json.loads(line) for line in (run.path / "probes.jsonl").read_text().splitlines()][-1]
    found = probe_run(run, num_tokens=64)
    assert found == read(run, "probe.json")
    assert set(found) - {"measured"} == set(last)
    assert found["measured"]["num_tokens"] == 64 and found["step"] == run.step
    assert [row["site"] for row in found["sites"]] == [row["site"] for row in last["sites"]]
    skips = [value for name, value in found["gains"].items() if name.endswith("connection.a")]
    assert skips == [[0.0]] * 4  # the annealing (C7) is over
    assert {row["sublayer"] for row in found["geometry"]} == {"attention", "mlp"}
    assert all(0 <= row["entropy"] < math.log(16) + 1e-6 for row in found["attention"])


def test_widths_and_scopes_of_ones_own(run):
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    result = quantize_run(run, schemes=("W2A2", "W16A16"), scopes=("all",), num_tokens=64)
    assert [row["scheme"] for row in result["rows"]] == ["W2A2", "W16A16"]
    assert abs(result["rows"][1]["increase"]) < 1e-3
    assert result["error"]["scope"] == "all"
    after = run.model.state_dict()
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schemes": ("W8",)}, "write W8Afp"),
        ({"schemes": ("W8A1",)}, "from 2 to 16"),
        ({"schemes": ("8-8",)}, "not a quantisation scheme"),
        ({"scopes": ("blocks",)}, "did you mean 'block'"),
        ({"num_tokens": -5}, "at least 1"),
        ({"num_tokens": 0}, "at least 1"),
    ],
)
def test_bad_schemes_leave_the_old_file(run, options, said):
    before = read(run, "quant.json")
    with pytest.raises(UserError, match=said) as error:
        quantize_run(run, **options)
    assert "\n" not in str(error.value)
    assert read(run, "quant.json") == before


def test_other_bad_input(run):
    with pytest.raises(UserError, match="at least 1"):
        probe_run(run, num_tokens=0)
    with pytest.raises(UserError, match="at least 1"):
        evaluate_run(run, num_tokens=-1)
    with pytest.raises(UserError, match="prompt is empty"):
        sample_run(run, prompt="")
    with pytest.raises(UserError, match="shorten it"):
        sample_run(run, prompt="the king said " * 50)


def test_samples_are_the_models_own_text(run):
    found = sample_run(run, prompt="the king")
    assert found["prompt"] == "the king"
    assert isinstance(found["greedy"], str) and found == sample_run(run, prompt="the king")


def test_a_run_without_weights_says_so(run, tmp_path):
    (run.path / "train.json").unlink()
    import shutil

    shutil.rmtree(run.path / "checkpoint")
    with pytest.raises(UserError, match="no weights yet"):
        load_run(run.path)


def test_closer_looks_are_at_the_lowest_scheme_named_and_the_file_keeps_the_runs_own(run):
    whole = read(run, "quant.json")
    assert whole["sqnr"]["scheme"] == whole["error"]["scheme"] == "W4A4"
    said = []
    result = quantize_run(
        run, schemes=("W8A4", "W4A8-a:token", "W8A8", "W16Afp"), scopes=("linear",), by_layer=True,
        all_but_one=True, say=said.append,
    )  # fmt: skip
    place = {"scheme": "W4A8-a:token", "scope": "linear"}
    for part in ("error", "sqnr", "sensitivity"):
        assert result[part].items() >= place.items()
    assert {(r["kind"], r["bits"]) for r in result["sqnr"]["rows"]} == {("linear_input", 8)}
    weights = result["sqnr"]["weights"]
    assert {(r["kind"], r["bits"]) for r in weights} == {("weight", 4)} and len(weights) == 12
    assert weights[0]["site"] == "layers.0.self_attn.q_proj"
    assert [r["layer"] for r in result["sensitivity"]["rows"]] == [0, 1]
    without = result["sensitivity"]["all_but_one"]
    assert [r["layer"] for r in without] == [0, 1]
    # Of two layers, keeping one is quantising the other alone.
    alone = [r["loss"] for r in result["sensitivity"]["rows"]]
    assert [r["loss"] for r in without] == alone[::-1]
    after = read(run, "quant.json")
    assert after["error"] == whole["error"] and after["sqnr"] == whole["sqnr"]
    assert after["sensitivity"] == result["sensitivity"]
    assert len(after["rows"]) == len(whole["rows"]) + 3  # W8A8 linear was there
    assert "keeps error and SQNR of W4A4 in scope block" in said[-1]
    quantize_run(run, schemes=("W8A8",))
    assert read(run, "quant.json")["sensitivity"] == result["sensitivity"]


def test_a_scheme_that_does_not_fit_is_refused_before_anything_is_measured(run, monkeypatch):
    from skipless.evaluate import precision

    monkeypatch.setattr(precision, "sequence_losses", lambda *_: pytest.fail("measured"))
    before = read(run, "quant.json")
    with pytest.raises(UserError, match="group size 48 does not divide the 32 .*use g32"):
        quantize_run(run, schemes=("W8A8", "W4A8-w:g48"))
    assert read(run, "quant.json") == before


def test_batches_of_a_run_for_the_functions_that_want_some(run):
    from skipless.evaluate import error_propagation, loss, precision_table, sensitivity, site_sqnr

    batches = held_out_batches(run)
    asked = run.config.evaluate.num_tokens
    assert asked - 16 < sum(labels.numel() for _, labels in batches) <= asked
    assert len(sensitivity(run.model, "W4A8", batches)) == 2
    for wrong in (run.data, run):
        for measure in (
            lambda data: sensitivity(run.model, "W4A8", data),
            lambda data: site_sqnr(run.model, "W4A8", data),
            lambda data: error_propagation(run.model, "W4A8", data),
            lambda data: precision_table(run.model, data, ["W4A8"]),
            lambda data: loss(run.model, data),
        ):
            with pytest.raises(UserError, match=r"skipless.measure.held_out_batches\(run\)"):
                measure(wrong)


def test_schemes_may_be_judged_on_fewer_tokens_than_the_loss(run):
    settings = run.config.evaluate
    fewer = run.config.replace(evaluate={"quantize_tokens": settings.num_tokens // 2})
    run = dataclasses.replace(run, config=fewer)
    whole, table = evaluate_run(run), quantize_run(run)
    assert table["num_tokens"] == whole["num_tokens"] // 2
    assert quantize_run(run, num_tokens=settings.num_tokens)["num_tokens"] == whole["num_tokens"]
