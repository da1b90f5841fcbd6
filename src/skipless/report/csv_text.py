"""Rows as CSV. Read by what writes tables beside a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with the columns of all of them in order of appearance; None is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
