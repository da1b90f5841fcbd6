"""Token ids as text that can be printed at once.

A token may end inside a character, and a tokenizer may write the same token otherwise at the
beginning of a text. So text is decoded with the tokens before it, and held back while it ends in a
character that is not whole. Stop texts are held back too, as long as they may still come. Read by
`writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
MOST_HELD = 16
"""Tokens held back at most. A character has 4 bytes; what is not whole after so many tokens are
bytes that make no character."""
BEFORE = 8
"""Tokens of the prompt that the first piece is decoded with: some tokenizers drop a text's first
space, and some decode a run of bytes in one."""


class Pieces:
    """The text of one token after another; what is joined is what `decode` makes of all.

    `decode(ids) -> str` turns whole sequences into text, `before` are the tokens of the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before[-BEFORE:])
        self._start, self._read = 0, len(self._ids)

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is not whole."""
        self._ids.append(token)
        before, text = self._texts()
        held = len(self._ids) - self._read
        if text.endswith(BROKEN) and held < MOST_HELD:
            return ""
        return self._take(before, text)

    def finish(self) -> str:
        """What was held back, broken as it is."""
        return self._take(*self._texts()) if self._read < len(self._ids) else ""

    def _texts(self) -> tuple[str, str]:
        ids = self._ids
        return self._decode(ids[self._start : self._read]), self._decode(ids[self._start :])

    def _take(self, before: str, text: str) -> str:
        if len(text) > len(before):  # else a special token, which is not shown
            self._start, self._read = self._read, len(self._ids)
            return text[len(before) :]
        return ""


class StopText:
    """Text up to the first of some stop texts, none of which is shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        """Whether a stop text has come."""

    def push(self, piece: str) -> str:
        """What can be shown now; the end of it may be kept as the beginning of a stop text."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        kept = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was kept of a stop text that did not come."""
        held, self._held = self._held, ""
        return held
