"""A run on disk: atomic, locked, appendable, and clear when something is wrong."""

import errno
import json
import os
import subprocess
import sys

import pytest

from skipless.config import RunConfig
from skipless.errors import UserError
from skipless.rundir import RunDir, atomic_path, write_atomic


def test_create_then_reopen(tmp_path):
    config = RunConfig(label="x")
    RunDir.create(tmp_path / "run", config)
    assert RunDir.open(tmp_path / "run").config() == config
    RunDir.create(tmp_path / "run", config)  # the same settings resume
    assert json.loads((tmp_path / "run/environment.json").read_text())["torch"]


def test_other_settings_are_refused_and_named(tmp_path):
    RunDir.create(tmp_path / "run", RunConfig())
    with pytest.raises(UserError, match=r"optim.lr is 0.001 there and 0.5 here"):
        RunDir.create(tmp_path / "run", RunConfig().replace(optim={"lr": 0.5}))
    RunDir.create(tmp_path / "run", RunConfig().replace(optim={"lr": 0.5}), fresh=True)
    assert RunDir.open(tmp_path / "run").config().optim.lr == 0.5


def test_a_foreign_directory_is_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(UserError, match="not a run of ours"):
            RunDir.create(tmp_path, RunConfig(), fresh=fresh)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_opening_nothing_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="skipless train"):
        RunDir.open(tmp_path / "nothing")


def test_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = write_atomic(tmp_path / "a.json", "old")

    def fill_the_disk():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"a.json: No space left on device"):
        fill_the_disk()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_directories_are_replaced_as_a_whole(tmp_path):
    for text in ("one", "two"):
        with atomic_path(tmp_path / "d") as temporary:
            temporary.mkdir()
            (temporary / text).write_text(text)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_torn_last_line_is_dropped_and_others_are_errors(tmp_path):
    run = RunDir(tmp_path)
    for step in range(3):
        run.append("m.jsonl", {"step": step, "loss": float("nan")})
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in run.read_jsonl("m.jsonl")] == [0, 1, 2]
    run.truncate_jsonl("m.jsonl", lambda row: row["step"] < 2)
    assert run.read_jsonl("m.jsonl") == [{"step": 0, "loss": None}, {"step": 1, "loss": None}]
    (tmp_path / "m.jsonl").write_text("{}\nrubbish\n{}\n")
    with pytest.raises(UserError, match="line 2"):
        run.read_jsonl("m.jsonl")


def test_full_disk_while_appending_leaves_whole_lines(tmp_path):
    """A real limit on file size in a child process: the refused line leaves no half."""
    code = f"""
import resource, signal
from skipless.rundir import RunDir
from skipless.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
run = RunDir({str(tmp_path)!r})
try:
    for step in range(100):
        run.append("m.jsonl", {{"step": step}})
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot write" in done.stdout, done.stderr
    text = (tmp_path / "m.jsonl").read_text()
    assert text.endswith("}\n") and all(json.loads(line) for line in text.splitlines())


def test_two_processes_cannot_hold_one_run(tmp_path):
    code = f"""
from skipless.rundir import RunDir
with RunDir({str(tmp_path)!r}).lock():
    print("held", flush=True)
    input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by another process .pid {other.pid}"):
        RunDir(tmp_path).lock().__enter__()
    other.kill()  # even a killed process lets go
    other.wait()
    with RunDir(tmp_path).lock():
        pass
