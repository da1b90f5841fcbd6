"""Single files that exporters write: whole or not there. Folders are `skipless.outputs`'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from skipless.errors import UserError
from skipless.files import atomic_path


def free_file(out: str | Path, suffix: str) -> Path:
    """`out` as a path that is free to be written and ends in `suffix`.

    Raises UserError for another ending, and for what exists.
    """
    path = Path(out)
    if "\0" in str(path):
        raise UserError(f"{str(path)!r} holds a null byte, as no path can; name another file")
    if path.suffix != suffix:
        raise UserError(f"{path} does not end in {suffix}; name a file that does")
    try:
        taken = path.exists() or path.is_symlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from None
    if taken:
        raise UserError(f"{path} exists already; name a file that does not")
    return path


@contextlib.contextmanager
def written_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which becomes `path` when the block succeeds; sentences of errors
    name `path`."""
    with atomic_path(path) as temporary:
        try:
            yield temporary
        except UserError as error:
            text = str(error).replace(str(temporary), str(path))
            raise UserError(text) from error
        free_file(path, path.suffix)  # another process may have been there
