"""Errors name what was typed, and no word of the command line is ignored."""

import pytest

from skipless.cli import main
from skipless.cli.arguments import as_options
from skipless.errors import UserError


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("models list smollm2-135m", "models list takes no names, and got smollm2-135m"),
        ("data list sotu milton", "data list takes no names, and got sotu milton"),
        ("data prepare text.txt --vocab-size 1", "--vocab-size is 1"),
        ("compare-connections --kinds foo", "--kinds is 'foo'"),
        ("compare-connections --tasks foo", "--tasks is 'foo'"),
        ("compare-connections --seeds -1", "--seeds is -1"),
        ("compare-connections --layers 5", "--layers has 5"),
        ("patch plain --connection rezro", "--connection is 'rezro'"),
        ("patch plain --connection fixed", "set a or b in Python"),
        ("patch plain --layers 9", "layer 9 is out of range"),
        ("prune plain --tolerance -1", "--tolerance is -1"),
        ("prune plain --loss-budget 0", "--loss-budget is 0"),
        ("fold plain --num-tokens 0", "--num-tokens is '0'"),
        ("convert plain --steps -1", "--steps is -1"),
        ("data get sotu --vocab-size 4096", "--vocab-size 4096 would be ignored"),
        ("data list --vocab-size 4096", "take data prepare"),
        ("sweep demo-fast-rf-kl --values 1e-3 --jobs 0 --data.sources no.txt", "--jobs is 0"),
        ("compare-connections --fast --jobs 0", "--jobs is 0"),
        ("demo --fast --jobs 0", "--jobs is 0"),
        ("convert plain --untrained --distill", "so --distill would be ignored"),
        ("convert plain --untrained --lr 1e-3", "so --lr 0.001 would be ignored"),
        ("convert plain --untrained --loss-budget 0.1", "so --loss-budget 0.1 would be ignored"),
        ("convert plain --start anneal --fit-batches 4", "so --fit-batches 4 would be ignored"),
        ("convert plain --temperature 2", "so --temperature 2.0 would be ignored; add it"),
        ("convert plain --steps 0 --train layers", "so --train layers would be ignored"),
    ],
)
def test_errors_name_the_option(words, sentence, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIPLESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words " * 200)
    command, *rest = words.split()
    if "plain" in rest:
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40)
        transformers.GPT2LMHeadModel(config).save_pretrained("plain")
    out = ["--out", "out"] if command not in ("models", "data") else []
    assert main([command, *rest, *out]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("skipless: ") and sentence in said
    assert not (tmp_path / "out").exists()


def test_settings_become_options_and_the_rest_stays():
    names = {"convert.steps": "--steps", "steps": "--few", "stacks=": "--stacks"}
    for before, after in [
        ("convert.steps is 3", "--steps is 3"),
        ("steps is 3 and max_steps, steps_more and a/steps stay",
         "--few is 3 and max_steps, steps_more and a/steps stay"),
        ("choose with stacks=", "choose with --stacks"),
        ("nothing of them", "nothing of them"),
    ]:  # fmt: skip
        with pytest.raises(UserError) as caught, as_options(names):
            raise UserError(before)
        assert str(caught.value) == after
