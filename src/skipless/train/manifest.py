"""Whether a checkpoint's files are those that were written: sizes and CRC-32 in manifest.json.

Read by checkpoint.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text

STATE, MANIFEST, METADATA = "state.json", "manifest.json", ".metadata"


def checksums(paths: Iterable[Path]) -> dict[str, list[int]]:
    """[bytes, CRC-32] of each file by its name."""
    return {path.name: [path.stat().st_size, _crc(path)] for path in paths}


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """One of our JSON files. Raises RuntimeError if it is no object."""
    try:
        values = parse_json(read_text(path), where=path.name)
    except UserError as error:
        raise RuntimeError(f"its {path.name} is unreadable: {error}") from error
    if not isinstance(values, dict):
        raise RuntimeError(f"its {path.name} is not a JSON object")
    return values


def verify(folder: Path) -> None:
    """Raise RuntimeError if any file is missing or changed."""
    sums = read_object(folder / MANIFEST)
    if not {STATE, METADATA} <= sums.keys() or not any(name.startswith("__") for name in sums):
        raise RuntimeError(f"its {MANIFEST} does not list every file")
    for name, entry in sums.items():
        if not isinstance(entry, list) or len(entry) != 2:
            raise RuntimeError(f"its {MANIFEST} has no size and checksum for {name}")
        size, crc = entry
        path = folder / name
        if not path.exists():
            raise RuntimeError(f"its file {name} is missing")
        if path.stat().st_size != size:
            raise RuntimeError(f"its file {name} has {path.stat().st_size} bytes, not {size}")
        if _crc(path) != crc:
            raise RuntimeError(f"its file {name} was changed since it was written")
