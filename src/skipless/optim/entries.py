"""What a user gives as `params`, as groups and named parameters. Read by routing.py and
base.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from skipless.errors import UserError

Named = tuple[str, Tensor]


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Groups, from parameters with or without names or from groups. Raises UserError for else."""
    if isinstance(params, Tensor):
        raise UserError("params is one tensor; pass a model, parameters, or groups")
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise UserError(
            f"params is of type {type(params).__name__}; pass a model, its named_parameters(), "
            "parameters, or a list of groups"
        )
    params = list(params)
    if not params:
        raise UserError("params is empty; pass a model, parameters, or groups")
    return params if isinstance(params[0], dict) else [{"params": params}]


def named_entries(group: Any, *, first: int) -> tuple[list[Named], list[Tensor]]:
    """(named parameters of a group, those matrices among them that came without a name).

    Nameless ones are called parameter_N, N from `first` on. Raises UserError unless it is a group.
    """
    if not isinstance(group, dict) or "params" not in group:
        raise UserError(
            "a parameter group is a dictionary with 'params', such as "
            "{'params': module.named_parameters(), 'lr': 1e-3}"
        )
    entries = group["params"]
    if isinstance(entries, (nn.Module, str, Mapping)) or not isinstance(entries, Iterable):
        raise UserError(
            f"params of a group is of type {type(entries).__name__}; pass parameters, or the "
            "named_parameters() of a module"
        )
    entries = [entries] if isinstance(entries, Tensor) else list(entries)
    names = group.get("param_names")
    if names is not None and not (entries and isinstance(entries[0], tuple)):
        if len(names) != len(entries):
            raise UserError(
                f"a group has {len(entries)} parameters and {len(names)} param_names; give each "
                "parameter one name"
            )
        entries = list(zip(names, entries, strict=True))
    if any(isinstance(e, tuple) and len(e) != 2 for e in entries):
        raise UserError("params holds a tuple that is no pair; pass pairs (name, parameter)")
    named = [
        e if isinstance(e, tuple) else (f"parameter_{first + i}", e) for i, e in enumerate(entries)
    ]
    return named, [e for e in entries if isinstance(e, Tensor) and e.ndim >= 2]


def is_settled(group: Any) -> bool:
    """Whether a group has been through the routing: one treatment, names for all."""
    return (
        isinstance(group, dict)
        and bool(group.get("algorithm"))
        and bool(group.get("role"))
        and isinstance(group.get("params"), list)
        and all(isinstance(e, tuple) and len(e) == 2 for e in group["params"])
    )


def warn_of_unnamed(matrices: list[Tensor]) -> None:
    """Tell that roles of matrices without names cannot be known."""
    if matrices:
        warnings.warn(
            f"parameters of two or more dimensions came without names ({len(matrices)} of them), "
            "so embeddings and heads among them are treated as hidden matrices; pass the model or "
            "its named_parameters(), or give their group a 'role'",
            stacklevel=3,
        )
