"""Finished runs of a benchmark that takes long, so that an interrupted one goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Finished:
    """Rows in a file of JSON lines; each is made once."""

    def __init__(self, path: Path | None, default: str) -> None:
        """`path`, or runs/`default`."""
        self.path = path or Path("runs") / default
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def get(self, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row with these values, made and appended if there is none."""
        for row in self.rows:
            if key.items() <= row.items():
                return row
        row = key | make()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row
