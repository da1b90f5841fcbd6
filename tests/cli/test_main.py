"""The command line: fast help, clear errors, exit codes."""

import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

import skipless
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


def test_the_overview_names_every_command_once(monkeypatch, capsys):
    assert main(["-h"]) == main([]) == 0
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["--help"]) == 0
    wide, again, narrow = capsys.readouterr().out.split("usage: ")[1:]
    assert wide == again
    for text in (wide, narrow):
        assert [m for m in re.findall(r"^  (\S+) ", text, re.M)] == list(COMMANDS)
    body = narrow[narrow.index("All in one") : narrow.index("`skipless COMMAND")]
    assert max(map(len, body.splitlines())) <= 60


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_one_sentence_and_an_example_that_parses(name, monkeypatch):
    function, called = COMMANDS[name], []
    sentence, _, rest = function.__doc__.partition("\n")
    assert sentence.endswith(".") and len(sentence) <= 80
    (example,) = re.findall(r"^    For example: skipless (.*)$", rest, re.M)
    words = shlex.split(example)
    assert words[0] == name

    @functools.wraps(function)
    def instead(**arguments):
        called.append(arguments)

    monkeypatch.setitem(COMMANDS, name, instead)
    assert main(words) == 0 and len(called) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_shown_with_a_default_that_says_nothing(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert not re.search(r"\(default:\s*(None|False|)\)|\{None\}|\bSTR\b|\bINT\b", shown)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "demo-rf-kll"], "did you mean 'demo-rf-kl'"),
        (["train", "demo-rf-kl", "--optim.lrr", "1"], "did you mean 'optim.lr'"),
        (["train", "demo-rf-kl", "--optim.lr"], "--optim.lr has no value"),
        (["list", "zzz"], "no recipe starts with 'zzz'"),
        (["list", "--optim.lr", "3"], "take settings"),
        (["train", "runs/nothing"], "runs/nothing does not exist; name a run directory"),
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


@pytest.mark.parametrize("command", ["generate", "diagnose", "doctor"])
def test_a_name_in_a_folder_that_is_here_is_no_name_of_a_hub(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    more = {"generate": ["--prompt", "a"], "diagnose": ["--out", "out"]}.get(command, [])
    words = [command, "runs/nothere", *more]
    for names, told in (
        ((), "runs/nothere does not exist; runs is empty"),
        (("mine", "abc"), "runs/nothere does not exist; runs holds abc, mine"),
        (("no-there",), "runs/nothere does not exist; runs holds no-there"),
    ):
        for name in names:
            (tmp_path / "runs" / name).mkdir()
        assert main(words) == 2
        assert capsys.readouterr().err == f"skipless: {told}\n"


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"{", b"[]"])
def test_a_settings_file_that_is_none(content, tmp_path, capsys):
    (tmp_path / "mine.json").write_bytes(content)
    assert main(["show", str(tmp_path / "mine.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_better_loss_at_low_precision_is_shown_with_one_sign(monkeypatch, capsys):
    row = {"scheme": "W8A8", "scope": "linear", "loss": 1.0, "increase": -0.0147}
    monkeypatch.setattr("skipless.cli.measuring.open_run", lambda run, tokens: run)
    table = {"full_precision": 1.0147, "num_tokens": 64, "rows": [row]}
    monkeypatch.setattr("skipless.measure.quantize_run", lambda run, **_: table)
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


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"skipless {skipless.__version__}\n"


def test_descriptions_use_words_and_no_tags(capsys):
    main(["list"])
    assert not re.findall(r"\b[ITCOSQ]\d\b", capsys.readouterr().out)
    main(["--help"])
    assert "rooms" not in capsys.readouterr().out


@pytest.fixture
def unfinished(tiny_config, tmp_path, cache, monkeypatch):
    """A run stopped after step 3 of 8; returns its path."""
    from skipless.train import train

    monkeypatch.chdir(tmp_path)

    def stop(info):
        if info["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, tmp_path / "run", on_step=stop)
    return tmp_path / "run"


def test_training_a_run_directory_continues_it_in_place(unfinished, capsys):
    assert main(["train", "run"]) == 0
    assert "resuming at step 3 of 8" in capsys.readouterr().err
    assert (unfinished / "train.json").exists()
    assert {p.name for p in unfinished.parent.iterdir()} == {"run"}  # and nowhere else
    before = {p: p.stat().st_mtime_ns for p in unfinished.rglob("*")}
    assert main(["train", "run"]) == 0
    said = capsys.readouterr()
    assert "run: finished already, step 8 of 8" in said.err
    assert "after 8 steps" in said.out
    assert {p: p.stat().st_mtime_ns for p in unfinished.rglob("*")} == before


def test_other_settings_are_refused_and_the_harmless_way_is_named_first(unfinished, capsys):
    assert main(["train", "run", "--optim.lr", "0.5"]) == 2
    said = capsys.readouterr().err
    assert "(optim.lr is" in said and "more" not in said  # the note is no setting
    assert 0 < said.index("`skipless train run`") < said.index("--fresh")
    assert main(["train", "demo-fast-rf-kl", "--out", "run"]) == 2
    assert "`skipless train run`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "quantize", "probe"])
def test_measuring_an_unfinished_run_says_so(unfinished, command, capsys):
    assert main([command, "run", "--num-tokens", "64"]) == 0
    said = capsys.readouterr()
    line = "run: step 3 of 8: not finished; continue with: skipless train run"
    assert line in said.err.splitlines() and "not finished" not in said.out


def test_ctrl_c_tells_directory_step_and_how_to_go_on(tiny_settings, tmp_path, cache, monkeypatch,
                                                      capsys):  # fmt: skip
    from skipless.train.loop import Loop

    monkeypatch.chdir(tmp_path)
    advance = Loop.advance

    def stop(loop):
        advance(loop)
        if loop.at.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Loop, "advance", stop)
    settings = [f"--{key}={value}" for key, value in tiny_settings.items()]
    words = ["train", "demo-fast-rf-kl", "--out", "my run", "--fresh", "--measure"]
    assert main([*words, *settings]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "skipless: interrupted; my run keeps step 2 of 8; continue with: "
        "skipless train 'my run' --measure"
    )
    monkeypatch.setattr(Loop, "advance", advance)
    assert main(["train", "my run", "--measure"]) == 0
    assert (tmp_path / "my run" / "samples.json").exists()


def test_ctrl_c_before_anything_was_written(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("skipless.train.train", stop)
    assert main(["train", "demo-rf-kl", "--out", "x"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("continue with: skipless train demo-rf-kl --out x")


def test_ctrl_c_in_the_demo_does_not_suggest_throwing_it_away(monkeypatch, capsys):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("skipless.demo.run_demo", stop)
    assert main(["demo", "--fast", "--fresh"]) == 130
    assert capsys.readouterr().err.endswith("continue with: skipless demo --fast\n")


def test_a_small_vocabulary_is_told_by_train(tiny_settings, tmp_path, cache, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = tiny_settings | {"model.vocab_size": "2048", "train.num_tokens": "64"}
    words = [f"--{key}={value}" for key, value in settings.items()]
    assert main(["train", "demo-fast-residual-adamw", "--out", "run", *words]) == 0
    assert re.search(r"NOTE: .* vocabulary of \d+ of 2048 tokens", capsys.readouterr().err)
    noted = json.loads((tmp_path / "run" / "data.json").read_text())
    assert 0 < noted["unigram_loss"] < math.log(2048)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["list"], ["show", "demo-rf-kl"]])
def test_output_to_a_full_disk_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "skipless", *words],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("skipless: cannot write the output: No space left")
    assert done.stderr.count("\n") == 1
