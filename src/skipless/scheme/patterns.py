"""Which modules and sites an exception of a mixed scheme names. Read by `formats` and those who
list what a pattern covers."""

from __future__ import annotations

from fnmatch import fnmatchcase

from skipless.errors import UserError

FULL_PRECISION = "fp"


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names this module ("a.b.c"), one that it lies in, or this site ("a:input").

    A pattern with a colon is held against whole names of sites alone.
    """
    if ":" in pattern:
        return fnmatchcase(name, pattern)
    module = name.partition(":")[0]
    while True:
        if fnmatchcase(module, pattern):
            return True
        if "." not in module:
            return False
        module = module.rpartition(".")[0]


def split_override(text: str) -> tuple[str, str]:
    """(pattern, scheme) of "PATTERN=SCHEME". Raises UserError for another text."""
    pattern, equals, scheme = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not (pattern and equals and scheme):
        raise UserError(
            f"{text!r} is not an override; write PATTERN=SCHEME such as 'layers.0.*=W8A8', or "
            "PATTERN=fp to leave something in full precision"
        )
    return pattern, scheme
