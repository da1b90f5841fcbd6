"""Byte-level BPE: training, loading, and the one wrapper that the rest of the package sees.

Any text goes to token ids and back without loss. One token, `<|endoftext|>` (id 0), separates
documents; text that happens to contain those characters is encoded as ordinary text, so data can
never inject a separator. Training is deterministic. `skipless.data.preparing` trains it on the
training split only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skipless.errors import UserError, not_utf8
from skipless.files import write_atomic
from skipless.packages import need

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "[SEP]")
_CHUNK = 200_000  # characters per call: bounds memory for books of any length


class Tokenizer:
    """A `tokenizers.Tokenizer` with the few things this package needs of it.

    `vocab_size` is one more than the largest id; `eos_id` the separator's id, or None if a foreign
    tokenizer has none of the usual ones.
    """

    def __init__(self, inner, path: Path) -> None:
        self.inner = inner
        self.path = path
        inner.encode_special_tokens = True  # text cannot inject the separator
        inner.no_padding()
        inner.no_truncation()
        found = [inner.token_to_id(name) for name in _EOS_NAMES]
        self.eos_id: int | None = next((i for i in found if i is not None), None)
        ids = inner.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise UserError(f"{path} has no tokens; train a tokenizer or name another one")
        self.vocab_size: int = max(ids) + 1

    def for_transformers(self, max_length: int, *, split_special_tokens: bool = False) -> Any:
        """The same as transformers' PreTrainedTokenizerFast, padding on the left.

        There `tokenizer(text + tokenizer.eos_token)` ends in the separator's id, as people who
        fine-tune expect of every tokenizer. `split_special_tokens` reads these characters as any
        others, as `encode` does: for texts that one did not write.
        """
        need("transformers")
        from transformers import PreTrainedTokenizerFast

        eos = None if self.eos_id is None else self.inner.id_to_token(self.eos_id)
        return PreTrainedTokenizerFast(
            tokenizer_file=str(self.path), eos_token=eos, pad_token=eos, padding_side="left",
            model_max_length=max_length, model_input_names=["input_ids", "attention_mask"],
            split_special_tokens=split_special_tokens, clean_up_tokenization_spaces=False,
        )  # fmt: skip

    def config_for_transformers(self, max_length: int) -> dict[str, Any]:
        """What tokenizer_config.json says of `for_transformers`, made without that package."""
        eos = None if self.eos_id is None else self.inner.id_to_token(self.eos_id)
        return {
            "clean_up_tokenization_spaces": False, "eos_token": eos, "pad_token": eos,
            "model_input_names": ["input_ids", "attention_mask"], "model_max_length": max_length,
            "padding_side": "left", "split_special_tokens": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without separators. Raises UserError for what is not text."""
        check_text(text)
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_chunks(self, text: str) -> Iterator[list[int]]:
        """Token ids of a text of any length, piece by piece (cut between paragraphs)."""
        check_text(text)
        pieces = list(chunks(text))
        for start in range(0, len(pieces), 16):
            part = pieces[start : start + 16]
            for encoding in self.inner.encode_batch_fast(part, add_special_tokens=False):
                yield encoding.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, one sequence. Raises UserError for an id outside the vocabulary
        or something else than numbers."""
        try:
            ids = [int(i) for i in ids]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UserError(
                f"token ids {str(ids)[:80]} are not one sequence of whole numbers; pass a list "
                "such as generated[0].tolist()"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"token id {i} is outside the vocabulary of {self.path} "
                    f"({self.vocab_size} tokens); use the tokenizer the model was trained with"
                )
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


def check_text(text: str) -> None:
    """Raise UserError unless `text` is a str that UTF-8 can hold (no half surrogate pair)."""
    if not isinstance(text, str):
        raise UserError(f"{str(text)[:80]!r} is {type(text).__name__}, not text; pass a str")
    if odd := not_utf8(text):
        raise UserError(f"the text holds {odd}")


def chunks(text: str, size: int = _CHUNK) -> Iterator[str]:
    """Cut `text` into pieces of about `size` characters, after a blank line, newline or space."""
    start = 0
    while len(text) - start > size:
        window = text[start : start + size]
        cut = next((window.rfind(mark) + len(mark) for mark in ("\n\n", "\n", " ")
                    if window.rfind(mark) > size // 2), size)  # fmt: skip
        yield window[:cut]
        start += cut
    if start < len(text):
        yield text[start:]


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE and write it to `path` (tokenizer.json). Deterministic.

    A small text may have fewer distinct pairs than asked for; then the vocabulary is smaller.
    Raises UserError for a vocabulary that cannot hold the 256 bytes and the separator.
    """
    if vocab_size < 257:
        raise UserError(
            f"vocab_size is {vocab_size}; a byte-level BPE needs at least 257 (256 bytes and "
            f"the separator {EOS})"
        )
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in chunks(text)), trainer)
    write_atomic(path, inner.to_str(pretty=True))
    return Tokenizer(inner, Path(path))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer.json, or a folder that holds one.

    Raises UserError if it is missing or is not a tokenizer file.
    """
    from tokenizers import Tokenizer as Inner

    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file} does not exist; data.tokenizer is 'bpe' or the path of a tokenizer.json"
        )
    try:
        inner = Inner.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        reason = re.sub(r"\s+", " ", str(error))
        raise UserError(
            f"{file} is not a tokenizer.json ({reason}); rebuild or replace it"
        ) from None
    return Tokenizer(inner, file)


def tokenizer_hash(path: str | Path) -> str:
    """SHA-256 of the tokenizer file as hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
