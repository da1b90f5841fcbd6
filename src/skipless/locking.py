"""Locks between processes: one that waits (`locked`), one that does not (`try_lock`).

A lock belongs to the open file, so it vanishes with its process, even a killed one. Used by run
directories, prepared text and compiled kernels.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from skipless import log
from skipless.errors import UserError


@contextlib.contextmanager
def locked(path: str | Path, *, what: str, timeout: float = 3600.0) -> Iterator[None]:
    """Hold the lock file `path` for the block; wait up to `timeout` seconds for another holder.

    Raises UserError when the file cannot be made or the wait was in vain.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 (closed below, after the wait)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; set SKIPLESS_CACHE to a folder you "
            "may write to"
        ) from error
    with file:
        deadline, told = time.monotonic() + timeout, False
        while not try_lock(file):
            if not told:
                log.say(f"waiting for another process: {what}")
                told = True
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process has been holding {path} for {timeout:.0f} s ({what}); "
                    "end it and try again"
                )
            time.sleep(0.2)
        yield


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left beside `folder` under temporary names (see
    `files.atomic_path`). Only for the holder of that folder's lock."""
    for old in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(old, ignore_errors=True)


def try_lock(file) -> bool:
    """Lock an open file exclusively, without waiting. False if another process holds it."""
    if os.name == "nt":
        import msvcrt

        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
