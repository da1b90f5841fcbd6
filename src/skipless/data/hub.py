"""`hf:NAME`: stream a text data set of the Hugging Face hub into the cache, up to a limit.

    hf:HuggingFaceFW/fineweb-edu?config=sample-10BT&split=train&characters=200000000

Rows are read in the order the hub gives them until `characters` (default 100 million) are there,
and kept as cleaned documents, so that later runs need no network and see the same text. Needs the
`datasets` package (extra `hf`).
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import parse_qsl

from skipless import log
from skipless.data.documents import clean
from skipless.data.fetching import Fetched, UnreachableError, open_cached
from skipless.errors import UserError, first_line, suggestion
from skipless.files import atomic_path
from skipless.locking import locked, remove_leftovers
from skipless.packages import not_installed

_OPTIONS = {"config": "", "split": "train", "characters": "100000000"}


def parse(spec: str) -> tuple[str, str, str, int]:
    """(name, config, split, characters) of an `hf:` source. Raises UserError."""
    name, _, query = spec.removeprefix("hf:").partition("?")
    options = dict(_OPTIONS)
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in options:
            raise UserError(f"unknown option {key!r} in {spec!r}; {suggestion(key, _OPTIONS)}")
        options[key] = value
    count = options["characters"].replace("_", "")
    if not name or not re.fullmatch(r"0*[1-9][0-9]{0,17}", count):
        raise UserError(
            f"{spec!r} is not a hub source; write hf:OWNER/NAME?config=C&split=train&characters=N"
        )
    return name, options["config"], options["split"], int(count)


def get(spec: str, text_key: str, root: Path) -> Fetched:
    """Stream the data set into the cache unless it is there.

    Raises UserError for a missing column or package, UnreachableError if the hub is.
    """
    name, config, split, limit = parse(spec)
    identity = hashlib.sha256(f"{name} {config} {split} {limit} {text_key}".encode()).hexdigest()
    folder = root / "sources" / f"hf-{name.replace('/', '-')}-{identity[:12]}"
    with locked(root / "locks" / f"{folder.name}.lock", what=f"streaming {spec}"):
        # Its text is not hashed on every call: it may be far larger than a named source's.
        found = open_cached(spec, folder, verify=False)
        if found is not None:
            return found
        remove_leftovers(folder)
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            _stream(name, config, split, limit, text_key, temporary)
        found = open_cached(spec, folder, verify=False)
        if found is None:
            raise UserError(f"{folder} changed while it was written; run the same command again")
        return found


def _stream(name: str, config: str, split: str, limit: int, text_key: str, folder: Path) -> None:
    try:
        import datasets  # pyright: ignore[reportMissingImports]  (optional: not in .venv)
    except ImportError:
        raise not_installed("datasets", why=f"which reads hf:{name}") from None
    digest, num_documents, num_characters = hashlib.sha256(), 0, 0
    try:
        rows = iter(datasets.load_dataset(name, config or None, split=split, streaming=True))
        first = next(rows, None)
    except Exception as error:  # the hub client raises many kinds
        raise UnreachableError(
            f"hf:{name} cannot be streamed ({first_line(error)[:200]}); check name, split and "
            "network"
        ) from None
    with (
        open(folder / "documents.jsonl", "wb") as file,
        log.progress(f"streaming {name}", limit, unit="characters") as advance,
    ):
        row = first
        while row is not None and num_characters < limit:
            if not isinstance(row.get(text_key), str):
                raise UserError(
                    f"hf:{name} has no text column {text_key!r}; "
                    f"{suggestion(text_key, row, noun='column')} (data.text_key)"
                )
            text = clean(row[text_key])
            if text.strip():
                line = json.dumps([f"row {num_documents}", text], ensure_ascii=False) + "\n"
                digest.update(line.encode())
                file.write(line.encode())
                num_documents += 1
                num_characters += len(text)
                advance(len(text))
            try:
                row = next(rows, None)
            except Exception as error:
                raise UnreachableError(
                    f"hf:{name} broke off after {num_characters:,} characters "
                    f"({type(error).__name__}: {error}); try again, or ask for fewer"
                ) from None
    if not num_documents:
        raise UserError(f"hf:{name} split {split} holds no text in column {text_key!r}")
    header = {"licence": "see the data set's card", "num_documents": num_documents,
              "num_characters": num_characters, "sha256": digest.hexdigest()}  # fmt: skip
    (folder / "source.json").write_text(json.dumps(header, indent=2) + "\n")
