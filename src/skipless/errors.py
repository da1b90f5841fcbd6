"""The one exception that users see, and the suggestion that goes into it.

Every mistake a user can make ends as a `UserError`: one sentence that names the value, what was
expected and the next step. The CLI prints it without a traceback and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input, told in one sentence. Subclass of ValueError, so libraries may
    catch it as such."""


def suggestion(name: str, known: Iterable[str], *, noun: str = "name") -> str:
    """Return the tail of an error message: near names of `name` first, else all that exist."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return f"known {noun}s: {', '.join(known)}" if known else f"no {noun} is known here"


def check_choice(what: str, value: str, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`; raise UserError with near names otherwise."""
    choices = list(choices)
    if value not in choices:
        raise UserError(f"{what} is {value!r}; {suggestion(str(value), choices, noun='value')}")
    return value


def not_utf8(text: str) -> str | None:
    """What UTF-8 cannot hold of `text`, with what to do; None where it holds all.

    Python reads a byte of an argument that is no UTF-8 as one of U+DC80 to U+DCFF.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found, where = text[error.start], f"at character {error.start}"
        if "\udc80" <= found <= "\udcff":
            return (
                f"the byte 0x{ord(found) - 0xDC00:02x} {where}, which is not UTF-8; convert it, as "
                "`iconv` does, or type it in a terminal that writes UTF-8"
            )
        return (
            f"{found!r} {where}, half of a surrogate pair that UTF-8 cannot hold; write the "
            "character itself or leave it out"
        )
    return None


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 scheme", "2 schemes", "1,024 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """What an exception of another library says, in one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
