"""`skipless convert`: folders in and out, killed at the worst moment, errors that name options."""

import errno
import json
import os

import pytest

from skipless.cli import main
from skipless.surgery import connections, load


def test_a_loss_that_fell_is_drawn_below_zero(tmp_path, monkeypatch):
    """A logarithmic axis has no place for it, and must not show it as an increase."""
    from matplotlib.axes import Axes

    from skipless.report.conversion import draw_untrained

    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: drawn.append(a) or plot(self, *a, **k))
    rows = [{"share": 0.0, "loss": 5.0, "increase": 0.0},
            {"share": 0.5, "loss": 4.9, "increase": -0.1}]  # fmt: skip
    draw_untrained({"mlp": rows}, tmp_path / "curve.png")
    assert [list(ys) for _, ys in drawn] == [[5.0, 4.9], [0.0, -0.1]]


def test_sequences_are_as_long_as_the_model_sees(tiny, tmp_path):
    from skipless.surgery.conversion.folders import TextSource

    for family, length in (("llama", 32), ("gpt2", 32)):
        tiny.build(family).save_pretrained(tmp_path / family)
        assert TextSource(model=str(tmp_path / family), text=("sotu",)).length == length
    assert (
        TextSource(model="x", text=("sotu",), sequence_length=7).to_dict()["sequence_length"] == 7
    )


@pytest.fixture
def folder(tiny, text_file, tmp_path):
    """A tiny Llama with a tokenizer of its own."""
    from skipless.data import train_tokenizer

    tiny.build("llama", vocab_size=300).save_pretrained(tmp_path / "plain")
    train_tokenizer([text_file.read_text()], 300, tmp_path / "plain" / "tokenizer.json")
    return tmp_path / "plain"


@pytest.mark.parametrize("when", ["before the tokenizer", "at the figure", "before the record"])
def test_killed_while_it_finishes_it_goes_on(
    folder, text_file, cache, tmp_path, monkeypatch, capsys, when
):
    """A folder that calls itself finished has its tokenizer and figure."""
    from skipless.report import conversion as drawing
    from skipless.surgery.conversion import folders, keeping

    out = tmp_path / "out"
    words = ["convert", str(folder), "--text", str(text_file), "--sequence-length", "16",
             "--held-out-tokens", "64", "--device", "cpu", "--steps", "2", "--layers", "-1",
             "--sites", "mlp", "--out", str(out)]  # fmt: skip
    write = keeping.Keeper.write

    def killed(*_):
        raise KeyboardInterrupt

    def killed_at_the_end(self, state):
        if state.finished:
            raise KeyboardInterrupt
        write(self, state)

    with monkeypatch.context() as patched:
        if when == "before the tokenizer":
            patched.setattr(folders, "copy_tokenizer", killed)
        elif when == "at the figure":
            patched.setattr(drawing, "draw_conversions", killed)
        else:
            patched.setattr(keeping.Keeper, "write", killed_at_the_end)
        assert main(words) == 130
    assert not json.loads((out / "convert.json").read_text())["finished"]
    assert main(words) == 0
    assert json.loads((out / "convert.json").read_text())["finished"]
    assert {"convert.png", "config.json", "tokenizer.json"} <= set(os.listdir(out))
    assert not {"checkpoint", "partial"} & set(os.listdir(out)) and len(connections(load(out))) == 1
    capsys.readouterr()
    assert main(words) == 2 and "holds a finished conversion" in capsys.readouterr().err


def test_errors_name_the_options(folder, text_file, cache, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["convert", str(folder), "--text", str(text_file), "--sequence-length", "16",
             "--held-out-tokens", "64", "--device", "cpu", "--out", str(out)]  # fmt: skip
    for option, value, sentence in [
        ("--steps", "-1", "--steps is -1; it must be at least 0"),
        ("--skips-per-stage", "-1", "--skips-per-stage is -1"),
        ("--fit-batches", "1", "--fit-batches is 1"),
        ("--lr", "0", "--lr is 0.0"),
        ("--temperature", "0", "--temperature is 0.0"),
        ("--loss-budget", "-1", "--loss-budget is -1.0"),
        ("--batch-size", "0", "--batch-size is 0"),
        ("--sequence-length", "0", "--sequence-length is 0"),
        ("--sequence-length", "64", "--sequence-length is 64 and"),
        ("--held-out-tokens", "0", "--held-out-tokens is 0"),
        ("--layers", "7", "layer 7 is out of range"),
    ]:
        assert main([*words, option, value]) == 2
        said = capsys.readouterr().err.replace(str(tmp_path), "")
        assert sentence in said and "convert." not in said and "_" not in said.splitlines()[-1]
        assert not out.exists()  # not even a lock
    started = [*words, "--steps", "1", "--layers", "-1", "--sites", "mlp", "--lr", "1e30"]
    assert main([*started, "--lr", "1e30"]) == 2
    capsys.readouterr()
    assert main([*started, "--steps", "2"]) == 2
    assert "(--steps is 1 there and 2 here)" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["copy_tokenizer", "draw_conversions"])
def test_a_disk_that_is_full_at_the_end_is_told_and_the_command_goes_on(
    folder, text_file, cache, tmp_path, monkeypatch, capsys, where
):
    from skipless.report import conversion as drawing
    from skipless.surgery.conversion import folders

    out = tmp_path / "out"
    words = ["convert", str(folder), "--text", str(text_file), "--sequence-length", "16",
             "--held-out-tokens", "64", "--device", "cpu", "--steps", "1", "--layers", "-1",
             "--sites", "mlp", "--out", str(out)]  # fmt: skip

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folders if where == "copy_tokenizer" else drawing, where, full)
        assert main(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"to {out}: No space left on device; free space and run the same command again" in said
    assert main(words) == 0 and (out / "tokenizer.json").exists()


def test_the_command(tiny, text_file, cache, tmp_path, capsys):
    from skipless.data import train_tokenizer

    plain, out = tmp_path / "plain", tmp_path / "out"
    tiny.build("llama", vocab_size=300).save_pretrained(plain)
    words = ["convert", str(plain), "--text", str(text_file), "--sequence-length", "16",
             "--held-out-tokens", "128", "--device", "cpu"]  # fmt: skip
    train = [*words, "--distill", "--steps", "3", "--layers", "-1", "--out", str(out)]
    assert main(train) == 2 and "holds no tokenizer.json" in capsys.readouterr().err
    train_tokenizer([text_file.read_text()], 300, plain / "tokenizer.json")
    assert main([*words, "--untrained", "--out", str(tmp_path / "un")]) == 0
    said = capsys.readouterr().out
    drawn = tmp_path / "un" / "untrained.png"
    assert "attention" in said and "mlp" in said and said.splitlines()[-1] == str(drawn)
    assert list(drawn.parent.iterdir()) == [drawn]
    assert main(train) == 0
    said = capsys.readouterr().out
    assert "1 of 4" in said and "2 of 4" in said and "unconverted" in said and str(out) in said
    row = json.loads((out / "convert.json").read_text())["stages"][0]
    assert f"{row['increase']:+.4f} ± {row['standard_error']:.4f}" in said
    assert {"convert.json", "convert.png", "config.json", "tokenizer.json"} <= set(os.listdir(out))
    assert len(connections(load(out))) == 2
    for arguments, sentence in [
        (train, "holds a finished conversion (2 of 4 skips removed"),
        ([*train[:-1], str(tmp_path / "b"), "--loss-budget", "0", "--lr", "1"],
         "the first stage costs"),
        (["convert", str(out), "--out", str(tmp_path / "c")], "converted already"),
        (["convert", str(plain)], "--out is missing"),
        ([*train[:-1], str(tmp_path / "d"), "--sequence-length", "64"], "sees 32 tokens"),
        ([*train[:-1], str(tmp_path / "e"), "--text", "nowhere.txt"], "nowhere.txt"),
    ]:  # fmt: skip
        assert main(arguments) == 2, arguments
        assert sentence in capsys.readouterr().err
