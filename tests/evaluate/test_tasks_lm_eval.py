"""The same requests and numbers as lm-eval 0.4.13, which is optional (extra `eval`).

lm-eval reads our own questions through its official task files, so no hub is needed.
"""

import json

import pytest
from tasks_material import hf_tokenizer, llama, own_tokenizer, write_rows

from skipless.cli import main
from skipless.errors import UserError
from skipless.evaluate import score_tasks
from skipless.evaluate.tasks import CORE8, Coder, find_tasks, score_requests
from skipless.evaluate.tasks.asking import ask
from skipless.evaluate.tasks.harness import PREFIX, local_tasks, run_lm_eval, wrap

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install -e '.[eval]')")
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


def test_names_that_lm_eval_does_not_know(tmp_path):
    model = llama()
    with pytest.raises(UserError, match="has no task 'hellaswagg'; did you mean"):
        run_lm_eval(model, hf_tokenizer(tmp_path), ["hellaswagg"])
    own = own_tokenizer(tmp_path)
    with pytest.raises(UserError, match="rolling"):
        wrap(model, own).loglikelihood_rolling([])


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
