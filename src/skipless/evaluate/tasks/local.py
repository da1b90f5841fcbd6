"""lm-eval, and the tasks of our catalog as it reads them: local files, which need no hub.

A YAML file includes lm-eval's official task and names files with its rows; MMLU is one of each
subject, and a group of them. Read by `harness.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.evaluate.tasks.catalog import Task, find_tasks
from skipless.evaluate.tasks.reading import MissingSplitError, Rows, read_rows
from skipless.packages import not_installed

PREFIX = "local_"
_FILES = {
    "arc_challenge": "arc/arc_challenge.yaml", "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml", "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml", "piqa": "piqa/piqa.yaml",
    "social_iqa": "siqa/siqa.yaml", "winogrande": "winogrande/default.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml", "gsm8k": "gsm8k/gsm8k.yaml",
    "mmlu": "mmlu/default/mmlu_{subject}.yaml",
}  # fmt: skip
"""Where lm-eval 0.4.13 has the official tasks; its index of thousands takes half a minute."""


def import_lm_eval() -> Any:
    """The package. Raises UserError where it is not installed."""
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]  (optional: not in .venv)
        import lm_eval.tasks  # pyright: ignore[reportMissingImports]
    except ImportError:
        instead = "leave out --backend lm-eval: core8, LAMBADA and MMLU run without it"
        raise not_installed("lm_eval", instead=instead) from None
    return lm_eval


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
    with tempfile.TemporaryDirectory() as folder:
        for task in find_tasks(names):
            _write_task(task, source, root, Path(folder))
        yield (
            lm_eval.tasks.TaskManager(include_path=folder, include_defaults=others),
            [PREFIX + task.name for task in find_tasks(names)],
        )


def _write_task(task: Task, source: str, root: Path, folder: Path) -> None:
    """A YAML file of `task`, or of each subject and their group, and the files of its rows."""
    rows = {"test": _columns(read_rows(task, source))}  # lm-eval scores it where there is one
    with suppress(MissingSplitError):  # then examples are other questions
        rows["train"] = _columns(read_rows(task, source, task.fewshot_split))
    column = task.subject_column
    subjects = sorted({str(row.get(column)) for row in rows["test"]}) if column else [""]
    members = []
    for subject in subjects:
        official = _official(task, subject, root)
        name = "_".join(filter(None, (PREFIX + task.name, subject)))
        files = {}
        for split, found in rows.items():
            files[split] = str(folder / f"{name}.{split}.jsonl")
            kept = (row for row in found if not column or row.get(column) == subject)
            Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in kept))
        config = {
            "include": str(official), "task": name, "tag": None,
            "dataset_path": "json", "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
            "training_split": "train" if "train" in files else None, "validation_split": None,
            "test_split": "test", "fewshot_split": "train" if "train" in files else "test",
        }  # fmt: skip
        _write_yaml(folder / f"{name}.yaml", config)
        members.append(name)
    if column:
        how = [{"metric": "acc", "weight_by_size": True}]
        group = {"group": PREFIX + task.name, "task": members, "aggregate_metric_list": how}
        _write_yaml(folder / f"{task.name}.yaml", group)


def _official(task: Task, subject: str, root: Path) -> Path:
    """lm-eval's own file of a task, or of a subject of it."""
    file = root / _FILES[task.name].format(subject=subject)
    if file.is_file():
        return file
    if subject:
        raise UserError(
            f"lm-eval has no subject {subject!r} of {task.name}; leave its rows out, or leave out "
            "--backend lm-eval"
        )
    index = import_lm_eval().tasks.TaskManager().task_index  # another version
    return Path(index[task.name].yaml_path)


def _write_yaml(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content))  # YAML holds JSON


def _columns(found: Rows) -> list[dict[str, Any]]:
    """Rows with the columns of the data sets that lm-eval names."""
    return [
        # boolq, where lm-eval reads super_glue
        row | {"label": int(row["answer"])} if "passage" in row and "label" not in row else row
        for row in found.rows
    ]
