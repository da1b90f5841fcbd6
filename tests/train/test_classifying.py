"""A classifier through the whole loop, and the traced gradient norms and gains."""

import pytest
import torch

from skipless import recipes
from skipless.cli.measuring_models import text_loss
from skipless.errors import UserError
from skipless.jsonable import override
from skipless.measure import measure_all, quantize_run, sample_run
from skipless.rundir import RunDir
from skipless.train import load_run, train


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("authors")
    for name, words in (("a", "the king and his men "), ("b", "sea ship whale boat sails ")):
        (root / name).mkdir()
        for number in range(4):
            (root / name / f"{number}.txt").write_text(words * (40 + number))
    return root


@pytest.fixture(scope="module")
def classifier(sources, tiny_settings, tmp_path_factory):
    settings = tiny_settings | {
        "data.sources": f"{sources / 'a'},{sources / 'b'}", "data.held_out_fraction": "0.3",
        "model.num_labels": "2", "train.num_tokens": "1024", "probe.trace_every": "4",
    }  # fmt: skip
    config = override(recipes.get("connections-author-4-rezero"), settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPLESS_CACHE", str(sources / "cache"))
        path = tmp_path_factory.mktemp("run") / "classifier"
        return path, train(config, path)


def test_a_classifier_learns_and_is_measured(classifier):
    path, result = classifier
    assert result.held_out_bits_per_byte is None and result.held_out_loss < 0.6
    run = load_run(path)
    measure_all(run)
    found = RunDir(path).read_json("eval.json")
    assert found["accuracy"] > 0.9
    assert sum(found["recall"].values()) / 2 == pytest.approx(found["accuracy"])
    assert not (path / "quant.json").exists() and not (path / "samples.json").exists()
    assert (path / "probe.json").exists()
    for measure in (quantize_run, sample_run):
        with pytest.raises(UserError, match="holds a classifier"):
            measure(run)
    with pytest.raises(UserError, match="is a classifier, .* leave out --text"):
        text_loss(str(path), __file__, None)


def test_a_finished_classifier_is_known_as_finished(classifier):
    path, result = classifier
    assert train(load_run(path).config, path) == result


def test_traces_hold_the_first_step_and_every_fourth(classifier):
    rows = RunDir(classifier[0]).read_jsonl("metrics.jsonl")
    steps = [row["step"] for row in rows if "gradient_norms" in row]
    assert steps == [1, 4, 8, 12, 16]
    first = next(row for row in rows if "gradient_norms" in row)
    assert {"0", "1", "embed_tokens"} <= first["gradient_norms"].keys()
    gains = first["gains"]
    assert gains and set(gains.values()) == {0.0}  # before the first update: where ReZero starts
    assert any(rows[-2]["gains"].values())
    # the whole norm is that of the parts
    parts = torch.tensor(list(first["gradient_norms"].values()))
    assert float(parts.norm()) == pytest.approx(first["grad_norm"], rel=1e-4)


def test_without_trace_every_nothing_is_traced(tiny_run):
    assert not any("gradient_norms" in row for row in RunDir(tiny_run).read_jsonl("metrics.jsonl"))
