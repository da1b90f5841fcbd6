"""A run on disk: atomic, locked, appendable, and clear when something is wrong."""

import errno
import json
import os
import subprocess
import sys

import pytest

from skipless.config import RunConfig
from skipless.environment import environment
from skipless.errors import UserError
from skipless.files import atomic_path, write_atomic
from skipless.rundir import RunDir


def test_create_then_reopen(tmp_path):
    config = RunConfig(label="x")
    RunDir.create(tmp_path / "run", config)
    assert RunDir.open(tmp_path / "run").config() == config
    RunDir.create(tmp_path / "run", config)  # the same settings resume
    assert json.loads((tmp_path / "run/environment.json").read_text())["torch"]


def test_other_settings_are_refused_and_named(tmp_path):
    run = RunDir.create(tmp_path / "run", RunConfig())
    (run / "checkpoint" / "step-00000003").mkdir(parents=True)
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


OTHER = RunConfig().replace(optim={"lr": 0.5})


def test_without_weights_corrected_settings_start_anew(tmp_path):
    run = RunDir.create(tmp_path / "run", RunConfig())
    run.append("metrics.jsonl", {"step": 1})
    (run / "notes.txt").write_text("mine")
    RunDir.create(tmp_path / "run", OTHER)
    assert run.config() == OTHER and run.read_jsonl("metrics.jsonl") == []
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "left",
    [
        ["environment.json"],
        ["environment.json", ".config.json.0a1b2c3d.tmp"],
        [".config.json.0a1b2c3d.tmp", ".lock"],
        ["environment.json", "metrics.jsonl", ".config.json.0a1b2c3d.old/config.json"],
        [],
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_stop_at_the_start_left_does_not_block_the_directory(tmp_path, left, fresh):
    for name in left:
        write_atomic(tmp_path / name, "half")
    run = RunDir.create(tmp_path, RunConfig(), fresh=fresh)
    assert run.config() == RunConfig() and run.read_json("environment.json")["torch"]
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "environment.json", ".lock"}


def test_stopped_while_removing_never_looks_like_a_whole_run(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "run", RunConfig())
    write_atomic(run / "checkpoint/step-00000003/state.json", "{}")
    real, moved = os.replace, []

    def stop_at_the_second(source, target):
        if ".old" in str(target):
            moved.append(source)
            if len(moved) == 2:
                raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr("skipless.rundir.os.replace", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        RunDir.create(run.path, OTHER, fresh=True)
    monkeypatch.undo()
    with pytest.raises(UserError, match="weights and no config.json"):
        RunDir.create(run.path, OTHER)
    RunDir.create(run.path, OTHER, fresh=True)
    assert run.config() == OTHER and not run.has_weights()
    assert not list(run.path.glob(".*.old"))


@pytest.mark.parametrize(
    "names", [["config.json", "model.safetensors"], ["tensorboard"], ["checkpoint", "samples.json"]]
)
@pytest.mark.parametrize("fresh", [False, True])
def test_our_names_alone_do_not_make_it_ours(tmp_path, names, fresh):
    for name in names:
        (tmp_path / name).write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UserError, match="not a run of ours"):
        RunDir.create(tmp_path, RunConfig(), fresh=fresh)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_fresh_replaces_a_run_whose_settings_are_of_another_version(tmp_path):
    run = RunDir.create(tmp_path, RunConfig())
    write_atomic(run / "model.safetensors", "weights")
    (run / "config.json").write_text('{"gone": 1}')
    with pytest.raises(UserError, match="unknown setting gone"):
        RunDir.create(tmp_path, RunConfig())
    assert RunDir.create(tmp_path, RunConfig(), fresh=True).config() == RunConfig()


def test_fresh_spares_a_run_in_use(tmp_path):
    run = RunDir.create(tmp_path, RunConfig())
    with run.lock(), pytest.raises(UserError, match="in use"):
        RunDir.create(tmp_path, RunConfig(), fresh=True)


def test_paths_that_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file is a file; choose another"):
        RunDir.create(tmp_path / "file", RunConfig())
    with pytest.raises(UserError, match=r"cannot write .*: (Not a directory|File exists)"):
        RunDir.create(tmp_path / "file" / "x", RunConfig())
    with pytest.raises(UserError, match=r"cannot write .*: (Not a directory|File exists)"):
        write_atomic(tmp_path / "file" / "x.json", "{}")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot write .*lock: Is a directory"):
        RunDir.create(tmp_path / "run", RunConfig())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"{", b"9" * 5000])
def test_unreadable_files_are_one_sentence(tmp_path, content):
    run = RunDir.create(tmp_path, RunConfig())
    for name, read in (
        ("config.json", run.config),
        ("train.json", lambda: run.read_json("train.json")),
        ("metrics.jsonl", lambda: run.read_jsonl("metrics.jsonl")),
    ):
        (run / name).write_bytes(content + b"\n{}\n")
        with pytest.raises(UserError, match=f"{name}.* (JSON|UTF-8)") as error:
            read()
        assert "\n" not in str(error.value)


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


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_a_link_and_leaves_what_it_led_to(
    tmp_path, monkeypatch, exchanges
):
    if not exchanges:
        monkeypatch.setattr("skipless.files._exchange", lambda first, second: False)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "one").write_text("one")
    (tmp_path / "d").symlink_to("far")
    with atomic_path(tmp_path / "d") as temporary:
        temporary.mkdir()
        (temporary / "two").write_text("two")
    assert not (tmp_path / "d").is_symlink() and (tmp_path / "d" / "two").exists()
    assert sorted(os.listdir(tmp_path)) == ["d", "far"] and (tmp_path / "far" / "one").exists()


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "one").write_text("one")
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".tmp"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target)

    monkeypatch.setattr("skipless.files._exchange", lambda first, second: False)
    monkeypatch.setattr("skipless.files.os.rename", refuse)
    with (
        pytest.raises(UserError, match="Permission denied; what was there before is untouched"),
        atomic_path(tmp_path / "d") as temporary,
    ):
        temporary.mkdir()
    assert [p.name for p in tmp_path.rglob("*")] == ["d", "one"]


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


@pytest.mark.parametrize(
    ("program", "typed"),
    [
        ("/x/skipless/__main__.py", "skipless train demo-rf-kl --out 'my run'"),
        ("/x/bin/skipless", "skipless train demo-rf-kl --out 'my run'"),
        ("/x/mine.py", "mine.py train demo-rf-kl --out 'my run'"),
    ],
)
def test_the_noted_command_can_be_typed_again(program, typed, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, "train", "demo-rf-kl", "--out", "my run"])
    assert environment()["command"] == typed


def test_a_folder_that_is_missing_is_told_from_one_without_a_run(tmp_path):
    with pytest.raises(UserError, match=r"is not a run directory \(no config\.json\)"):
        RunDir.open(tmp_path)
    with pytest.raises(UserError, match=r"is not a run directory \(there is no such folder\)"):
        RunDir.open(tmp_path / "missing")
