"""`skipless generate`: what goes where, how it ends, and what is refused in one sentence."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from skipless.cli import main
from skipless.train import load_run

WORDS = ["--prompt", "the king said lord", "--max-new-tokens", "12", "--ignore-end"]


def run(capsys, *words):
    code = main(["generate", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_text_to_stdout_and_the_rest_to_stderr(tiny_run, cache, capsys):
    import torch

    code, out, err = run(capsys, tiny_run, *WORDS)
    loaded = load_run(tiny_run)
    ids = loaded.tokenizer.encode(WORDS[1])
    expected = loaded.model.generate(torch.tensor([ids]), 12)[0, len(ids) :].tolist()
    assert code == 0 and out == loaded.tokenizer.decode(expected) + "\n"
    assert "full precision (float32) on cpu" in err and f"{len(ids)} prompt tokens at" in err
    assert "12 new tokens at" in err and "a second" in err and "cache" in err


def test_json_holds_the_same(tiny_run, cache, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("my come go\n")
    _, plain, _ = run(capsys, tiny_run, *WORDS)
    code, out, err = run(capsys, tiny_run, *WORDS, "--file", file, "--json")
    found = json.loads(out)
    first, second = found["results"]
    assert code == 0 and not err and first["text"] + "\n" == plain
    assert second["prompt"] == "my come go" and second["num_new_tokens"] == 12
    assert first["tokens_per_second"] > 0 and first["cache_bytes"] > 0
    assert first["finish"] == "length" and found["kind"] == "full"


def test_a_text_beyond_the_context_says_so(tiny_run, cache, capsys):
    """At the end the last 16 to 32 tokens are seen, of a context of 32."""
    num_prompt = len(load_run(tiny_run).tokenizer.encode(WORDS[1]))
    for beyond, dropped in ((0, 0), (1, 16), (16, 16), (17, 32)):
        new = 32 + 1 + beyond - num_prompt  # the last one is not read again
        words = [*WORDS[:2], "--ignore-end", "--max-new-tokens", new]
        _, _, err = run(capsys, tiny_run, *words)
        _, out, _ = run(capsys, tiny_run, *words, "--json")
        assert json.loads(out)["results"][0]["num_dropped_tokens"] == dropped
        told = f"outgrew the 32 tokens that the model sees: its first {dropped} were out of sight"
        assert (told in err) is (dropped > 0) and ("outgrew" in err) is (dropped > 0)


def test_several_prompts_and_stdin(tiny_run, cache, capsys, monkeypatch):
    _, one, _ = run(capsys, tiny_run, *WORDS)
    stdin = io.TextIOWrapper(io.BytesIO(b"the king said lord\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    words = ["--prompt", "my come", "-", "--max-new-tokens", "12", "--ignore-end"]
    code, out, err = run(capsys, tiny_run, *words)
    assert code == 0 and out.endswith("\n\n" + one)
    assert "[1] my come" in err and "[2] the king said lord" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the king said lord")))
    assert run(capsys, tiny_run, *WORDS[2:])[1] == one
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, _, err = run(capsys, tiny_run, *WORDS[2:])
    assert code == 2 and "not UTF-8" in err


def test_marks_and_line_ends_of_other_systems_are_no_text(
    tiny_run, cache, capsys, monkeypatch, tmp_path
):
    written = b"\xef\xbb\xbfthe king\r\nsaid lord\r\n"
    (tmp_path / "prompt.txt").write_bytes(written)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written)))
    words = ["--prompt", "-", "--file", tmp_path / "prompt.txt", "--max-new-tokens", "1", "--json"]
    _, out, _ = run(capsys, tiny_run, *words)
    assert [found["prompt"] for found in json.loads(out)["results"]] == ["the king\nsaid lord"] * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", " \n"], "the prompt is empty"),
        (["--prompt", "-", "-"], "- stands for stdin, which is read once"),
        (["--prompt", "king " * 60], "sees 32; shorten it"),
        (["--file", "missing.txt"], "cannot read missing.txt"),
        (["--prompt", "a", "--scheme", "W8"], "does not say what happens to activations"),
        (["--prompt", "a", "--scheme", "X8A8"], "is not a quantisation scheme"),
        (["--prompt", "a", "--scope", "block"], "give --scheme too"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is '0'"),
        (["--prompt", "a", "--top-p", "1.5"], "skipless: --top-p is 1.5; a share"),
        (["--prompt", "a", "--top-k", "0"], "skipless: --top-k is 0; a whole number >= 1"),
        (["--prompt", "a", "--temperature", "nan"], "skipless: --temperature is nan; a finite"),
        (["--prompt", "a", "--seed", "-1"], "skipless: --seed is -1; a whole number"),
        (["--prompt", "a", "--stop", ""], "skipless: a text of --stop is empty"),
        (["--prompt", "a", "--device", "tpu9"], "--device is 'tpu9'"),
        (["--prompt", "a", "--kv-bits", "20"], "--kv-bits is 20"),
    ],
)  # fmt: skip
def test_bad_input(tiny_run, cache, capsys, words, told, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, tiny_run, *words)
    assert code == 2 and out == "" and told in err
    assert err.startswith("skipless: ") and err.count("\n") == 1


def test_what_is_wrong_is_told_before_a_model_is_read(
    tiny_run, cache, capsys, monkeypatch, tmp_path
):
    from skipless.serving import opening

    def read(*_):
        raise AssertionError("a model was read")

    monkeypatch.setattr(opening, "_open_plain", read)
    onnx = tmp_path / "onnx"
    onnx.mkdir()
    (onnx / "model.onnx").write_bytes(b"")
    for words, told in [
        ([tiny_run, "--kv-bits", "1"], "--kv-bits is 1; a whole number from 2 to 16"),
        ([tiny_run, "--device", "tpu9"], "--device is 'tpu9'"),
        ([tiny_run, "--temperature", "-1"], "--temperature is -1.0; a finite number >= 0"),
        ([tmp_path], "holds no config.json; name a run directory"),
        ([onnx / "model.onnx"], "is a file; name a run directory"),
        ([onnx], "holds ONNX files, which `skipless.export.open_session` reads"),
    ]:
        code, _, err = run(capsys, *words, "--prompt", "a")
        assert code == 2 and told in err and err.count("\n") == 1


def test_a_name_that_is_none(capsys):
    code, _, err = run(capsys, "smollm2-135", "--prompt", "a")
    assert code == 2 and "did you mean 'smollm2-135m'?" in err


def start(run_dir, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "skipless", "generate", str(run_dir), "--prompt", "the king",
         "--ignore-end", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        # a suite that runs in a shell's background ignores it, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_a_reader_that_goes_away_ends_it_quietly(tiny_run, cache):
    process = start(tiny_run, "--max-new-tokens", "200000")
    assert process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(60) == 0
    assert "Error" not in err and "Exception" not in err and "interrupted" not in err


def test_ctrl_c_keeps_what_was_written(tiny_run, cache):
    process = start(tiny_run, "--max-new-tokens", "200000")
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    err = err.decode()
    assert process.returncode == 130 and "Traceback" not in err
    assert (first + rest).endswith(b"\n") and len(first) == 20
    assert "(interrupted)" in err and "tokens were written" in err.splitlines()[-1]


def test_ctrl_c_in_json(tiny_run, cache, capsys, monkeypatch):
    from skipless.serving import writing

    sample, drawn = writing.sample, []

    def interrupted(*arguments):
        drawn.append(sample(*arguments))
        if len(drawn) == 6:
            raise KeyboardInterrupt
        return drawn[-1]

    _, whole, _ = run(capsys, tiny_run, *WORDS, "--json")
    monkeypatch.setattr(writing, "sample", interrupted)
    code, out, err = run(capsys, tiny_run, *WORDS, "--prompt", "the king said lord", "my", "--json")
    (found,) = json.loads(out)["results"]
    assert code == 130 and "5 tokens were written" in err
    assert found["finish"] == "interrupted"
    assert found["token_ids"] == json.loads(whole)["results"][0]["token_ids"][:5]
