"""The same requests and numbers as lm-eval 0.4.13, which is optional (extra `eval`).

lm-eval reads our own questions through its official task files, so no hub is needed.
"""

import json

import pytest
import torch
from tasks_material import (
    MORE_ROWS,
    hf_tokenizer,
    llama,
    own_tokenizer,
    write_more_rows,
    write_rows,
)

from skipless.cli import main
from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.evaluate import score_tasks
from skipless.evaluate.tasks import CORE8, Coder, find_tasks, score_requests
from skipless.evaluate.tasks.asking import ask
from skipless.evaluate.tasks.harness import _paired, _plain, run_lm_eval, wrap
from skipless.evaluate.tasks.local import PREFIX, local_tasks
from skipless.model import Transformer

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed (pip install -e '.[eval]')"
)
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # lm-eval takes half a minute to list its tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("tasks") / "rows")


@pytest.mark.parametrize("first", [False, True])
def test_requests_and_log_likelihoods_are_lm_evals(first, folder, tmp_path):
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = llama(length=24), hf_tokenizer(tmp_path, bos_token="!")
    if first:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="! $A", special_tokens=[("!", tokenizer.bos_token_id)]
        )
    theirs, coder, num_truncated = wrap(model, tokenizer), Coder(tokenizer, 24), 0
    with local_tasks(CORE8, str(folder)) as (manager, names):
        for name, task in manager.load(names)["tasks"].items():
            asked = ask(find_tasks([name.removeprefix(PREFIX)])[0], coder, source=str(folder))
            num_truncated += asked.num_truncated
            task.build_all_requests(rank=0, world_size=1)
            wanted = sorted(task.instances, key=lambda one: (one.doc_id, one.idx))
            texts = [pair for item in asked.items
                     for pair in zip(item.contexts, item.continuations, strict=True)]  # fmt: skip
            assert texts == [one.args for one in wanted], name
            found = [s for row in score_requests(model, asked.encoded).scores for s in row]
            numbers = theirs.loglikelihood(wanted, disable_tqdm=True)
            assert [s.is_greedy for s in found] == [greedy for _, greedy in numbers]
            assert [s.log_likelihood for s in found] == pytest.approx(
                [number for number, _ in numbers], abs=1e-4
            )
    assert num_truncated > 0  # 24 tokens: cutting on the left is compared too


def test_lambada_and_mmlu_are_lm_evals(tmp_path):
    """With MMLU's examples in front, which are the first ones in both."""
    model, tokenizer = llama(length=999), hf_tokenizer(tmp_path)
    folder = str(write_more_rows(tmp_path / "rows"))
    schemes = ["W4A8"]
    for shots, names in ((0, ["lambada", "mmlu"]), (2, ["mmlu"])):
        ours = score_tasks(model, tokenizer, names, source=folder, num_fewshot=shots,
                           schemes=schemes).summary["rows"]  # fmt: skip
        theirs = run_lm_eval(model, tokenizer, names, source=folder, num_fewshot=shots,
                             schemes=schemes)["rows"]  # fmt: skip
        for row, other in zip(ours, theirs, strict=True):
            mine, found = row["tasks"]["mmlu"], other["tasks"]["mmlu"]
            assert mine["subjects"] == found["subjects"] and len(found["subjects"]) == 2
            assert (mine["acc"], mine["acc_stderr"]) == pytest.approx(
                (found["acc"], found["acc_stderr"])
            )
        mine, found = (rows[1]["tasks"]["mmlu"]["against_full_precision"]["acc"]
                       for rows in (ours, theirs))  # fmt: skip
        assert found["difference"] == pytest.approx(mine["difference"])
        assert found["interval"] == pytest.approx(mine["interval"])
        if shots == 0:
            mine, found = (rows[0]["tasks"]["lambada_openai"] for rows in (ours, theirs))
            assert found["perplexity"] == pytest.approx(mine["perplexity"], rel=1e-4)
            assert found["acc"] == mine["acc"]
    with local_tasks(["mmlu"], folder) as (manager, names):
        for key, task in manager.load(names)["tasks"].items():
            task.set_config("num_fewshot", 2)
            task.build_all_requests(rank=0, world_size=1)
            asked = ask(find_tasks(["mmlu"])[0], Coder(tokenizer, 999), source=folder,
                        num_fewshot=2)  # fmt: skip
            texts = [before + item.contexts[0]
                     for before, item in zip(asked.before, asked.items, strict=True)
                     if item.subject == key.removeprefix(f"{PREFIX}mmlu_")]  # fmt: skip
            assert texts == [one.args[0] for one in task.instances if one.idx == 0]


def test_gsm8k_without_a_hub(tmp_path, monkeypatch):
    """Its questions out of a folder; examples are other questions."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_more_rows(tmp_path / "rows")
    model, tokenizer = llama(length=999), hf_tokenizer(tmp_path)
    rows = run_lm_eval(model, tokenizer, ["gsm8k"], source=str(folder), num_fewshot=1,
                       schemes=["W8A8-a:token"])["rows"]  # fmt: skip
    assert set(rows[0]["tasks"]["gsm8k"]) >= {
        "exact_match (strict-match)", "exact_match (flexible-extract)",
        "exact_match (strict-match)_stderr",
    }  # fmt: skip
    paired = rows[1]["tasks"]["gsm8k"]["against_full_precision"]
    assert paired["exact_match (strict-match)"]["difference"] == 0
    with local_tasks(["gsm8k"], str(folder)) as (manager, names):
        task = manager.load(names)["tasks"][f"{PREFIX}gsm8k"]
        task.set_config("num_fewshot", 1)
        task.build_all_requests(rank=0, world_size=1)
        texts = [one.args[0] for one in task.instances]
    first, second = (f"Question: {row['question']}\nAnswer:" for row in MORE_ROWS["gsm8k"])
    assert texts[0].endswith(first) and texts[0].startswith(second) and first not in texts[1][-60:]


def test_subjects_that_lm_eval_does_not_have(tmp_path):
    folder = write_more_rows(tmp_path / "rows")
    row = {**MORE_ROWS["mmlu"][0], "subject": "../corks"}
    (folder / "mmlu" / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="has no subject '../corks' of mmlu"):
        run_lm_eval(llama(), hf_tokenizer(tmp_path), ["mmlu"], source=str(folder))


def test_empty_contexts_and_spaces(tmp_path):
    from lm_eval.api.instance import Instance

    model, tokenizer = llama(), hf_tokenizer(tmp_path)
    pairs = [("", "a cork"), ("a cork ", "floats"), ("a cork  ", " floats"), ("a co", "rk floats")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    numbers = wrap(model, tokenizer).loglikelihood(requests, disable_tqdm=True)
    encoded = [[Coder(tokenizer, 256).encode(*pair)] for pair in pairs]
    found = [row[0].log_likelihood for row in score_requests(model, encoded).scores]
    assert found == pytest.approx([number for number, _ in numbers], abs=1e-4)


def test_accuracies_are_the_same(folder, tmp_path):
    model, tokenizer = llama(), hf_tokenizer(tmp_path)
    ours = score_tasks(model, tokenizer, schemes=["W8A8"], source=str(folder)).summary["rows"]
    theirs = run_lm_eval(model, tokenizer, schemes=["W8A8"], source=str(folder))["rows"]
    for row, other in zip(ours, theirs, strict=True):
        assert row["scheme"] == other["scheme"]
        for name, entry in row["tasks"].items():
            found = other["tasks"][name]
            assert entry["acc"] == found["acc"] and entry.get("acc_norm") == found.get("acc_norm")
    assert theirs[1]["tasks"]["piqa"]["against_full_precision"]["acc"] == {
        key: ours[1]["tasks"]["piqa"]["against_full_precision"]["acc"][key]
        for key in ("difference", "interval")
    }


def test_a_run_through_lm_eval(copy_run, tmp_path, folder, capsys):
    path = copy_run(tmp_path / "run")
    words = ["eval", str(path), "--tasks", "openbookqa", "winogrande", "--source", str(folder)]
    assert main(words) == 0
    ours = json.loads((path / "tasks.json").read_text())["rows"][0]["tasks"]
    assert main([*words, "--backend", "lm-eval"]) == 0
    found = json.loads((path / "tasks.json").read_text())
    assert found["backend"].startswith("lm-eval 0.4")
    for name in ("openbookqa", "winogrande"):
        assert found["rows"][0]["tasks"][name]["acc"] == ours[name]["acc"]
    assert "openbookqa" in capsys.readouterr().out


def write_sums(folder, **generation):
    """A task whose answers are written, read out of the text in two ways, as a YAML file."""
    rows = [{"question": f"{n} and {n} are", "answer": f" {2 * n}"} for n in range(1, 6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "sums", "dataset_path": "json", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 6, **generation},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": "whole", "filter": [{"function": "take_first"}]},
            {"name": "letter", "filter": [
                {"function": "regex", "regex_pattern": "([a-z])"}, {"function": "take_first"}]},
        ],
    }  # fmt: skip
    file = folder / "sums.yaml"
    file.write_text(json.dumps(task))  # YAML holds JSON
    return file


def test_a_run_writes_answers(copy_run, tmp_path, capsys):
    """A task that has the model write, by its file: the text is that of the run's own decoder."""
    from skipless.train import load_run

    path, file = copy_run(tmp_path / "run"), write_sums(tmp_path)
    run = load_run(path)
    written = {}
    for row in map(json.loads, (tmp_path / "sums.jsonl").read_text().splitlines()):
        ids = torch.tensor([run.tokenizer.encode(row["question"])])
        tokens = run.model.generate(ids, 6)[0, ids.shape[1] :].tolist()
        written[row["question"]] = run.tokenizer.decode(tokens).split("\n")[0]
    from skipless.hf.converting import from_transformer

    model = from_transformer(run.model)
    tokenizer = run.tokenizer.for_transformers(32)
    found = lm_eval.simple_evaluate(
        wrap(model, tokenizer, 32), tasks=[str(file)], bootstrap_iters=0, log_samples=True,
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
    )["samples"]["sums"]  # fmt: skip
    assert {s["doc"]["question"]: s["resps"][0][0] for s in found} == written
    words = ["eval", str(path), "--tasks", str(file), "--backend", "lm-eval"]
    assert main([*words, "--schemes", "W2A4", "W8A8-static", "--limit", "4"]) == 0
    out = capsys.readouterr().out
    assert "exact_match (whole)" in out and "exact_match (letter)" in out
    rows = json.loads((path / "tasks.json").read_text())["rows"]
    assert [row["scheme"] for row in rows] == ["full precision", "W2A4", "W8A8-static"]
    paired = rows[1]["tasks"]["sums"]["against_full_precision"]
    assert set(paired) == {"exact_match (whole)", "exact_match (letter)"}
    assert "exact_match" in (path / "tasks.md").read_text()
    write_sums(tmp_path, max_gen_toks=32)
    assert main(words) == 2
    assert "as many tokens as it takes in all, 32" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "told"), [
    ("task: [unclosed", "lm-eval cannot run .*task.yaml .*flow sequence"),
    ("- a", "lm-eval cannot run .*task.yaml .*YAML dict"),
    ("QUESTION_LOST", "lm-eval cannot run .*task.yaml .*'nothing' is undefined"),
    ("METRIC_LOST", "lm-eval cannot run .*task.yaml"),
    ("task: piqa", "task.yaml and piqa are tasks of one name, 'piqa'; rename one"),
    ('{"task": "piqa"}', "task.yaml and piqa are tasks of one name"),
])  # fmt: skip
def test_a_faulty_file_of_a_task(content, told, folder, tmp_path):
    sums = json.loads(write_sums(tmp_path).read_text())
    if content == "QUESTION_LOST":
        content = json.dumps({**sums, "doc_to_text": "{{nothing}}"})
    elif content == "METRIC_LOST":
        content = json.dumps({**sums, "metric_list": [{"metric": "nonsense"}]})
    (tmp_path / "task.yaml").write_text(content)
    names = [str(tmp_path / "task.yaml"), *(["piqa"] if "piqa" in content else [])]
    with pytest.raises(UserError, match=told):
        run_lm_eval(llama(), hf_tokenizer(tmp_path), names, source=str(folder))


def test_pairs_are_of_one_way_to_read_an_answer():
    """A question is there once for each filter, and is compared with itself under that filter."""

    def samples(*values):
        return [{"doc_id": n // 2, "filter": ("strict", "loose")[n % 2], "exact_match": value}
                for n, value in enumerate(values)]  # fmt: skip

    found = _paired(samples(1.0, 1.0, 1.0, 1.0), samples(0.0, 1.0, 0.0, 1.0))
    assert found["exact_match (strict)"]["difference"] == -1
    assert found["exact_match (loose)"]["difference"] == 0
    assert _plain("acc_stderr,none") == "acc_stderr"
    assert _plain("exact_match_stderr,strict") == "exact_match (strict)_stderr"


def test_names_that_lm_eval_does_not_know(tmp_path):
    model, tokenizer = llama(), hf_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has no task 'hellaswagg'; did you mean"):
        run_lm_eval(model, tokenizer, ["hellaswagg"])
    with pytest.raises(UserError, match="nowhere.yaml does not exist"):
        run_lm_eval(model, tokenizer, ["nowhere.yaml"])
    with pytest.raises(UserError, match="Transformer is none; give it .*from_transformer"):
        wrap(Transformer(ModelConfig.from_dict({"hidden_size": 16, "num_attention_heads": 2})),
             own_tokenizer(tmp_path))  # fmt: skip


def test_a_model_that_sees_later_tokens(folder, tmp_path):
    from skipless.hf.converting import from_transformer

    settings = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
                "vocab_size": 300, "causal": False}  # fmt: skip
    model = from_transformer(Transformer(ModelConfig.from_dict(settings)))
    with pytest.raises(UserError, match="sees the tokens that it is asked for"):
        run_lm_eval(model, hf_tokenizer(tmp_path), ["PIQA"], source=str(folder))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wikitext", "cannot read its data"),
        ("longbench", "cannot read its data|needs what is not installed"),
    ],
)
def test_groups_and_tasks_by_name_are_known(name, told, tmp_path, monkeypatch):
    """Up to where their data are read, which no package holds."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=told):
        run_lm_eval(llama(), hf_tokenizer(tmp_path), [name], num_fewshot=5)


def test_tokenizers_that_do_not_fit(folder, tmp_path):
    """Of another model, and one without a token for the ends of texts."""
    tokenizer = hf_tokenizer(tmp_path)
    model = llama()
    model.resize_token_embeddings(40)
    with pytest.raises(UserError, match="beyond the model's vocabulary of 40"):
        run_lm_eval(model, tokenizer, ["piqa"], source=str(folder), limit=1)
    tokenizer.eos_token = tokenizer.bos_token = None
    with pytest.raises(UserError, match="names no token that begins or ends a text"):
        wrap(model, tokenizer)
