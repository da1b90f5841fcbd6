"""`score_tasks` and `skipless eval --tasks` from a folder of questions to files."""

import json
import sys

import numpy as np
import pytest
from tasks_material import (
    ROWS,
    hf_tokenizer,
    llama,
    own_tokenizer,
    write_more_rows,
    write_rows,
)

from skipless.cli import main
from skipless.errors import UserError
from skipless.evaluate import score_tasks
from skipless.evaluate.tasks import Coder, find_tasks, score_requests
from skipless.evaluate.tasks.asking import ask
from skipless.evaluate.tasks.tables import markdown, write_results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tasks") / "rows")


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    pytest.importorskip("transformers")
    return llama(), hf_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_quantised_model_against_itself(subject, folder):
    model, tokenizer = subject
    found = score_tasks(
        model, tokenizer, schemes=["W8A8-a:token", "W2A4-a:token"], source=str(folder)
    )
    full, fine, coarse = found.summary["rows"]
    assert [r["scheme"] for r in found.summary["rows"]] == [
        "full precision", "W8A8-a:token", "W2A4-a:token"
    ]  # fmt: skip
    assert len(full["tasks"]) == 8 and "against_full_precision" not in full["tasks"]["piqa"]
    kl = [sum(e["against_full_precision"]["kl_mean"] for e in row["tasks"].values())
          for row in (fine, coarse)]  # fmt: skip
    assert 0 < kl[0] < kl[1]
    low, high = coarse["average_interval"]
    assert low <= coarse["average_difference"] <= high
    assert coarse["average_difference"] == pytest.approx(coarse["average"] - full["average"])
    # what is written for each question gives the accuracies
    rows = [d for d in found.documents if d["scheme"] == "full precision"]
    assert len(rows) == 16
    boolq = [np.argmax(d["log_likelihoods"]) == d["gold"] for d in rows if d["task"] == "boolq"]
    assert full["tasks"]["boolq"]["acc"] == np.mean(boolq)
    # the model is as it was
    again = score_tasks(model, tokenizer, ["boolq"], source=str(folder))
    assert again.documents == [d for d in rows if d["task"] == "boolq"]
    page = markdown(found.summary, "tiny")
    assert "| average |" in page and "W2A4-a:token" in page and "0.429" in page


def test_words_that_the_model_would_say_itself(subject, tmp_path):
    """LAMBADA: share of greedy words and perplexity, without choices and their divergence."""
    folder = write_more_rows(tmp_path / "rows")
    found = score_tasks(*subject, ["lambada"], schemes=["W2A4-a:token"], source=str(folder))
    full, low = (row["tasks"]["lambada_openai"] for row in found.summary["rows"])
    ours = [d for d in found.documents if d["scheme"] == "full precision"]
    values = np.array([d["log_likelihoods"][0] for d in ours])
    assert full["perplexity"] == pytest.approx(np.exp(-values.mean()))
    assert full["perplexity_stderr"] == pytest.approx(
        full["perplexity"] * values.std(ddof=1) / 3**0.5
    )
    assert full["acc"] == np.mean([d["is_greedy"][0] for d in ours])
    paired = low["against_full_precision"]
    after = np.array([d["log_likelihoods"][0] for d in found.documents[3:]])
    assert paired["log_likelihood"]["difference"] == pytest.approx((after - values).mean())
    assert "kl_mean" not in paired and paired["num_questions"] == 3
    assert found.summary["tasks"][0]["chance"] == 0
    page = markdown(found.summary, "tiny")
    assert "| lambada_openai | 3 |  | perplexity |" in page and "log-likelihood, nats" in page


def test_subjects_and_their_first_examples(subject, tmp_path):
    model, tokenizer = subject
    folder = write_more_rows(tmp_path / "rows")
    found = score_tasks(model, tokenizer, ["mmlu"], source=str(folder), num_fewshot=2)
    entry = found.summary["rows"][0]["tasks"]["mmlu"]
    sizes = {name: one["num_questions"] for name, one in entry["subjects"].items()}
    assert sizes == {"world_religions": 1, "anatomy": 2}
    total = sum(one["acc"] * one["num_questions"] for one in entry["subjects"].values())
    assert entry["acc"] == pytest.approx(total / 3)
    asked = ask(find_tasks(["mmlu"])[0], Coder(tokenizer, 999), source=str(folder), num_fewshot=2)
    assert asked.before[1] == (
        "The following are multiple choice questions (with answers) about anatomy.\n\n"
        "Question 2 of anatomy?\nA. a cork\nB. a pear\nC. a stone\nD. a hat\nAnswer: C\n\n"
        "Question 0 of anatomy?\nA. a cork\nB. a pear\nC. a stone\nD. a hat\nAnswer: A\n\n"
    )
    with pytest.raises(UserError, match="is 6 and there are 5 examples of world_religions"):
        score_tasks(model, tokenizer, ["mmlu"], source=str(folder), num_fewshot=6)
    # without examples of their own, the other questions of the subject
    (folder / "mmlu" / "dev.jsonl").unlink()
    with pytest.raises(UserError, match="is 1 and there are 0 examples of world_religions"):
        score_tasks(model, tokenizer, ["mmlu"], source=str(folder), num_fewshot=1)


def test_bad_examples_are_not_passed_over(subject, tmp_path):
    folder = write_more_rows(tmp_path / "rows")
    (folder / "mmlu" / "dev.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="dev.jsonl has no column 'question'"):
        score_tasks(*subject, ["mmlu"], source=str(folder), num_fewshot=1)


def test_per_tensor_ranges_are_said(subject, folder):
    found = score_tasks(*subject, ["piqa"], schemes=["W8A8"], source=str(folder))
    assert found.summary["rows"][0]["scoring"] == "tree"
    assert found.summary["rows"][1]["scoring"] == "single"
    assert "W8A8: one request at a time" in markdown(found.summary, "tiny")


def test_ties_are_listed(subject, tmp_path):
    row = ROWS["piqa"][0]
    source = write_rows(tmp_path / "same", {"piqa": [row, {**row, "sol2": row["sol1"]}]})
    entry = score_tasks(*subject, ["piqa"], source=str(source)).summary["rows"][0]["tasks"]["piqa"]
    assert entry["num_ties"] == 1 and entry["ties"] == [1] == entry["near_ties"]


def test_what_does_not_fit_is_cut_or_left_out(subject, folder):
    model, tokenizer = subject
    found = score_tasks(model, tokenizer, ["boolq"], source=str(folder), max_length=12).summary
    assert found["tasks"][0]["num_truncated"] == 2 and found["tasks"][0]["left_out"] == []
    long, short = (max(len(tokenizer.encode(" " + row[sol])) for sol in ("sol1", "sol2"))
                   for row in ROWS["piqa"])  # fmt: skip
    assert long != short
    found = score_tasks(
        model, tokenizer, ["piqa"], source=str(folder), max_length=min(long, short)
    ).summary
    assert found["tasks"][0]["left_out"] == [0 if long > short else 1]
    assert "1 question left out" in markdown(found, "tiny")
    with pytest.raises(UserError, match="no question of piqa fits the 2 tokens"):
        score_tasks(model, tokenizer, ["piqa"], source=str(folder), max_length=2)


def test_examples_come_from_the_training_split_or_other_questions(tmp_path, folder):
    class Characters:
        eos_id = 0

        def encode(self, text):
            return [ord(c) for c in text]

    def prompts(source, count):
        asked = ask(find_tasks(["openbookqa"])[0], Coder(Characters(), 999), source=str(source),
                    num_fewshot=count)  # fmt: skip
        return ["".join(map(chr, (*r[0].inputs, r[0].targets[-1]))) for r in asked.encoded]

    assert prompts(folder, 0)[0] == "A cork in water will float"
    assert prompts(folder, 1)[0] == ("A stone in water will sink\n\nA cork in water will float")
    with pytest.raises(UserError, match="--num-fewshot is 2 and there are 1 examples"):
        prompts(folder, 2)
    inside = tmp_path / "openbookqa"
    inside.mkdir()
    row = {**ROWS["openbookqa"][0], "question_stem": "A pear is"}
    (inside / "train.jsonl").write_text(json.dumps(row))
    (inside / "test.jsonl").write_text(json.dumps(ROWS["openbookqa"][1]))
    assert prompts(tmp_path, 1) == ["A pear is float\n\nA stone in water will float"]


def test_bad_settings(subject, folder):
    for options, message in (
        ({"limit": 0}, "limit is 0"), ({"num_fewshot": -1}, "num_fewshot is -1"),
        ({"schemes": ["W8A8-static"]}, "give text to calibrate on"),
        ({"schemes": ["W8A8", "W8A8-w:tensor"]}, "W8A8 is named twice"),
        ({"schemes": ["W8Afp"], "scope": "everything"}, "scope"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            score_tasks(*subject, ["piqa"], source=str(folder), **options)


def test_the_command_on_a_run(copy_run, tmp_path, folder, capsys):
    path = copy_run(tmp_path / "run")
    words = ["eval", str(path), "--source", str(folder)]
    tasks = ["--tasks", "openbookqa", "winogrande", "--schemes", "W8A8-static", "W8A8"]
    assert main([*words, *tasks]) == 0
    out = capsys.readouterr().out
    assert "against full precision" in out and "tasks.json" in out
    summary = json.loads((path / "tasks.json").read_text())
    assert [r["scheme"] for r in summary["rows"]] == ["full precision", "W8A8-static", "W8A8"]
    assert (path / "tasks.png").read_bytes().startswith(b"\x89PNG")
    assert (path / "tasks.md").read_text().startswith("# ")
    rows = (path / "tasks-documents.jsonl").read_text().splitlines()
    assert len(rows) == 3 * 4
    write_results(path, "without questions", summary)  # as lm-eval's backend
    assert not (path / "tasks-documents.jsonl").exists()
    # the same as the library gives
    from skipless.train import load_run

    run = load_run(path)
    asked = ask(find_tasks(["openbookqa"])[0], Coder(run.tokenizer, 32), source=str(folder))
    scores = score_requests(run.model, asked.encoded).scores
    assert json.loads(rows[0])["log_likelihoods"] == [s.log_likelihood for s in scores[0]]


def test_earlier_results_are_kept(copy_run, tmp_path, folder, capsys):
    """A table of other tasks or settings gets a number; one that was measured again is replaced."""
    path = copy_run(tmp_path / "run")

    def ask_for(*words):
        assert main(["eval", str(path), "--source", str(folder), "--tasks", *words]) == 0
        return capsys.readouterr().err

    assert "earlier" not in ask_for("piqa", "boolq", "--schemes", "W8A8-static")
    first = (path / "tasks.json").read_bytes()
    assert "earlier" not in ask_for("piqa", "boolq", "openbookqa", "--schemes", "W8A8-static")
    assert not (path / "tasks-1.json").exists()
    assert "are now" in ask_for("piqa", "--limit", "1")
    kept = json.loads((path / "tasks-1.json").read_text())
    assert set(kept["rows"][1]["tasks"]) == {"piqa", "boolq", "openbookqa"} and first
    assert (path / "tasks-1-documents.jsonl").exists() and (path / "tasks-1.png").exists()
    assert "are now" in ask_for("piqa")
    assert json.loads((path / "tasks-2.json").read_text())["limit"] == 1
    (path / "tasks.json").write_text("{")  # of someone else
    assert "tasks-3.json" in ask_for("piqa")
    assert (path / "tasks-3.json").read_text() == "{"
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "pika"], "unknown task 'pika'"),
        (["--tasks", "qqq"], "social_iqa, winogrande (--backend lm-eval has others)"),
        (["--tasks", "gsm8k"], "gsm8k has the model write its answer, which our scorer does not"),
        (["--tasks", "piqa", "--limit", "none"], "--limit is 'none'"),
        (["--tasks", "piqa", "--num-fewshot", "-1"], "--num-fewshot is -1"),
        (["--tasks", "piqa", "--num-tokens", "9"], "--num-tokens is for the held-out loss"),
        (["--tasks", "piqa", "--source", "nowhere"], "--source is 'nowhere'"),
        (["--tasks", "piqa", "--text", "nowhere"], "--text is 'nowhere'"),
        (["--tasks", "piqa", "--schemes", "W99"], "99"),
        (["--tasks", "piqa", "--out", " "], "--out is empty"),
        (["--tasks", "piqa", "--out", __file__], ".py is no folder; name a folder to write"),
        (["--tasks", "piqa", "--out", f"{__file__}/in"], ".py is no folder; name a folder"),
        (["--schemes", "W8A8"], "--schemes goes with --tasks"),
        (["--limit", "3"], "--limit goes with --tasks"),
    ],
)
def test_bad_words(words, message, tiny_run, capsys):
    assert main(["eval", str(tiny_run), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_damaged_config_is_told_as_such(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"train": ')
    assert main(["eval", str(tmp_path)]) == 2
    assert "config.json is not valid JSON" in capsys.readouterr().err


def test_without_lm_eval(tiny_run, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    words = ["eval", str(tiny_run), "--tasks", "piqa", "--backend", "lm-eval"]
    assert main([*words, "--source", str(folder)]) == 2
    assert "lm-eval is not installed; install it with" in capsys.readouterr().err


def test_our_tokenizer_and_transformers_make_the_same_requests(tmp_path, folder):
    pytest.importorskip("transformers")
    both = (own_tokenizer(tmp_path), hf_tokenizer(tmp_path))
    first, second = ([ask(task, Coder(t, 256), source=str(folder)).encoded
                      for task in find_tasks(["core8"])] for t in both)  # fmt: skip
    assert first == second
