"""Folders of quantised weights, of `skipless export` or others, refused where plain ones are read.

Their weights are codes of another shape, so that opening them as a plain model ends in a message
about shapes, or about a package that is not installed. Without torch. Read by `skipless.surgery`
and `skipless.diagnose`.
"""

from __future__ import annotations

import json
from pathlib import Path

from skipless.errors import UserError


def refuse_packed(folder: Path) -> None:
    """UserError for a folder whose config.json says that its weights are quantised."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        method = config["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if method == "skipless":
        raise UserError(
            f"{folder} holds packed integers that `skipless export` wrote, and no plain weights; "
            "open it with skipless.export.load_quantized in Python, or name the model it was made "
            "from"
        )
    if isinstance(method, str):
        raise UserError(
            f"{folder} holds weights that are quantised already ({method}), and no plain ones; "
            "name the model it was made from"
        )
