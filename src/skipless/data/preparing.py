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

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skipless import log
from skipless.config import DataConfig
from skipless.data import fetching, hub
from skipless.data.build import Builder, Corpus
from skipless.data.catalog import SOURCES
from skipless.data.documents import fingerprint, read_path
from skipless.data.shards import Shard, rebuild
from skipless.data.tokenizer import load_tokenizer, tokenizer_hash
from skipless.errors import UserError, suggestion
from skipless.files import atomic_path
from skipless.locking import locked, remove_leftovers

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

    @classmethod
    def open(cls, directory: str | Path) -> PreparedData:
        """Open a folder that `prepare` made (a run notes its own, so that later evaluation sees the
        same text even if other sources are in reach by then).

        Raises UserError if something in it is missing or damaged.
        """
        directory = Path(directory)
        try:
            record = json.loads((directory / "prepared.json").read_text())
            sources, notes = tuple(record["sources"]), tuple(record["notes"])
            num_documents, reason = dict(record["num_documents"]), record["fallback_reason"]
            if not all(isinstance(text, str) for text in (*sources, *notes, reason or "")):
                raise ValueError("sources, notes or fallback_reason is not text")
            if not all(type(num_documents[split]) is int for split in ("train", "held_out")):
                raise ValueError(f"num_documents is {num_documents!r}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{directory / 'prepared.json'} is missing or broken ({error}); "
                f"{rebuild(directory)}"
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
                    f"{tokenizer_path} is not the tokenizer that made {shard.path.name}; "
                    f"{rebuild(directory)}"
                )
        return cls(
            directory=directory, train=shards["train"], held_out=shards["held_out"],
            tokenizer_path=tokenizer_path, sources=sources, notes=notes,
            fallback_reason=reason, num_documents=num_documents,
        )  # fmt: skip

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


def resolve(spec: str, config: DataConfig, cache: str | Path | None = None) -> Corpus:
    """A named source, `hf:NAME`, or a file or folder. Raises UserError with near names."""
    if spec in SOURCES:
        found = fetching.get(spec, cache)
        return Corpus(spec, found.sha256, found.documents)
    if spec.startswith("hf:"):
        found = hub.get(spec, config.text_key, fetching.cache_dir(cache))
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
    root = fetching.cache_dir(cache_dir)
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
        "asked_for": config.sources if reason else None,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    names = re.sub(r"[^\w-]+", "_", "-".join(Path(corpus.name).stem for corpus in corpora))
    directory = root / "prepared" / f"{names[:60]}-{key}"
    with locked(root / "locks" / f"prepared-{key}.lock", what=f"preparing {directory.name}"):
        if not directory.exists():
            remove_leftovers(directory)
            with atomic_path(directory) as temporary:
                temporary.mkdir()
                show = progress or log.progress
                builder = Builder(config, vocab_size, corpora, temporary, tokenizer, show)
                builder.build(identity, reason)
    return PreparedData.open(directory)


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
        except fetching.UnreachableError as error:
            failures.append(str(error))
    if not failures:
        return corpora, None
    if not corpora:
        corpora = [resolve(FALLBACK, config, root)]
    used = ", ".join(corpus.name for corpus in corpora)
    reason = f"using {used} instead of {', '.join(config.sources)}: {'; '.join(failures)}"
    log.say(f"WARNING: default texts are out of reach; {reason}")
    return corpora, reason
