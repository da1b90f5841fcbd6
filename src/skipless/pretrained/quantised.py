"""Folders of quantised weights, of `skipless export` or others, refused where plain ones are read.

Their weights are codes of another shape, so that opening them as a plain model ends in a message
about shapes, or about a package that is not installed. Without torch. Read by `skipless.surgery`
and `skipless.diagnose`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skipless.errors import UserError

COMPRESSED = "compressed-tensors"


def refuse_packed(folder: Path) -> None:
    """UserError for a folder whose config.json says that its weights are quantised."""
    settings = _settings(folder)
    method = settings.get("quant_method")
    if method == "skipless":
        raise UserError(
            f"{folder} holds packed integers ({settings.get('scheme')}) that `skipless export` "
            f"wrote, and no plain weights; `skipless eval {folder} --text FILE` measures its loss, "
            f"`skipless generate {folder}` writes with it, and for all else name the model it was "
            "made from, with --schemes where a command takes them"
        )
    reads = ""
    if method == COMPRESSED:
        reads = f"; `skipless generate {folder}` and `skipless eval {folder} --text FILE` read it"
    if isinstance(method, str):
        raise UserError(
            f"{folder} holds weights that are quantised already ({method}), and no plain ones"
            f"{reads}; {'for all else ' if reads else ''}name the model it was made from"
        )


def is_packed(folder: Path) -> bool:
    """Whether the folder holds packed integers, in either layout that `skipless export` writes."""
    return _settings(folder).get("quant_method") in ("skipless", COMPRESSED)


def is_compressed(folder: Path) -> bool:
    """Whether it is in the layout of compressed-tensors."""
    return _settings(folder).get("quant_method") == COMPRESSED


def _settings(folder: Path) -> dict[str, Any]:
    """`quantization_config` of the folder's config.json; empty where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = config["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
