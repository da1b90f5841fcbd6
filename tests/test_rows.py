"""Rows side by side: progress from files, failures that stay alone, Ctrl-C that loses nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from skipless import sweep
from skipless.errors import UserError
from skipless.rows import MEASURE_SHARE, Row, _line, train_rows
from skipless.rundir import RunDir


def arguments(settings: dict[str, str], **changes: str) -> tuple[str, ...]:
    """`--key=value` for the command line; changes are written train__num_tokens="64"."""
    changed = settings | {key.replace("__", "."): value for key, value in changes.items()}
    return tuple(f"--{key}={value}" for key, value in changed.items())


# --- progress -------------------------------------------------------------------------------------


@pytest.fixture
def row(tmp_path):
    (tmp_path / "r").mkdir()
    return Row("demo-rf-kl", tmp_path / "r", 100)


def append(row, text):
    with open(row.directory / "metrics.jsonl", "a") as file:
        file.write(text)


def test_progress_of_torn_lines(row):
    row.read_progress()
    assert row.step == 0 and row.loss != row.loss
    append(row, '{"step": 1, "loss": 7.5}\n{"step": 2, "lo')
    row.read_progress()
    assert (row.step, row.loss) == (1, 7.5)
    append(row, 'ss": 7.25}')
    row.read_progress()
    assert (row.step, row.loss) == (1, 7.5)  # the line has not ended yet
    append(row, '\n{"step": 2, "held_out_loss": 6.0}\n')
    row.read_progress()
    assert (row.step, row.loss) == (2, 7.25)  # held-out losses are no progress


def test_progress_after_a_resume_cut_the_file(row):
    append(row, "".join(json.dumps({"step": s, "loss": 9.0}) + "\n" for s in range(1, 9)))
    row.read_progress()
    assert row.step == 8
    (row.directory / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    row.read_progress()
    assert (row.step, row.loss) == (1, 5.0)


def test_progress_after_a_resume_rewrote_the_file_and_it_grew(row):
    append(row, '{"step": 1, "loss": 9.0}\n')
    row.read_progress()
    new = row.directory / "new"
    new.write_text('{"step": 1, "loss": 9.0, "longer than before": 1}\n{"step": 2, "loss": 3.0}\n')
    new.rename(row.directory / "metrics.jsonl")
    row.read_progress()
    assert (row.step, row.loss) == (2, 3.0)


def test_damaged_lines_are_no_progress_and_no_end(row):
    with open(row.directory / "metrics.jsonl", "wb") as file:
        file.write(b'{"step": 1, "loss": 9.0}\n{"st\n\xff\xfe\n[1]\n{"loss": 1}\n')
        file.write(b'{"step": "x", "loss": 1}\n{"step": 4, "loss": 2.0}\n')
    row.read_progress()
    assert (row.step, row.loss) == (4, 2.0)


def sleeper(tmp_path, name, code="import time; time.sleep(600)"):
    row = Row(name, tmp_path / name, 5)
    row.start = lambda: setattr(row, "process", subprocess.Popen([sys.executable, "-c", code]))
    return row


def test_no_row_outlives_a_fault_of_the_parent(tmp_path, monkeypatch):
    row = sleeper(tmp_path, "r")
    monkeypatch.setattr(row, "read_progress", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_rows([row], jobs=1)
    assert row.process.returncode is not None


def test_a_second_ctrl_c_ends_rows_that_do_not_listen(tmp_path, monkeypatch):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    row = sleeper(tmp_path, "r", deaf + "time.sleep(600)")

    def interrupt(*_):
        raise KeyboardInterrupt

    row.read_progress = interrupt
    monkeypatch.setattr(subprocess.Popen, "terminate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_rows([row], jobs=1)
    assert row.process.returncode == -signal.SIGKILL


def test_a_loss_that_is_not_a_number(row):
    append(row, '{"step": 3, "loss": null}\n')
    row.read_progress()
    assert row.step == 3 and row.loss != row.loss


def test_no_loss_is_shown_before_the_first(row):
    assert row.shown_loss == "" and "nan" not in _line([row], [row], 100)
    append(row, '{"step": 3, "loss": 7.25}\n')
    row.read_progress()
    assert row.shown_loss == "loss 7.250" and _line([row], [row], 100).endswith("3/100 loss 7.250")


def test_measuring_counts_as_steps(row):
    append(row, '{"step": 100, "loss": 1.0}\n')
    row.read_progress()
    assert row.done == 100
    (row.directory / "eval.json").write_text("{}")
    assert row.done == pytest.approx(100 + MEASURE_SHARE * 100 / 3)


def test_two_rows_never_share_a_log(tmp_path):
    names = ("sweep-lr-1.5e-3", "sweep-lr-1.25e-3", "sweep-lr-1")
    assert len({Row("x", tmp_path / name, 1).log for name in names}) == 3


def test_remove_spares_a_run_in_use(tmp_path, tiny_config):
    path = tmp_path / "run"
    held = RunDir.create(path, tiny_config)
    with held.lock(), pytest.raises(UserError, match="in use by another process"):
        Row("x", path, 1).remove()
    assert (path / "config.json").exists()
    (path / "notes.txt").write_text("mine")
    Row("x", path, 1).remove()
    assert {p.name for p in path.iterdir()} == {".lock", "config.json", "notes.txt"}
    RunDir.create(path, tiny_config.replace(optim={"lr": 1.0}))  # and it can be used again


def test_no_jobs_is_an_error(tmp_path):
    with pytest.raises(UserError, match="--jobs is 0"):
        train_rows([Row("x", tmp_path / "x", 1)], jobs=0)


# --- processes ------------------------------------------------------------------------------------


def test_a_failing_row_is_noted_and_the_others_go_on(tmp_path, tiny_settings, cache, monkeypatch):
    monkeypatch.setattr("skipless.rows.LINE_SECONDS", 0.5)
    bad = Row("demo-rf-klx", tmp_path / "bad", 8, ())
    good = Row("demo-fast-rf-muon", tmp_path / "good", 8, arguments(tiny_settings))
    train_rows([bad, good], jobs=2)
    assert "did you mean 'demo-rf-kl'" in bad.error and "\n" not in bad.error
    assert good.error == "" and good.step == 8
    assert json.loads((tmp_path / "good" / "train.json").read_text())["step"] == 8
    assert bad.error in bad.log.read_text()
    assert not (tmp_path / "bad").exists()


PARENT = """
    import functools, sys
    import skipless.demo, skipless.recipes.demo as rows
    from skipless.cli import main

    out, *settings = sys.argv[1:]
    rows.FAST_ROWS = ("demo-fast-rf-muon", "demo-fast-residual-adamw")
    skipless.demo.Row = functools.partial(skipless.demo.Row, arguments=tuple(settings))
    skipless.demo.prepare_data = lambda config: None
    raise SystemExit(main(["demo", "--fast", "--out", out, "--jobs", "2"]))
"""


def wait_until(condition, process, seconds=180):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "the rows did not get going"
        time.sleep(0.05)


def test_ctrl_c_saves_every_row_and_the_same_command_continues(
    tmp_path, tiny_settings, cache, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    long = arguments(
        tiny_settings, train__num_tokens="640000", train__checkpoint_every="0",
        train__eval_every="0", probe__every="0",
    )  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path / "out"), *long],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # a test-suite in the background may have inherited an ignored Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    runs = [tmp_path / "out" / name for name in ("demo-fast-rf-muon", "demo-fast-residual-adamw")]
    try:
        wait_until(
            lambda: all(len(RunDir(r).read_jsonl("metrics.jsonl")) > 3 for r in runs), parent
        )
        parent.send_signal(signal.SIGINT)
        _, error = parent.communicate(timeout=60)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
    assert parent.returncode == 130, error
    assert "continue with: skipless demo --fast" in error and "Traceback" not in error

    from skipless.train import load_run, train

    for path in runs:
        run = load_run(path)
        rows = RunDir(path).read_jsonl("metrics.jsonl")
        assert not run.is_finished and run.step == rows[-1]["step"] > 3
        first = []

        def stop(info, first=first):
            first.append(info["step"])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(run.config, path, on_step=stop)
        assert first == [run.step + 1]


# --- sweep ----------------------------------------------------------------------------------------


def test_sweep_compares_and_names_the_best(tmp_path, monkeypatch):
    losses = {"1e-3": 5.0, "2e-3": 4.5, "4e-3": None}

    def pretend(rows, jobs):
        for row in rows:
            value = row.directory.name.rsplit("-lr-")[1]
            assert f"--optim.lr={value}" in row.arguments and "--train.seed=3" in row.arguments
            row.directory.mkdir(parents=True)
            if losses[value] is None:
                row.error = "it broke"
            else:
                RunDir(row.directory).append("metrics.jsonl", {"held_out_loss": losses[value]})
                RunDir(row.directory).write_json("train.json", {"held_out_tokens": 4096})

    monkeypatch.setattr(sweep, "train_rows", pretend)
    texts = []
    monkeypatch.setattr(sweep, "prepare_data", lambda config: texts.append(config.data.sources))
    found = sweep.run_sweep(
        ("demo-rf-kl",), setting="optim.lr", values=tuple(losses), out=tmp_path,
        settings={"train.seed": "3", "data.sources": "mine.txt"},
    )  # fmt: skip
    assert texts == [("mine.txt",)]
    assert [row["held_out_loss"] for row in found] == [5.0, 4.5, None]
    assert [row["held_out_tokens"] for row in found] == [4096, 4096, None]
    assert found[2]["error"] == "it broke"
    assert sweep.best(found)["demo-rf-kl"]["optim.lr"] == "2e-3"
    assert json.loads((tmp_path / "sweep.json").read_text()) == found


def test_sweep_checks_before_it_trains(tmp_path):
    with pytest.raises(UserError, match="at least one recipe and one value"):
        sweep.run_sweep(("demo-rf-kl",), setting="optim.lr", values=(), out=tmp_path)
    with pytest.raises(UserError, match=r"did you mean 'optim\.lr'"):
        sweep.run_sweep(("demo-rf-kl",), setting="optim.lrr", values=("1",), out=tmp_path)
    with pytest.raises(UserError, match="it must be positive"):
        sweep.run_sweep(("demo-rf-kl",), setting="optim.lr", values=("-1",), out=tmp_path)
    assert not list(tmp_path.iterdir())
