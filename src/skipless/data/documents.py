"""Documents: the unit that is kept whole, and how text is cleaned and read from files.

A document is a play, a Bible book, a file, a line of a jsonl file or a row of a parquet file.
`skipless.data.preparing` turns documents into tokens; `skipless.data.catalog` yields them for the
named corpora.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skipless.errors import UserError, suggestion
from skipless.packages import not_installed

SUFFIXES = (".txt", ".jsonl", ".parquet")

_GUTENBERG_START = re.compile(r"^\*\*\* ?START OF.*$", re.MULTILINE)
_GUTENBERG_END = re.compile(r"^\*\*\* ?END OF.*$", re.MULTILINE)
_MARKER_SEARCH = 40_000  # licence headers end well before this many characters


@dataclass(frozen=True)
class Document:
    """One text with a name that is unique within its source."""

    name: str
    text: str


def clean(text: str) -> str:
    """Normalise newlines, drop BOMs, trailing blanks and Gutenberg licence text around the work.

    Idempotent. Never touches the words: what lies between the markers is kept, blank lines are
    limited to two in a row, and lone surrogates (possible in JSON) become "?".
    """
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    start = _GUTENBERG_START.search(text, 0, _MARKER_SEARCH)
    if start:
        text = text[start.end() :]
    end = _GUTENBERG_END.search(text)
    if end and start:
        text = text[: end.start()]
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip("\n")
    return text.encode("utf-8", "replace").decode("utf-8")


def read_path(path: str | Path, text_key: str = "text") -> Iterator[Document]:
    """Yield the documents of one file or of a folder (its .txt, .jsonl and .parquet files).

    txt: the file is a document; jsonl: each line; parquet: each row. Empty ones are left out.
    Raises UserError for undecodable bytes, a bad line (with its number), a missing key or column.
    """
    root = Path(path)
    for file in list_files(root):
        name = file.name if file == root else file.relative_to(root).as_posix()
        reader = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[file.suffix]
        for document in reader(file, name, text_key):
            text = clean(document.text)
            if text.strip():
                yield Document(document.name, text)


def list_files(path: str | Path) -> list[Path]:
    """The readable files under `path` in a fixed order. Raises UserError if there are none."""
    path = Path(path)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(
                f"{path} ends in {path.suffix!r}; data files end in {', '.join(SUFFIXES)}"
            )
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give a file or folder of {', '.join(SUFFIXES)}")
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in
                                         p.relative_to(path).parts)]  # fmt: skip
    if not files:
        raise UserError(f"{path} holds no {', '.join(SUFFIXES)} file; add some or name another")
    return files


def fingerprint(path: str | Path) -> str:
    """SHA-256 over the names and contents of the files under `path`, as hex."""
    root, digest = Path(path), hashlib.sha256()
    for file in list_files(root):
        name = file.name if file == root else file.relative_to(root).as_posix()
        digest.update(f"{name}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file as hex. Raises UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _read_txt(file: Path, name: str, text_key: str) -> Iterator[Document]:
    try:
        yield Document(name, file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); "
            "convert it with `iconv -t UTF-8`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def _read_jsonl(file: Path, name: str, text_key: str) -> Iterator[Document]:
    try:
        lines = open(file, "rb")  # noqa: SIM115, closed by the block below
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except RecursionError:
                raise UserError(
                    f"{file} line {number} is nested too deeply to be read; each line must be one "
                    f"object with its text under {text_key!r}"
                ) from None
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
                raise UserError(
                    f"{file} line {number} is not valid JSON ({error}); each line must be one "
                    "object"
                ) from None
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                fields = record.items() if isinstance(record, dict) else ()
                keys = [key for key, value in fields if isinstance(value, str)]
                raise UserError(
                    f"{file} line {number} has no text under the key {text_key!r}; "
                    f"{suggestion(text_key, keys, noun='text key')} (data.text_key)"
                )
            yield Document(f"{name}:{number}", record[text_key])


def _read_parquet(file: Path, name: str, text_key: str) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise not_installed("pyarrow", why=f"which reads {file}") from None
    try:
        table = pq.ParquetFile(file)
        columns = table.schema_arrow.names
        if text_key not in columns:
            raise UserError(
                f"{file} has no column {text_key!r}; "
                f"{suggestion(text_key, columns, noun='column')} (data.text_key)"
            )
        row = 0
        for batch in table.iter_batches(columns=[text_key], batch_size=1024):
            for value in batch.column(0).to_pylist():
                row += 1
                if value is None:
                    continue
                if not isinstance(value, str):
                    raise UserError(
                        f"{file} column {text_key!r} holds {type(value).__name__}, not text; "
                        "choose a text column (data.text_key)"
                    )
                yield Document(f"{name}:{row}", value)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable parquet file ({error})") from None
