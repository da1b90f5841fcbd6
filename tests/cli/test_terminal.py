"""The commands eval, probe and quantize: what they read, what they print, how early they refuse."""

import json
import subprocess
import sys

import pytest

from skipless.cli import main
from skipless.cli.arguments import whole_number
from skipless.cli.terminal import evaluation_line, probe_lines, quantize_lines
from skipless.errors import UserError


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e3", 1000), ("20_000", 20000), ("1024", 1024), ("2.5E3", 2500), (None, None)],
)
def test_numbers_as_people_write_them(text, number):
    assert whole_number("--num-tokens", text) == number


@pytest.mark.parametrize("text", ["", "many", "1.5", "1e-3", "0", "-5", "1e999", "nan"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(UserError, match="--num-tokens is .*at least 1, such as 20_000"):
        whole_number("--num-tokens", text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "no/such/run"], "not a run directory"),
        (["eval", "RUN", "--text", "no/such/text"], "which does not exist"),
        (["probe", "no/such/run"], "not a run directory"),
        (["quantize", "no/such/run"], "not a run directory"),
        (["quantize", "RUN", "--schemes", "W8A8", "W4"], "W4Afp"),
        (["quantize", "RUN", "--schemes", "w4a8"], "did you mean 'W4A8'?"),
        (["quantize", "RUN", "--schemes", "W8A8,W4"], "'W4' does not say"),
        (["quantize", "RUN", "--schemes", "W8A8", "W4A8-w:g48"], "use g32"),
        (["quantize", "RUN", "--num-tokens", "many"], "--num-tokens is 'many'"),
    ],
)
def test_a_mistake_is_told_before_torch_is_imported(arguments, said, tiny_run):
    code = (
        "import sys\nfrom skipless.cli import main\ncode = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'imported torch first'\nsys.exit(code)\n"
    )
    words = [str(tiny_run) if word == "RUN" else word for word in arguments]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


def test_quantize_answers_which_layer_is_worst_at_the_scheme_asked_for(copy_run, tmp_path, capsys):
    path = str(copy_run(tmp_path / "run"))
    assert main(["quantize", path, "--schemes", "W8A8", "W4A8-a:token-clip:mse", "--by-layer",
                 "--all-but-one", "--num-tokens", "1e2"]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    table = lines[1:5]
    assert len({line.index(" block" if " block" in line else " linear") for line in table}) == 1
    assert len({len(line) for line in table}) == 1
    titles = [line for line in lines if "W4A8-a:token-clip:mse, scope block" in line]
    assert [title.split()[:2] for title in titles] == [
        ["worst", "activations"], ["worst", "weights"], ["error", "of"], ["increase", "of"],
        ["what", "one"],
    ]  # fmt: skip
    assert "at 8 bits" in titles[0] and "at 4 bits" in titles[1]
    weights = lines[lines.index(titles[1]) + 2 :][:5]
    ratios = [float(line.split()[1]) for line in weights]
    assert ratios == sorted(ratios) and weights[0].startswith("layers.")
    depth = lines[lines.index(titles[2]) + 2 :][:4]
    assert [line.split()[:2] for line in depth] == [
        [layer, sub] for layer in "01" for sub in ("attention", "mlp")
    ]
    assert sum("<- grows most" in line for line in depth) == 1
    assert lines.index(titles[4]) == lines.index(titles[3]) + 5
    assert len(lines) == lines.index(titles[4]) + 4
    assert main(["quantize", path, "--all-but-one"]) == 2
    assert "goes with --by-layer" in capsys.readouterr().err


def test_every_loss_says_on_how_many_tokens_and_whether_it_beats_frequencies(
    copy_run, tmp_path, capsys
):
    run = copy_run(tmp_path / "run")
    result = json.loads((run / "train.json").read_text())
    assert result["held_out_tokens"] == 128  # train.eval_tokens

    def said(*words):
        assert main([*words]) == 0
        return capsys.readouterr().out

    last = f"held-out loss {result['held_out_loss']:.4f} nats on 128 tokens after 8 steps"
    shown = said("train", str(run))
    assert last in shown
    assert "(64 held-out tokens)" in said("eval", str(run), "--num-tokens", "64")
    words = ("quantize", str(run), "--num-tokens", "64", "--scopes", "linear")
    assert " nats on 64 held-out tokens\n" in said(*words, "--schemes", "W8A8")
    assert " on 64 tokens, " in said(*words[:4], "--suggest", "W8A8", "W8A16")
    note = json.loads((run / "data.json").read_text())
    for frequencies, above in ((result["held_out_loss"] - 0.1, True), (99.0, False)):
        (run / "data.json").write_text(json.dumps(note | {"unigram_loss": frequencies}))
        for command in ("train", "eval"):
            told = f"token frequencies alone reach {frequencies:.4f} nats"
            assert (told in said(command, str(run))) is above
    (run / "data.json").write_text(json.dumps(note | {"unigram_loss": None}))
    assert "frequencies" not in said("train", str(run))
    del result["held_out_tokens"]  # a run of before
    (run / "train.json").write_text(json.dumps(result))
    assert last.replace(" on 128 tokens", "") in said("train", str(run))


def test_one_sequence_has_no_error_and_eval_says_so(copy_run, tmp_path, capsys):
    path = str(copy_run(tmp_path / "run"))
    assert main(["eval", path, "--num-tokens", "16"]) == 0
    out = capsys.readouterr().out
    assert "±" not in out and "of one sequence, too few for a standard error" in out
    assert main(["eval", path, "--num-tokens", "64"]) == 0
    assert "±" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["eval", "probe", "quantize", "suggest"])
def test_a_text_of_fewer_tokens_than_asked_for_says_so(copy_run, tmp_path, capsys, command):
    path = str(copy_run(tmp_path / "run"))
    words = {
        "quantize": ["quantize", path, "--schemes", "W8A8,W4A8", "--scopes", "linear"],
        "suggest": ["quantize", path, "--suggest", "W8A8", "W8A16", "--max-increase", "9"],
    }.get(command, [command, path])
    assert main([*words, "--num-tokens", "1e7"]) == 0
    shown = capsys.readouterr()
    assert "--num-tokens asks for 10,000,000 and the text has" in shown.err
    assert "in sequences of 16: measured on these" in shown.err
    if command == "quantize":
        assert "2 schemes in scope linear" in shown.err
        assert [line.split()[:2] for line in shown.out.splitlines()[1:3]] == [
            ["W8A8", "linear"], ["W4A8", "linear"]
        ]  # fmt: skip
    assert main([*words, "--num-tokens", "64"]) == 0
    assert "--num-tokens" not in capsys.readouterr().err


def test_what_is_not_known_is_left_out_or_dashed():
    line = evaluation_line({"held_out_loss": 1.0, "standard_error": None, "perplexity": 2.7,
                            "bits_per_byte": None, "num_tokens": 16})  # fmt: skip
    assert "None" not in line and "bits" not in line
    site = {"site": "a:output", "kurtosis": None, "max_over_std": None, "std": None}
    assert probe_lines({"sites": [site]})[1].split() == ["a:output", "–", "–", "–"]
    row = {"site": "a", "kind": "weight", "bits": 4, "sqnr": None, "ideal": 18.9, "gap": None}
    place = {"scheme": "W4A8", "scope": "linear"}
    lines = quantize_lines({"full_precision": 1.0, "num_tokens": 4096, "rows": [
        {"scheme": "W4A8", "scope": "linear", "loss": 1.0, "increase": -0.01}],
        "sqnr": place | {"rows": [row]}, "error": place | {"rows": [
            {"layer": None, "sublayer": None, "r": 0.5}]}})  # fmt: skip
    assert lines[0] == "full precision 1.0000 nats on 4,096 held-out tokens"
    assert lines[1] == "W4A8  linear  1.0000  -0.0100 nats" and "grows" not in lines[-1]
