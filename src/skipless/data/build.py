"""One build of a prepared folder: choose the held-out documents, train the tokenizer, write shards.

`skipless.data.preparing` calls it inside a temporary folder that is renamed when it is done.

Documents are iterated three times (choose, tokenizer, shards) instead of being kept, so the text
may be larger than memory.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skipless import log
from skipless.config import DataConfig
from skipless.data.documents import Document
from skipless.data.shards import write_shard
from skipless.data.splits import choose_held_out, cut, digest
from skipless.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash, train_tokenizer
from skipless.errors import UserError
from skipless.files import write_atomic


@dataclass(frozen=True)
class Corpus:
    """One entry of DataConfig.sources, resolved: a fingerprint and documents to iterate again."""

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[Document]]


class Builder:
    """Fills `folder`; `tokenizer` is None to train one, `progress` is like `log.progress`."""

    def __init__(self, config, vocab_size, corpora, folder, tokenizer, progress) -> None:
        self.config: DataConfig = config
        self.vocab_size: int = vocab_size
        self.corpora: list[Corpus] = corpora
        self.folder: Path = folder
        self.tokenizer: Tokenizer | None = tokenizer
        self.progress = progress
        self.held: set[bytes] = set()
        self.single: dict[bytes, int] = {}  # text of a one-document source -> where it is cut
        self.notes: list[str] = []
        self.num_characters = 0

    def build(self, identity: dict, fallback_reason: str | None) -> None:
        self._choose()
        tokenizer, path = self._tokenizer(), self.folder / "tokenizer.json"
        counts = {}
        for split in ("train", "held_out"):
            with self.progress(f"tokenising {split}", self.num_characters) as advance:
                counts[split] = {"num_bytes": 0, "num_documents": 0}
                write_shard(
                    self.folder / split,
                    self._pieces(split, tokenizer, counts[split], advance),
                    vocab_size=self.vocab_size,
                    eos_id=tokenizer.eos_id,
                    tokenizer_sha256=tokenizer_hash(path),
                    counts=counts[split],
                )
        record = {
            **identity,
            "sources": [corpus.name for corpus in self.corpora],
            "fingerprints": identity["sources"],
            "config": dataclasses.asdict(self.config),
            "notes": self.notes,
            "fallback_reason": fallback_reason,
            "num_documents": {split: c["num_documents"] for split, c in counts.items()},
            "num_characters": self.num_characters,
        }
        write_atomic(self.folder / "prepared.json", json.dumps(record, indent=2) + "\n")
        with open(self.folder / "documents.jsonl", "w", encoding="utf-8") as file:
            for corpus, document, split in self._split_documents():
                row = [corpus.name, document.name, split, len(document.text)]
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _choose(self) -> None:
        """Fill `held`, `single` and `notes` in one pass over the text."""
        for corpus in self.corpora:
            sizes, first = [], None
            for document in corpus.documents():
                first = first or document
                sizes.append((digest(document), len(document.text)))
            self.num_characters += sum(length for _, length in sizes)
            if first is None:
                raise UserError(f"source {corpus.name} holds no text; give one that does")
            held = choose_held_out(
                sizes, self.config.held_out_fraction, self.config.seed, corpus.name
            )
            self.held |= held
            if not held:
                if len(first.text) < 2:
                    raise UserError(
                        f"source {corpus.name} holds a single document of {len(first.text)} "
                        "character; it cannot be split into training and held-out text, add more"
                    )
                self.single[digest(first)] = cut(first.text, self.config.held_out_fraction)
                self.notes.append(
                    f"{corpus.name} is a single document ({first.name}): its last "
                    f"{self.config.held_out_fraction:.1%} is held out, cut between paragraphs"
                )

    def _split_documents(self) -> Iterator[tuple[Corpus, Document, str]]:
        """Every document, or part of a single one, with the split it belongs to."""
        for corpus in self.corpora:
            for document in corpus.documents():
                key = digest(document)
                if key in self.held:
                    yield corpus, document, "held_out"
                elif key in self.single:
                    place = self.single[key]
                    yield corpus, Document(document.name, document.text[:place]), "train"
                    yield corpus, Document(document.name, document.text[place:]), "held_out"
                else:
                    yield corpus, document, "train"

    def _texts(self, split: str) -> Iterator[str]:
        return (d.text for _, d, where in self._split_documents() if where == split)

    def _tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if self.tokenizer is not None:
            shutil.copyfile(self.tokenizer.path, path)
            return load_tokenizer(path)
        log.say(f"training a tokenizer of {self.vocab_size} tokens on "
                f"{self.num_characters:,} characters")  # fmt: skip
        trained = train_tokenizer(self._texts("train"), self.vocab_size, path)
        if trained.vocab_size < self.vocab_size:
            self.notes.append(
                f"the text gave a vocabulary of {trained.vocab_size} of {self.vocab_size} tokens"
            )
        return trained

    def _pieces(self, split, tokenizer, counts, advance) -> Iterator[list[int]]:
        for _, document, where in self._split_documents():
            if where == split:
                yield from tokenizer.encode_chunks(document.text)
                if tokenizer.eos_id is not None:
                    yield [tokenizer.eos_id]
                counts["num_bytes"] += len(document.text.encode())
                counts["num_documents"] += 1
            advance(len(document.text))
