"""Folders that commands write: whole or not there. Read by surgery, export and the command line.

What is written goes to a temporary folder on the same disk and is renamed at the end. The temporary
one is locked while it is written, so that the next command knows those of killed processes and
removes them. A folder that exists and is empty (it may be a mount or the working directory) stays
the one it is and is filled, config.json last; a link stays a link.

`written_folder` makes a new one, `replaced_folder` may put it in the place of another: names are
exchanged in one step where the system can (Linux, macOS), so that a killed process leaves the old
folder or the new one. Where it cannot, two renames have to do, and the old one is for a moment
called .NAME.XXXXXXXX.old beside (`set_aside`).
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from skipless.errors import UserError
from skipless.files import take_place
from skipless.locking import try_lock

__all__ = ["free_folder", "replaced_folder", "set_aside", "staging_folder", "written_folder"]

_PREFIX, _SUFFIX = ".skipless-", ".tmp"


def free_folder(out: str | os.PathLike) -> Path:
    """`out` as a path that is free to be written: missing, or an empty folder.

    Raises UserError for one that holds something, is a file, or that no disk can hold.
    """
    path = Path(out)
    if "\0" in str(path):  # which `exists` takes for a path that is free
        raise UserError(f"{str(path)!r} holds a null byte, as no path can; name another folder")
    try:
        taken = path.exists() and (
            not path.is_dir() or any(not _is_ours(entry) for entry in path.iterdir())
        )
    except (OSError, ValueError) as error:  # too long, not ours to read
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {path}: {reason}; name another folder") from None
    if taken:
        raise UserError(f"{path} exists already; name a folder that does not")
    return path


@contextlib.contextmanager
def written_folder(out: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder, which becomes `out` when the block succeeds.

    On any exception it is removed and `out` stays as it was. Raises UserError when the disk
    refuses, or when another process wrote `out` meanwhile.
    """
    with _written(Path(out), free_folder, os.rename) as made:  # which refuses what holds something
        yield made


@contextlib.contextmanager
def replaced_folder(
    out: str | os.PathLike, check: Callable[[Path], Any] = lambda path: None
) -> Iterator[Path]:
    """Yield an empty temporary folder, which takes the place of `out` when the block succeeds.

    `check(path)` raises UserError for what must stay, now and again at the end, since another
    process may have been there. Exceptions and errors as in `written_folder`.
    """
    check(Path(out))
    with _written(Path(out), check, take_place) as made:
        yield made


def set_aside(out: str | os.PathLike) -> Path | None:
    """The folder that stood at `out`, which is missing, until a process that replaced it was killed
    between two renames; None where there is none."""
    path = Path(out)
    if os.path.lexists(path) or not path.parent.is_dir():
        return None
    found = [old for old in path.parent.glob(f".{glob.escape(path.name)}.*.old") if old.is_dir()]
    return max(found, key=lambda old: old.stat().st_mtime, default=None)


@contextlib.contextmanager
def _written(
    path: Path, check: Callable[[Path], Any], place: Callable[[Path, Path], Any]
) -> Iterator[Path]:
    temporary = handle = None
    try:
        target = Path(os.path.realpath(path))
        inside = target.is_dir() and all(_is_ours(entry) for entry in target.iterdir())
        parent = target if inside else target.parent
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent)
        temporary, handle = _make_held(parent)
        made = temporary / "new"  # savers lock the folder that they write, so it is another one
        made.mkdir()
        yield made
        _flush(made)
        check(target)
        if inside:
            _fill(target, made)
        else:
            place(made, target)
    except UserError as error:  # of a saver, which knows the temporary name only
        text = str(error).replace(f"{temporary}{os.sep}new", str(path))
        if text == str(error):
            raise
        raise UserError(text) from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write {path}: {reason}; nothing was written, so free space, fix the "
            "permission or name another folder"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty temporary folder inside `parent`, removed at the end; so are those that killed
    processes left there."""
    _remove_leftovers(parent)
    temporary, handle = _make_held(parent)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _flush(folder: Path) -> None:
    """Have the disk hold all files, before names say that they are there.

    Files get the permissions of any new file, which the folder's tell: safetensors makes weights
    that nobody else may read, not even the account of a server.
    """
    usual = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            if not file.is_symlink():
                file.chmod(stat.S_IMODE(file.stat().st_mode) | usual)
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())


def _fill(target: Path, made: Path) -> None:
    """Move everything into the folder; config.json comes last, without it nothing is read."""
    for entry in sorted(made.iterdir(), key=lambda file: file.name == "config.json"):
        os.rename(entry, target / entry.name)


def _is_ours(path: Path) -> bool:
    return path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)


def _make_held(parent: Path) -> tuple[Path, int | None]:
    """A new temporary folder and its locked handle. Another process may take it for a leftover
    before it is locked; then it is gone, and the next one is made."""
    for _ in range(0 if os.name == "nt" else 5):
        temporary = parent / f"{_PREFIX}{uuid.uuid4().hex[:8]}{_SUFFIX}"
        temporary.mkdir()
        with contextlib.suppress(FileNotFoundError):
            handle = _hold(temporary)
            if handle is not None and temporary.is_dir():
                return temporary, handle
            if handle is not None:
                os.close(handle)
    temporary = parent / f"{_PREFIX}{uuid.uuid4().hex[:8]}{_SUFFIX}"  # no locks here
    temporary.mkdir()
    return temporary, None


def _hold(folder: Path) -> int | None:
    """A locked handle of the folder; None where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return None
    handle = os.open(folder, os.O_RDONLY)
    if try_lock(handle):
        return handle
    os.close(handle)
    return None


def _remove_leftovers(parent: Path) -> None:
    """Remove temporary folders whose process was killed: those that nobody holds."""
    for leftover in filter(_is_ours, parent.iterdir()):
        with contextlib.suppress(OSError):
            handle = _hold(leftover)
            if handle is not None:
                shutil.rmtree(leftover, ignore_errors=True)
                os.close(handle)
