"""What is patched in a model: its connections, their weights, and the record in its config.

Read by `patching.py`, `saving.py` and everything that works on a patched model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from skipless.compiled import unwrapped
from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.model import Connection
from skipless.surgery.dropping import Absent
from skipless.surgery.rewriting import joins_of

__all__ = ["RECORD", "connections", "gains", "record", "refresh_record", "set_training_progress"]

RECORD = "skipless_patch"
"""Attribute of `model.config` that says what is patched."""


def connections(model: nn.Module) -> dict[str, Connection]:
    """The connections that `patch` put in, by dotted name: "model.layers.0.mlp_connection"."""
    found: dict[str, Connection] = {}
    for name, module in model.named_modules():
        for _, attribute in sorted(joins_of(module)):
            found[f"{name}.{attribute}" if name else attribute] = getattr(module, attribute)
    return found


def gains(model: nn.Module) -> dict[str, Tensor]:
    """Current weights of all connections, detached: "model.layers.0.mlp_connection.b"."""
    return {
        f"{name}.{weight}": value
        for name, module in connections(model).items()
        for weight, value in module.gains().items()
    }


def set_training_progress(model: nn.Module, fraction: float) -> None:
    """Tell every connection the share of training done, in [0, 1] (C7)."""
    found = connections(model)
    if not found:
        raise UserError(f"{type(model).__name__} is not patched; it has no connection to anneal")
    for module in found.values():
        module.set_training_progress(fraction)


def record(model: nn.Module) -> list[dict[str, Any]]:
    """What is patched, as JSON: [{"connection": {...}, "at": [dotted names]}]; "dropped": true
    where the sublayers are gone."""
    groups: dict[tuple[ConnectionConfig, bool], list[str]] = {}
    for name, module in connections(model).items():
        groups.setdefault((module.config, isinstance(module, Absent)), []).append(name)
    default = ConnectionConfig().to_dict()
    rows = []
    for (config, is_dropped), names in groups.items():
        settings = {k: v for k, v in config.to_dict().items() if v != default[k]}
        row = {"connection": {"kind": config.kind, **settings}, "at": names}
        rows.append({**row, "dropped": True} if is_dropped else row)
    return rows


def refresh_record(model: nn.Module) -> None:
    """Write what the connections now are into the config of the model, and of its parts that have
    one of their own."""
    model = unwrapped(model)
    for module in model.modules():
        config = getattr(module, "config", None)
        if not hasattr(type(module), "save_pretrained") or config is None:
            continue
        rows = record(module)
        if config is getattr(model, "config", None) and module is not model:
            continue  # one config for the model and its body; the whole model's names stand in it
        if rows:
            setattr(config, RECORD, rows)
        elif hasattr(config, RECORD):
            delattr(config, RECORD)
