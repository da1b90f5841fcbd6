"""Text to batches: named corpora, cleaning, tokenizer, token shards, loader.

`prepare(DataConfig(), vocab_size)` gives `PreparedData`; `Loader(prepared.train, ...)` gives
batches. `sources()` and `fetch(name)` are `skipless data list` and `skipless data get NAME`. torch
is loaded only when a batch is asked for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from skipless.data import fetching, hub
from skipless.data.batches import open_batches, open_loader
from skipless.data.catalog import SOURCES
from skipless.data.documents import Document, read_path
from skipless.data.fetching import UnreachableError, cache_dir
from skipless.data.loader import Loader, evaluation_batches
from skipless.data.preparing import PreparedData, prepare
from skipless.data.shards import Shard, write_shard
from skipless.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Document",
    "Loader",
    "PreparedData",
    "Shard",
    "Tokenizer",
    "UnreachableError",
    "cache_dir",
    "evaluation_batches",
    "fetch",
    "load_tokenizer",
    "open_batches",
    "open_loader",
    "prepare",
    "read_path",
    "sources",
    "train_tokenizer",
    "write_shard",
]


def sources() -> list[dict[str, object]]:
    """One row a named source: name, how, package, licence, characters, unit, note."""
    rows: list[dict[str, object]] = []
    for source in map(SOURCES.get, SOURCES):
        rows.append(
            {
                "name": source.name,
                "how": source.how,
                "package": f"{source.package} {source.version}",
                "licence": source.licence,
                "characters": source.num_characters,
                "unit": source.unit,
                "note": f"{source.about} ({source.num_characters / 1e6:.2f} M characters, "
                f"{source.how})",
            }
        )
    return rows


def fetch(name: str, *, text_key: str = "text", cache: str | Path | None = None) -> dict:
    """Get a named source or `hf:NAME` into the cache unless it is there already.

    Returns name, path, licence, num_documents, num_characters, num_bytes, sha256, and `summary`,
    one line for people. Raises UserError for an unknown name, a wrong hash or a full disk, and
    UnreachableError when no registry is in reach.
    """
    if name.startswith("hf:"):
        found = hub.get(name, text_key, cache_dir(cache))
    else:
        found = fetching.get(name, cache)
    size = (found.path / "documents.jsonl").stat().st_size
    row = {**dataclasses.asdict(found), "path": str(found.path), "num_bytes": size}
    return {**row, "summary": found.describe()}
