"""The command line: fast help, clear errors, exit codes."""

import json
import subprocess
import sys
import time

import pytest

from skipless import recipes
from skipless.cli import COMMANDS, main


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "skipless", *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_fast_and_without_torch(arguments):
    code = (
        "import sys\nfrom skipless.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules, 'help imported torch'\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: skipless" in done.stdout
    assert time.monotonic() - began < 5  # normally 0.2 s; this only catches a heavy import


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "demo-rf-kll"], "did you mean 'demo-rf-kl'"),
        (["train", "demo-rf-kl", "--optim.lrr", "1"], "did you mean 'optim.lr'"),
        (["train", "demo-rf-kl", "--optim.lr"], "--optim.lr has no value"),
        (["list", "zzz"], "no recipe starts with 'zzz'"),
        (["list", "--optim.lr", "3"], "take settings"),
        (["show", "nothing.json"], "nothing.json does not exist"),
        (["data", "prepare"], "needs at least one name"),
        (["data", "get", "shakespear"], "shakespeare"),
        (["eval", "no/such/run"], "not a run directory"),
        (["report", "no/such/run"], "no/such/run"),
        (["report", "runs", "--out", ""], "ends in .html"),
        (["report", "runs", "--out", "rep.json"], "ends in .html"),
        (["--optim.lr", "3"], "take settings"),
        (["train", "demo-rf-kl", "--out", ""], "--out is empty"),
        (["demo", "--out", ""], "--out is empty"),
        (["sweep", "demo-rf-kl", "--values", "1", "--out", " "], "--out is empty"),
        (["train", "demo-rf-kl", "--out", __file__], "is a file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.startswith("skipless: ") and "\n" not in error


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"{", b"[]"])
def test_a_settings_file_that_is_none(content, tmp_path, capsys):
    (tmp_path / "mine.json").write_bytes(content)
    assert main(["show", str(tmp_path / "mine.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_better_loss_at_low_precision_is_shown_with_one_sign(monkeypatch, capsys):
    row = {"scheme": "W8A8", "scope": "linear", "loss": 1.0, "increase": -0.0147}
    monkeypatch.setattr("skipless.cli._load", lambda run: run)
    monkeypatch.setattr(
        "skipless.measure.quantize_run", lambda run, **_: {"full_precision": 1.0147, "rows": [row]}
    )
    assert main(["quantize", "x"]) == 0
    assert "  -0.0147 nats" in capsys.readouterr().out


def test_list_and_show(capsys):
    assert main(["list"]) == 0
    assert set(recipes.names()) == {w.split()[0] for w in capsys.readouterr().out.splitlines()}
    assert main(["show", "demo-rf-kl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recipes.get("demo-rf-kl").to_dict()


def test_a_settings_file_trains_like_its_recipe(tmp_path, capsys):
    main(["show", "demo-rf-kl", "--json"])
    path = tmp_path / "mine.json"
    path.write_text(capsys.readouterr().out)
    assert main(["show", str(path)]) == 0
    assert "optim.name = 'kl_shampoo'" in capsys.readouterr().out


def test_broken_pipe_is_quiet():
    done = subprocess.run(
        f"{sys.executable} -m skipless show demo-rf-kl | head -1",
        shell=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and done.stdout.count("\n") == 1
