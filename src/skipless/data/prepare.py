"""From a DataConfig to token shards on disk, once: every later call only opens them.

    prepared/NAMES-KEY/
      tokenizer.json        byte-level BPE trained on the training split (or a copy of yours)
      train.bin train.json  token shards (skipless.data.shards)
      held_out.bin held_out.json
      documents.jsonl       [source, name, split, characters] of every document
      prepared.json         settings, sources, notes; written last

KEY is a hash of the texts and of every setting that shapes the result, so another corpus,
vocabulary, share or seed goes to another folder and nothing is ever mixed up. The folder appears
by one rename; two processes that want the same one work one after the other. Read by
`skipless.train` and the CLI (`skipless data prepare`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skipless import log
from skipless.config import DataConfig
from skipless.data import fetch, hub
from skipless.data.documents import Document, fingerprint, read_path
from skipless.data.locking import locked
from skipless.data.shards import Shard, write_shard
from skipless.data.sources import SOURCES
from skipless.data.splits import choose_held_out, cut, digest
from skipless.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from skipless.errors import UserError, suggestion
from skipless.rundir import atomic_path, write_atomic

FORMAT = 1
FALLBACK = "cpython"
_VERIFY_BYTES = 1 << 29  # shards up to this size are hashed on every open (half a second)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Tokenised data, ready to be loaded."""

    directory: Path
    train: Shard
    held_out: Shard
    tokenizer_path: Path
    sources: tuple[str, ...]
    """What was really used; differs from the settings after a fallback."""
    notes: tuple[str, ...]
    """What a reader of results must know, such as how a single document was split."""
    fallback_reason: str | None
    """Why other sources than asked for were used; None in the normal case."""
    num_documents: dict[str, int]
    """By split."""

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token of the held-out split."""
        return self.held_out.bytes_per_token

    def describe(self) -> str:
        """A few lines for people."""
        lines = [f"data {', '.join(self.sources)}"]
        for split, shard in (("train", self.train), ("held_out", self.held_out)):
            lines.append(
                f"  {split}: {shard.num_tokens:,} tokens in {self.num_documents[split]} documents"
            )
        lines.append(f"  vocabulary {self.train.vocab_size}, {self.bytes_per_token:.3f} bytes a "
                     "held-out token")  # fmt: skip
        lines += [f"  note: {note}" for note in self.notes]
        if self.fallback_reason:
            lines.append(f"  FALLBACK: {self.fallback_reason}")
        return "\n".join([*lines, f"  {self.directory}"])


@dataclass(frozen=True)
class Corpus:
    """One entry of DataConfig.sources, resolved: a fingerprint and documents to iterate again."""

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[Document]]


def resolve(spec: str, config: DataConfig, cache: str | Path | None = None) -> Corpus:
    """A named source, `hf:NAME`, or a file or folder. Raises UserError with near names."""
    if spec in SOURCES:
        found = fetch.get(spec, cache)
        return Corpus(spec, found.sha256, found.documents)
    if spec.startswith("hf:"):
        found = hub.get(spec, config.text_key, fetch.cache_dir(cache))
        return Corpus(spec, found.sha256, found.documents)
    path = Path(spec).expanduser()
    if not path.exists():
        raise UserError(
            f"unknown source {spec!r}: neither a named source nor a file or folder; "
            f"{suggestion(spec, SOURCES, noun='source')}"
        )
    return Corpus(spec, fingerprint(path), lambda: read_path(path, config.text_key))


def prepare(
    config: DataConfig,
    vocab_size: int,
    cache_dir: str | Path | None = None,
    progress: Callable | None = None,
) -> PreparedData:
    """Tokenise the sources of `config`, or open the result of an earlier call.

    `progress` replaces `skipless.log.progress` (same signature). If the default sources cannot be
    reached, what can be is used, and at last `cpython`; `fallback_reason` then says so. Raises
    UserError for unknown sources, bad files, no text, a damaged result, a full disk.
    """
    root = fetch.cache_dir(cache_dir)
    corpora, reason = _resolve_all(config, root)
    tokenizer = None
    if config.tokenizer != "bpe":
        tokenizer = load_tokenizer(Path(config.tokenizer).expanduser())
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens, more than "
                f"vocab_size {vocab_size}; set model.vocab_size to {tokenizer.vocab_size} or more"
            )
    identity = {
        "format": FORMAT,
        "sources": [[corpus.name, corpus.fingerprint] for corpus in corpora],
        "text_key": config.text_key,
        "tokenizer": "bpe" if tokenizer is None else tokenizer_hash(tokenizer.path),
        "vocab_size": vocab_size,
        "held_out_fraction": config.held_out_fraction,
        "seed": config.seed,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    names = "-".join(Path(corpus.name).stem.replace(":", "_") for corpus in corpora)
    directory = root / "prepared" / f"{names[:60]}-{key}"
    with locked(root / "locks" / f"prepared-{key}.lock", what=f"preparing {directory.name}"):
        if not directory.exists():
            with atomic_path(directory) as temporary:
                temporary.mkdir()
                _Builder(config, vocab_size, corpora, temporary, tokenizer,
                         progress or log.progress).build(identity)  # fmt: skip
    return _open(directory, reason)


def _resolve_all(config: DataConfig, root: Path) -> tuple[list[Corpus], str | None]:
    if not config.sources:
        raise UserError("data.sources is empty; name at least one source (`skipless data list`)")
    if len(set(config.sources)) < len(config.sources):
        raise UserError(f"data.sources {', '.join(config.sources)} names a source twice")
    if config.sources != DataConfig().sources:
        return [resolve(spec, config, root) for spec in config.sources], None
    corpora, failures = [], []
    for spec in config.sources:  # the defaults must work without a network, for the demo
        try:
            corpora.append(resolve(spec, config, root))
        except fetch.UnreachableError as error:
            failures.append(str(error))
    if not failures:
        return corpora, None
    if not corpora:
        corpora = [resolve(FALLBACK, config, root)]
    used = ", ".join(corpus.name for corpus in corpora)
    reason = f"using {used} instead of {', '.join(config.sources)}: {'; '.join(failures)}"
    log.say(f"WARNING: default texts are out of reach; {reason}")
    return corpora, reason


def _open(directory: Path, reason: str | None) -> PreparedData:
    try:
        record = json.loads((directory / "prepared.json").read_text())
        sources, notes = tuple(record["sources"]), tuple(record["notes"])
        num_documents = dict(record["num_documents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory / 'prepared.json'} is missing or broken ({error}); delete the folder "
            f"{directory} and run the same command again to rebuild it"
        ) from None
    shards = {name: Shard.open(directory / name) for name in ("train", "held_out")}
    tokenizer_path = directory / "tokenizer.json"
    for shard in shards.values():
        if shard.path.stat().st_size <= _VERIFY_BYTES:
            shard.verify()
        if not tokenizer_path.is_file() or (
            tokenizer_hash(tokenizer_path) != shard.header.tokenizer_sha256
        ):
            raise UserError(
                f"{tokenizer_path} is not the tokenizer that made {shard.path.name}; delete the "
                f"folder {directory} and run the same command again to rebuild it"
            )
    return PreparedData(
        directory=directory, train=shards["train"], held_out=shards["held_out"],
        tokenizer_path=tokenizer_path, sources=sources, notes=notes,
        fallback_reason=reason, num_documents=num_documents,
    )  # fmt: skip


class _Builder:
    """One build: choose the held-out documents, train the tokenizer, write both shards."""

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

    def build(self, identity: dict) -> None:
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
