"""Files that are whole or not there: written to a temporary name, then renamed. What the disk
refuses is told in a sentence. No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipless.errors import UserError

__all__ = [
    "atomic_path",
    "disk_error",
    "make_directory",
    "remove",
    "take_place",
    "to_strict_json",
    "write_atomic",
]


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block succeeds.

    On any exception the temporary file or folder is removed and `path` stays as it was. OSError
    (disk full, no permission) becomes a UserError that names the path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_dir() and path.is_dir():
            take_place(temporary, path)
            with contextlib.suppress(OSError):
                remove(temporary)  # the old one, where the two were exchanged
        else:
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what went wrong first is what must be told
            remove(temporary)
        if isinstance(error, OSError):
            raise disk_error(path, error) from error
        raise


def take_place(made: Path, target: Path) -> None:
    """Give the folder `made` the name `target`; one that is there gets the name `made`, in one step
    where the system can exchange names, or is removed.

    Raises OSError; `target` then is what it was.
    """
    for _ in range(5):  # another process may make or take away the target at any time
        try:
            if not os.path.lexists(target):
                os.rename(made, target)
                return
            if _exchange(made, target):
                return
            break
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    os.rename(target, old)
    try:
        os.rename(made, target)
    except BaseException:
        os.rename(old, target)
        raise
    with contextlib.suppress(OSError):
        remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where system or disk cannot."""
    if os.name == "nt":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if hasattr(library, "renameat2"):  # Linux: both relative to the working directory (-100)
        failed = library.renameat2(-100, names[0], -100, names[1], 2)
    elif hasattr(library, "renamex_np"):  # macOS
        failed = library.renamex_np(*names, 2)
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number))


def make_directory(path: str | Path) -> Path:
    """Make `path` and its parents unless they exist. Raises UserError when the disk refuses."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(Path(path), error) from error
    return Path(path)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, whichever it is; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomic(path: str | Path, content: bytes | str) -> Path:
    """Write `content` to `path` through a temporary name. Returns the path."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Path(path)


def disk_error(path: Path, error: OSError) -> UserError:
    """What the disk refused, naming the path."""
    reason = error.strerror or str(error)
    return UserError(
        f"cannot write {path}: {reason}; what was there before is untouched, so free space or fix "
        "the permission and run the same command again"
    )


def to_strict_json(value: Any, **options: Any) -> str:
    """JSON that every reader accepts: NaN and infinities become null."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
