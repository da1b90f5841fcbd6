"""Text to batches: named corpora, cleaning, tokenizer, token shards, loader.

`prepare(DataConfig(), vocab_size)` gives `PreparedData`; `Loader(prepared.train, ...)` gives
batches. `sources()` and `get(name)` are `skipless data list` and `skipless data get NAME`. torch
is loaded only when a batch is asked for.
"""

from __future__ import annotations

from skipless.data.documents import Document, read_path
from skipless.data.fetch import Fetched, UnreachableError, cache_dir, get
from skipless.data.loader import Loader, evaluation_batches
from skipless.data.prepare import PreparedData, prepare
from skipless.data.shards import Shard, write_shard
from skipless.data.sources import SOURCES
from skipless.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Document",
    "Fetched",
    "Loader",
    "PreparedData",
    "Shard",
    "Tokenizer",
    "UnreachableError",
    "cache_dir",
    "evaluation_batches",
    "get",
    "load_tokenizer",
    "prepare",
    "read_path",
    "sources",
    "train_tokenizer",
    "write_shard",
]


def sources() -> list[dict[str, object]]:
    """One row a named source: name, how, package, licence, characters, unit, about."""
    rows: list[dict[str, object]] = []
    for name in SOURCES:
        source = SOURCES.get(name)
        rows.append(
            {
                "name": name,
                "how": source.how,
                "package": f"{source.package} {source.version}",
                "licence": source.licence,
                "characters": source.num_characters,
                "unit": source.unit,
                "about": source.about,
            }
        )
    return rows
