"""One prompt from beginning to end: tokens as they come, why it ended, how fast it was.

Read by the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from skipless.errors import UserError
from skipless.model.generation import check_sampling, sample
from skipless.serving.opening import Writer
from skipless.serving.pieces import Pieces, StopText

Finish = Literal["length", "end", "stop", "context", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to go on. Raises UserError for values out of range."""

    max_new_tokens: int = 100
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end the writing and are not shown."""
    ignore_end: bool = False
    """Go on after the token that ends texts."""

    def __post_init__(self) -> None:
        check_sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.seed)
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"stop is {self.stop!r}; a tuple of texts was expected")
        if not all(self.stop):
            raise UserError("a stop text is empty; give at least one character, or none at all")


@dataclass(kw_only=True)
class Written:
    """What came of one prompt."""

    prompt: str
    text: str = ""
    """What follows the prompt, stop text left out."""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int
    finish: Finish = "length"
    """length: as many tokens as asked for; end: the model ended the text; stop: a stop text;
    context: no more tokens fit; interrupted: Ctrl-C."""
    num_dropped_tokens: int = 0
    """Of the beginning, prompt included, out of sight when the last was chosen: the window slid."""
    prompt_seconds: float | None = None
    """Reading the prompt, and choosing the first token."""
    seconds: float = 0.0
    """All further tokens."""
    cache_bytes: int | None = None
    """None where the model keeps no cache."""

    @property
    def prompt_speed(self) -> float | None:
        """Tokens of the prompt a second."""
        return self.num_prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def speed(self) -> float | None:
        """New tokens a second after the first; None for fewer than two."""
        more = len(self.token_ids) - 1
        return more / self.seconds if more > 0 and self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prompt": self.prompt, "text": self.text, "finish": self.finish,
            "num_prompt_tokens": self.num_prompt_tokens, "num_new_tokens": len(self.token_ids),
            "num_dropped_tokens": self.num_dropped_tokens, "token_ids": self.token_ids,
            "prompt_tokens_per_second": self.prompt_speed, "tokens_per_second": self.speed,
            "cache_bytes": self.cache_bytes,
        }  # fmt: skip


@torch.no_grad()
def write(
    writer: Writer, prompt: str, settings: Settings, emit: Callable[[str], Any] = lambda text: None
) -> Written:
    """Continue `prompt`; every piece of text is handed to `emit` as soon as it is whole.

    The joined pieces are `text`. Ctrl-C ends the writing, with `finish` "interrupted". Raises
    UserError for a prompt that is empty or longer than the context, for token ids outside the
    model's vocabulary and for logits that are not finite.
    """
    ids = writer.encode(prompt)
    steps = writer.steps()
    pieces, stops = Pieces(writer.decode, ids), StopText(settings.stop)
    generator = torch.Generator().manual_seed(settings.seed)
    found = Written(prompt=prompt, num_prompt_tokens=len(ids))
    shown: list[str] = []

    def show(text: str) -> None:
        if text:
            shown.append(text)
            emit(text)

    start = time.perf_counter()
    try:
        for _ in range(settings.max_new_tokens):
            if not steps.slides and steps.limit is not None and len(ids) > steps.limit:
                found.finish = "context"  # the last token's position is the last there is
                break
            logits = steps.logits(ids)
            found.num_dropped_tokens = steps.start
            token = int(
                sample(logits, settings.temperature, settings.top_k, generator, settings.top_p)
            )
            now = time.perf_counter()
            if found.prompt_seconds is None:
                found.prompt_seconds = now - start
            found.seconds = now - start - found.prompt_seconds
            if token in writer.ends and not settings.ignore_end:
                found.finish = "end"
                break
            ids.append(token)
            found.token_ids.append(token)
            show(stops.push(pieces.push(token)))
            if stops.found:
                found.finish = "stop"
                break
    except KeyboardInterrupt:
        found.finish = "interrupted"
    if not stops.found:
        show(stops.push(pieces.finish()))
    if stops.found:
        found.finish = "stop"
    else:
        show(stops.finish())
    found.text, found.cache_bytes = "".join(shown), steps.num_bytes
    return found
