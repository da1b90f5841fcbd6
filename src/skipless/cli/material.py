"""What a model of others is run on: text, images or sound, as the options of a subcommand name it.

No torch here: what is named wrongly is told before it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skipless.errors import UserError


class Material(NamedTuple):
    """The options --text, --data, --images, --audio, --num-tokens and --sequence-length."""

    text: str | None = None
    """A file or folder of text; beside images or sound a file of lines."""
    data: str | None = None
    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    num_tokens: int | None = None
    length: int | None = None
    """Tokens of a sequence."""

    @property
    def flag(self) -> str | None:
        """The first option that names something to read."""
        named = {"--text": self.text, "--data": self.data, "--images": self.images,
                 "--audio": self.audio}  # fmt: skip
        return next((flag for flag, value in named.items() if value), None)

    @property
    def is_media(self) -> bool:
        """Whether it is images or sound."""
        return bool(self.images or self.audio)

    @property
    def words(self) -> list[str]:
        """What is read, as it is typed."""
        return [
            *(["--data", self.data] if self.data else []),
            *(["--text", self.text] if self.text else []),
            *(["--images", *self.images] if self.images else []),
            *(["--audio", *self.audio] if self.audio else []),
        ]

    def check(self) -> None:
        """Raise UserError for options that exclude one another and for text that is not there."""
        if self.text is not None and not Path(self.text).exists():
            raise UserError(
                f"--text is {self.text!r}, which does not exist; name a file or folder of text"
            )
        if self.images and self.audio:
            raise UserError("--images and --audio are both given; keep one of them")
        flag = "--images" if self.images else "--audio"
        for other, value in (("--data", self.data), ("--sequence-length", self.length)):
            if self.is_media and value is not None:
                raise UserError(f"{other} belongs to models of text; leave it out of {flag}")

    def read(self, subject: Any) -> Any:
        """Batches for a `Subject` (`diagnose.texts.Text`). Raises UserError as their readers do."""
        from skipless.diagnose.media import read_media
        from skipless.diagnose.texts import read_batches

        if self.is_media:
            return read_media(subject, self.images, self.audio, self.text)
        assert self.num_tokens is not None, "text is read up to a number of tokens"
        return read_batches(subject, self.text, self.data, self.num_tokens, self.length)

    def read_same(self, subjects: Sequence[Any]) -> Any:
        """The same batches for several. Raises UserError where their inputs are not alike."""
        from skipless.diagnose.comparison.pairs import read_same, read_same_media

        if self.is_media:
            return read_same_media(subjects, self.images, self.audio, self.text)
        assert self.num_tokens is not None, "text is read up to a number of tokens"
        return read_same(subjects, self.text, self.data, self.num_tokens, self.length)
