"""Token shards: a flat file of token ids beside a JSON header.

    train.bin    little-endian uint16 (vocabularies up to 65,536) or uint32, nothing else
    train.json   format, dtype, number of tokens, vocabulary, SHA-256 of the .bin, text bytes

`Shard.open` checks header and file size at once (cheap at any scale); `verify` also checks the
hash and the largest id. The file is memory-mapped, so a shard may be larger than memory. Read by
`skipless.data.loader`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from skipless.errors import UserError
from skipless.files import atomic_path, write_atomic

FORMAT = "skipless-shard-1"
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """What the JSON beside the tokens says."""

    format: str
    dtype: str
    num_tokens: int
    vocab_size: int
    """Size of the vocabulary the ids were drawn from; every id is below it."""
    sha256: str
    """Of the .bin file."""
    num_bytes: int
    """UTF-8 bytes of the text behind the tokens."""
    num_documents: int
    eos_id: int | None
    tokenizer_sha256: str


@dataclass(frozen=True)
class Shard:
    """An opened shard. `tokens` is a read-only memory map [num_tokens]."""

    path: Path
    header: ShardHeader

    @classmethod
    def open(cls, path: str | Path) -> Shard:
        """Open `path` (the .bin, the .json, or either without its ending).

        Raises UserError if a file is missing, the header is broken, or the size does not fit it.
        """
        stem = Path(path)
        stem = stem.with_suffix("") if stem.suffix in (".bin", ".json") else stem
        file, header_file = stem.with_suffix(".bin"), stem.with_suffix(".json")
        for part in (header_file, file):
            if not part.is_file():
                raise UserError(f"{part} is missing; {_rebuild(file)}")
        header = _read_header(header_file, file)
        expected = header.num_tokens * _DTYPES[header.dtype].itemsize
        size = file.stat().st_size
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise UserError(
                f"{file} is {what}: {size:,} bytes where its header says {expected:,}; "
                f"{_rebuild(file)}"
            )
        return cls(file, header)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Read-only memory map of the token ids, uint16 or uint32 [num_tokens]."""
        return np.memmap(self.path, dtype=_DTYPES[self.header.dtype], mode="r")

    @property
    def num_tokens(self) -> int:
        return self.header.num_tokens

    @property
    def vocab_size(self) -> int:
        return self.header.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, separators counted as tokens of 0 bytes, so that
        (nats per token) / ln 2 / bytes_per_token is bits per byte over the whole shard."""
        return self.header.num_bytes / self.header.num_tokens

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError unless every id fits a model of `vocab_size`."""
        if self.vocab_size > vocab_size:
            raise UserError(
                f"{self.path} holds token ids up to {self.vocab_size - 1} but the model's "
                f"vocab_size is {vocab_size}; prepare the data again with that vocabulary or raise "
                "model.vocab_size"
            )

    def verify(self) -> None:
        """Read the whole file: its hash and its largest id. Raises UserError on a mismatch."""
        with open(self.path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.header.sha256:
            raise UserError(
                f"{self.path} is corrupt: its SHA-256 is {found[:12]}… and not the recorded "
                f"{self.header.sha256[:12]}…; {_rebuild(self.path)}"
            )
        largest = int(self.tokens.max())
        if largest >= self.vocab_size:
            raise beyond_vocabulary(self.path, largest, self.vocab_size)


def beyond_vocabulary(path: Path, token: int, vocab_size: int) -> UserError:
    """The error for a token id that the header's vocabulary does not have."""
    return UserError(
        f"{path} holds token id {token}, beyond its vocabulary of {vocab_size}; {_rebuild(path)}"
    )


def write_shard(
    stem: str | Path,
    pieces: Iterable[list[int]],
    *,
    vocab_size: int,
    num_bytes: int | None = None,
    num_documents: int = 1,
    eos_id: int | None = None,
    tokenizer_sha256: str = "",
    counts: dict[str, int] | None = None,
) -> Shard:
    """Write lists of token ids as one shard, streaming. Returns it opened.

    `counts`, if given, is read after the last piece for "num_bytes" and "num_documents" (a
    generator can only know them then). Raises UserError for an id beyond `vocab_size`, for no
    tokens at all, and when the disk refuses; nothing half-written stays.
    """
    stem = Path(stem)
    name = "uint16" if vocab_size <= 65_536 else "uint32"
    file_path, digest, num_tokens = stem.with_suffix(".bin"), hashlib.sha256(), 0
    with atomic_path(file_path) as temporary, open(temporary, "wb") as file:
        for piece in pieces:
            ids = np.asarray(piece, dtype=np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                bad = int(ids.max() if ids.max() >= vocab_size else ids.min())
                raise UserError(
                    f"token id {bad} does not fit a vocabulary of {vocab_size}; use a tokenizer "
                    f"of at most {vocab_size} tokens or raise model.vocab_size"
                )
            data = ids.astype(_DTYPES[name]).tobytes()
            digest.update(data)
            file.write(data)
            num_tokens += len(ids)
        if num_tokens == 0:
            raise UserError(f"there is no text for {file_path.name}; give sources that hold text")
    counts = counts or {}
    header = ShardHeader(
        format=FORMAT,
        dtype=name,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        sha256=digest.hexdigest(),
        num_bytes=counts.get("num_bytes", num_bytes if num_bytes is not None else num_tokens),
        num_documents=counts.get("num_documents", num_documents),
        eos_id=eos_id,
        tokenizer_sha256=tokenizer_sha256,
    )
    write_atomic(stem.with_suffix(".json"), json.dumps(dataclasses.asdict(header), indent=2) + "\n")
    return Shard.open(stem)


def rebuild(folder: Path) -> str:
    """What to do about a damaged `folder`; only one of our cache may be deleted without a look."""
    if folder.resolve().parent.name == "prepared":
        return f"delete the folder {folder} and run the same command again to rebuild it"
    return f"prepare the data again (`skipless data prepare`), since {folder} cannot be used"


def _rebuild(file: Path) -> str:
    return rebuild(file.parent)


def _read_header(path: Path, file: Path) -> ShardHeader:
    try:
        values = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r} is not {FORMAT!r}")
        header = ShardHeader(**values)
        if header.dtype not in tuple(_DTYPES):
            raise ValueError(f"dtype {header.dtype!r} is not one of {', '.join(_DTYPES)}")
        # Bytes of no text would make bits per byte a division by zero.
        for name in ("num_tokens", "vocab_size", "num_bytes", "num_documents"):
            if type(getattr(header, name)) is not int or getattr(header, name) < 1:
                raise ValueError(f"{name} is {getattr(header, name)!r}")
        for name in ("sha256", "tokenizer_sha256"):
            if not isinstance(getattr(header, name), str):
                raise ValueError(f"{name} is {getattr(header, name)!r}")
        if header.eos_id is not None and type(header.eos_id) is not int:
            raise ValueError(f"eos_id is {header.eos_id!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a shard header ({error}); {_rebuild(file)}") from None
    return header
