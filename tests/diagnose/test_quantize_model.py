"""`skipless quantize MODEL`: a Hugging Face folder on a text, method by method."""

from __future__ import annotations

import json

import pytest

from skipless.cli import main


def test_a_folder_is_measured_on_the_second_half_of_a_text(saved, capsys):
    words = ["quantize", str(saved / "model"), "--text", str(saved / "text.txt"),
             "--num-tokens", "128", "--schemes", "W3Afp-w:channel"]  # fmt: skip
    assert main([*words, "--methods", "gptq", "stream", "--json"]) in (0, None)
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["rtn", "gptq", "stream"]
    assert all(row["unit"] == "nats a token" and row["increase"] is not None for row in rows)
    assert main([*words, "--override", "*layers.0.*=fp"]) in (0, None)
    out = capsys.readouterr().out
    assert "in nats a token, by method" in out and "W3Afp-w:channel *layers.0.*=fp" in out


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--methods", "gtpq"], "did you mean 'gptq'"),
        (["--override", "nothing=fp"], "matches nothing"),
        (["--schemes", "W99A8"], "W99A8"),
    ],
)
def test_mistakes(saved, capsys, extra, says):
    words = ["quantize", str(saved / "model"), "--text", str(saved / "text.txt"),
             "--num-tokens", "64"]  # fmt: skip
    assert main([*words, *extra]) == 2
    assert says in capsys.readouterr().err


def test_a_model_needs_a_text(saved, capsys):
    assert main(["quantize", str(saved / "model")]) == 2
    assert "is no run" in (err := capsys.readouterr().err) and "--text FILE" in err


def test_text_is_not_for_runs(saved, tiny_run, capsys):
    assert main(["quantize", str(tiny_run), "--text", str(saved / "text.txt")]) == 2
    assert "leave out --text" in capsys.readouterr().err
