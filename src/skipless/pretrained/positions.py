"""How many tokens a model sees at once, by its config. Read by `evaluate.tasks` and `diagnose`."""

from __future__ import annotations

from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")


def num_positions(model: Any) -> int | None:
    """The length that `model.config` tells, of a model of several parts that of its text; None
    where it tells none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    found = (getattr(config, name, None) for name in _NAMES)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
