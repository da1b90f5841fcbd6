"""Requests as token ids, cut between context and continuation as lm-eval does.

Spaces at the end of a context move to the front of the continuation, since byte-pair tokenisers
keep a space with the word after it. The two are encoded together, and the continuation is what
comes after as many tokens as the context has alone. An empty context is one token: the beginning of
text, else its end. What is too long loses tokens on the left. Read by `scoring.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skipless.errors import UserError

DEFAULT_LENGTH = 2048
"""Tokens, for a model that does not say how many it takes (lm-eval's number)."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One request: what the model reads, and what it is asked for."""

    inputs: tuple[int, ...]
    """Context and continuation but for the last token; the last `len(targets)` places predict."""
    targets: tuple[int, ...]
    """The continuation."""
    is_truncated: bool


class Coder:
    """A tokeniser of ours or of Hugging Face's, as requests need it."""

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self.max_length = max_length or DEFAULT_LENGTH
        self._encode: Callable[[str], list[int]]
        self._encode_whole: Callable[[str], list[int]]
        if hasattr(tokenizer, "eos_id") and hasattr(tokenizer, "encode"):
            self.start = tokenizer.eos_id
            self._encode = self._encode_whole = tokenizer.encode
        elif hasattr(tokenizer, "eos_token_id") and hasattr(tokenizer, "encode"):
            begin, end = getattr(tokenizer, "bos_token_id", None), tokenizer.eos_token_id
            self.start = end if begin is None else begin
            self._encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
            front = _front(tokenizer)
            mark = tokenizer.decode([self.start]) if front else ""
            self._encode_whole = lambda text: (
                self._encode(text) if mark and text.startswith(mark) else front + self._encode(text)
            )
        else:
            raise UserError(
                f"the tokenizer is {type(tokenizer).__name__}; a tokenizer of transformers or a "
                "run's own (load_run(...).tokenizer) was expected"
            )

    def encode(self, context: str, continuation: str) -> Encoded | None:
        """The request as ids; None where the continuation alone is longer than the model takes.

        Raises UserError for a continuation without tokens, and for an empty context where the
        tokenizer has neither a first nor a last token.
        """
        ids, asked = self.split(context, continuation)
        if not asked:
            raise UserError(f"the continuation {continuation!r} has no tokens of its own")
        if len(asked) > self.max_length:
            return None
        whole = [*ids, *asked]
        kept = whole[-(self.max_length + 1) :]
        return Encoded(
            inputs=tuple(kept[:-1]), targets=tuple(asked), is_truncated=len(kept) < len(whole)
        )

    def split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation, before anything is cut off."""
        if context == "":
            return self._without_context(continuation)
        bare = context.rstrip()
        if not bare:
            return self._without_context(context + continuation)
        continuation = context[len(bare) :] + continuation
        alone = self._encode_whole(bare)
        return alone, self._encode_whole(bare + continuation)[len(alone) :]

    def _without_context(self, continuation: str) -> tuple[list[int], list[int]]:
        ids = self._encode(continuation)
        if self.start is None:
            raise UserError(
                "the context is empty, and the tokenizer has no token for the beginning or end of "
                "a text to stand in for it; give a context"
            )
        if ids[:1] == [self.start]:
            return ids[:1], ids[1:]
        return [self.start], ids


def _front(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text of itself; lm-eval keeps them."""
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    whole = list(tokenizer.encode("a"))
    places = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
    return whole[: places[0]] if places else []


def shared_length(requests: Iterable[Encoded]) -> int:
    """How many input tokens all requests begin with and need only one prediction from, the last."""
    requests = list(requests)
    first = requests[0].inputs
    asked_from = min(len(r.inputs) - len(r.targets) + 1 for r in requests)
    return min(asked_from, *(common_length(first, r.inputs) for r in requests))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
