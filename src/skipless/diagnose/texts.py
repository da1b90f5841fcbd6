"""Text as batches of token ids, for `skipless diagnose` on models of text.

Read by the command line, beside media.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from skipless.diagnose.loading import Decoder, Subject
from skipless.errors import UserError

BATCH_SIZE = 4
LEAST_TOKENS = 16
_CHARACTERS = 12
"""Characters of text read for a token that is wanted; English has 4 to 5 a token."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Batches and what they are, in words."""

    batches: list[Any]
    about: str


def read_batches(
    subject: Subject, text: str | None, data: str | None, num_tokens: int, length: int | None
) -> Text:
    """`num_tokens` tokens of a file, a named source or, of a run, its held-out text.

    Sequences have `length` tokens (default 512, or what the model takes). Raises UserError for no
    text or two, a text shorter than one sequence of LEAST_TOKENS, a length beyond the model's,
    a model without tokenizer, and one that takes no text.
    """
    if text is not None and data is not None:
        raise UserError("--text and --data are both given; keep one of them")
    _check_takes_text(subject.model)
    if length is not None and subject.limit is not None and length > subject.limit:
        raise UserError(
            f"--sequence-length is {length} and {subject.name} takes {subject.limit} tokens at "
            "most; give at most that"
        )
    length = length or min(512, subject.limit or 512)
    if length < 2:
        raise UserError("--sequence-length is 1; give at least 2 tokens, so that one is predicted")
    if text is None and data is None:
        if subject.run is None:
            raise UserError(
                f"there is no text to run {subject.name} on; give --text FILE, or --data NAME "
                "(`skipless data list` shows names)"
            )
        from skipless.measure import held_out_batches

        batches = held_out_batches(subject.run, num_tokens)
        number = sum(ids.numel() for ids, _ in batches)
        return Text(batches=batches, about=f"{number:,} tokens of the run's held-out text")
    if subject.tokenizer is None:
        raise UserError(
            f"{subject.name} has no tokenizer beside its weights, so that text cannot be read; put "
            "tokenizer.json there, or call skipless.diagnose.diagnose(model, batches) with token "
            "ids in Python"
        )
    where = text or data or ""
    return _cut(subject, where, _characters(where, text is not None, num_tokens * _CHARACTERS),
                num_tokens, length)  # fmt: skip


def _check_takes_text(model: Any) -> None:
    """Raise UserError for a model that wants images, sound or two texts."""
    name, main = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    flag = {"pixel_values": "--images", "input_features": "--audio", "input_values": "--audio"}
    python = "call skipless.diagnose.diagnose(model, batches) in Python with dicts of its inputs"
    if main != "input_ids":
        what = f"give {flag[main]}" if main in flag else python
        raise UserError(f"{name} takes {main} and no text; {what} (docs/diagnose.md)")
    if hasattr(model, "text_model") and hasattr(model, "vision_model"):
        raise UserError(
            f"{name} reads images with captions; give --images, and --text FILE with a line for "
            "every image"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UserError(
            f"{name} reads one text and writes another; {python}: input_ids and decoder_input_ids"
        )


def _characters(where: str, is_file: bool, limit: int) -> str:
    """The first `limit` characters of the documents."""
    from skipless.config import DataConfig
    from skipless.data import read_path
    from skipless.data.preparing import resolve

    documents = read_path(where) if is_file else resolve(where, DataConfig()).documents()
    found, size = [], 0
    for document in documents:
        found.append(document.text)
        size += len(document.text)
        if size >= limit:
            break
    return "\n\n".join(found)[:limit]


def _cut(subject: Subject, where: str, text: str, num_tokens: int, length: int) -> Text:
    """Whole sequences of `length` tokens in batches; one shorter sequence if there is no more."""
    sequences = list(islice(_sequences(subject, text, length), max(1, num_tokens // length)))
    total = sum(map(len, sequences))
    if total < LEAST_TOKENS:
        raise UserError(
            f"{where} has {total} tokens for {subject.name}; give a text of at least {LEAST_TOKENS}"
        )
    whole = [ids for ids in sequences if len(ids) == length] or sequences[:1]
    batches: list[Tensor] = [
        torch.tensor(whole[i : i + BATCH_SIZE]) for i in range(0, len(whole), BATCH_SIZE)
    ]
    about = f"{len(whole) * len(whole[0]):,} tokens of {where}"
    if total < num_tokens and len(whole) * length < num_tokens:
        about += f", all it has in sequences of {len(whole[0])}"
    return Text(batches=list(batches), about=about)


def _sequences(subject: Subject, text: str, length: int) -> Iterator[list[int]]:
    """Sequences of at most `length` token ids, special tokens included where a model has them."""
    if isinstance(subject.tokenizer, Decoder):
        ids = subject.tokenizer.inner.encode(text)
        for start in range(0, len(ids), length):
            yield ids[start : start + length]
        return
    tokenizer = subject.tokenizer
    inside = length - tokenizer.num_special_tokens_to_add(pair=False)
    if inside < 1:
        raise UserError(f"--sequence-length is {length}; its special tokens alone need that much")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin, end = _around(tokenizer)
    for start in range(0, len(ids), inside):
        yield [*begin, *ids[start : start + inside], *end]


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that this tokenizer puts before and after a text, seen on a short one."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return [], []
