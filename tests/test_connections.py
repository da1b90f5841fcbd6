"""`skipless compare-connections`: which rows, which are skipped, what is said when some fail."""

import json

import pytest

from skipless import connections, recipes
from skipless.cli import main
from skipless.connections import compare_connections, is_finished, names
from skipless.errors import UserError
from skipless.jsonable import override
from skipless.recipes.connections import DEPTHS, KINDS
from skipless.rundir import RunDir


def test_names_in_order_with_their_baselines():
    assert names((8,), ("none",), ("language",)) == [
        "connections-8-residual", "connections-8-none",
    ]  # fmt: skip
    assert names((4,), ("none-orthogonal-muon",), ("language", "authors")) == [
        "connections-4-none-orthogonal-muon", "connections-4-residual-muon",
    ]  # fmt: skip
    both = names((8, 4), ("rezero-block",), ("language", "authors"))
    assert both == [
        "connections-4-residual", "connections-4-rezero-block",
        "connections-author-4-residual", "connections-author-4-rezero-block",
        "connections-8-residual", "connections-8-rezero-block",
    ]  # fmt: skip
    deep = names((12, 24), tuple(KINDS), ("language",))
    wanted = ("residual", "rezero", "layerscale", "none", "universal")
    assert {f"connections-{d}-{k}" for d in (12, 24) for k in wanted} <= set(deep)
    assert set(deep) <= set(recipes.names("connections-"))


@pytest.mark.parametrize(
    ("layers", "kinds", "tasks", "words"),
    [
        ((4,), ("rezro",), ("language",), "did you mean 'rezero'"),
        ((6,), ("none",), ("language",), "--layers has 6; there are rows at 4, 8, 12, 24"),
        ((4,), ("none",), ("languages",), "did you mean 'language'"),
        ((24,), ("gated",), ("authors",), "has a row at 24 layers"),
    ],
)
def test_what_there_is_no_row_of(layers, kinds, tasks, words):
    with pytest.raises(UserError, match=words):
        names(layers, kinds, tasks)


def test_rows_of_a_depth_differ_only_in_what_they_are_about():
    from skipless.jsonable import leaves

    own = ("name", "label", "note", "model.connection", "model.init.", "optim.")
    for depth in DEPTHS:
        first, *others = (
            leaves(recipes.get(name)) for name in recipes.names(f"connections-{depth}-")
        )
        for other in others:
            odd = [k for k in other if other[k] != first.get(k) and not k.startswith(own)]
            assert not odd
        assert first["train.num_tokens"] >= 300_000 and first["model.hidden_size"] == 128


def test_only_the_skips_that_the_name_says_are_gone():
    def kinds(name):
        model = recipes.get(f"connections-8-{name}").model
        return [[model.connection_at(i, s).kind for i in range(8)] for s in ("attention", "mlp")]

    skip, none = ["residual"] * 8, ["none"] * 8
    assert kinds("no-mlp-skip") == [skip, none] and kinds("no-attention-skip") == [none, skip]
    assert kinds("no-early-skips") == [none[:4] + skip[4:]] * 2
    assert kinds("no-late-skips") == [skip[:4] + none[4:]] * 2
    gains = recipes.get("connections-8-rezero-gain-lr").optim
    assert gains.gain_lr == 10 * gains.lr
    assert recipes.get("connections-8-rezero-gain-decay").optim.gain_weight_decay == 0.1


def test_from_training_to_the_page_and_again(tmp_path, tiny_settings, cache, monkeypatch, capsys):
    """The rows train here, in this process; two processes of torch would take most of the time."""
    trained = []

    def train_here(rows, jobs):
        from skipless.train import train

        for row in rows:
            trained.append(row.directory.name)
            changes = dict(word[2:].split("=", 1) for word in row.arguments)
            try:
                train(override(recipes.get(row.recipe), changes), row.directory)
            except UserError as error:
                row.error = str(error)

    monkeypatch.setattr(connections, "train_rows", train_here)
    out = tmp_path / "out"
    settings = tiny_settings | {"model.num_hidden_layers": "4", "probe.trace_every": "2"}
    command = ["compare-connections", "--layers", "4", "--seeds", "0", "--tasks", "language",
               "--kinds", "rezero", "--out", str(out)]  # fmt: skip
    command += [f"--{key}={value}" for key, value in settings.items()]
    assert main([*command, "--traceback"]) == 0
    assert trained == ["connections-4-residual-seed0", "connections-4-rezero-seed0"]
    assert "| ReZero |" in capsys.readouterr().out
    numbers = json.loads((out / "report.json").read_text())
    (row,) = (r for r in numbers["tables"][0]["rows"] if r["kind"] == "rezero")
    assert row["gradient_norms"]["first_step"].keys() == {"0", "1", "2", "3"}
    assert row["ratio"] > 0 and row["step_seconds"] > 0 and row["peak_memory"] > 0
    assert main([*command, "--traceback"]) == 0 and len(trained) == 2  # finished: not again
    (out / "connections-4-rezero-seed0" / "train.json").unlink()
    assert main([*command, "--traceback"]) == 0 and trained[2:] == [trained[1]]
    # other settings in the same place: told, the rest is still reported
    assert main([*command, "--optim.lr=1e-3", "--traceback"]) == 0
    assert "failed" in capsys.readouterr().err
    assert (out / "report.html").exists()


def test_finished_means_these_settings_and_all_files(tiny_run, tiny_config):
    assert is_finished(tiny_run, tiny_config)
    assert not is_finished(tiny_run, tiny_config.replace(optim={"lr": 9.0}))
    assert not is_finished(tiny_run / "not there", tiny_config)


def test_texts_out_of_reach_leave_out_their_rows(tmp_path, monkeypatch, capsys):
    def prepare(config):
        if config.model.num_labels:
            raise UserError("npm is out of reach")

    asked = []
    monkeypatch.setattr(connections, "prepare_data", prepare)
    monkeypatch.setattr(connections, "train_rows", lambda rows, jobs: asked.extend(rows))
    with pytest.raises(UserError, match="no run of .* got so far"):
        compare_connections(layers=(4,), seeds=(0,), kinds=("residual",), out=tmp_path)
    assert [row.recipe for row in asked] == ["connections-4-residual"]
    assert "npm is out of reach" in capsys.readouterr().err
    with pytest.raises(UserError, match="none of the texts"):
        compare_connections(
            layers=(4,), seeds=(0,), kinds=("residual",), tasks=("authors",), out=tmp_path
        )


def test_a_fast_run_is_small_and_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(connections, "prepare_data", lambda config: None)
    monkeypatch.setattr(connections, "train_rows", lambda rows, jobs: asked.extend(rows))
    with pytest.raises(UserError, match="connections-fast"):
        compare_connections(fast=True)
    assert len(asked) <= 14 and all(row.num_steps == 20 for row in asked)
    assert not RunDir(tmp_path / "runs" / "connections").path.exists()
