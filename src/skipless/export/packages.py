"""Optional packages that a format needs, asked for before anything slow. Read by the exporters."""

from __future__ import annotations

import importlib.util

from skipless.errors import UserError


def need(*names: str, extra: str) -> None:
    """Raise UserError, with the line to type, unless every package can be imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            f"pip install 'skipless[{extra}]'"
        )
