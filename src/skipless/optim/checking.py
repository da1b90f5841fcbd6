"""What an optimiser is given, refused in one sentence before anything is built from it.

Read by base.py, whitening.py and muon.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from skipless.checks import is_real, is_whole
from skipless.errors import UserError, suggestion


def from_zero(what: str, value: Any) -> None:
    """A finite number from 0 on."""
    if not (is_real(value) or _is_scalar(value)) or not (value >= 0 and math.isfinite(value)):
        raise UserError(f"{what} is {value!r}; a finite number from 0 on was expected")


def at_least_one(what: str, value: Any, *, or_none: bool = False) -> None:
    """A whole number from 1 on."""
    if value is None and or_none:
        return
    if not is_whole(value) or value < 1:
        also = ", or None" if or_none else ""
        raise UserError(f"{what} is {value!r}; a whole number of at least 1{also} was expected")


def decay(what: str, value: Any) -> None:
    """One averaging decay in [0, 1)."""
    if not is_real(value) or not 0 <= value < 1:
        raise UserError(f"{what} is {value!r}; a decay in [0, 1) was expected")


def decays(what: str, pair: Any) -> None:
    """Two averaging decays in [0, 1)."""
    fits = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not fits or not all((is_real(b) or _is_scalar(b)) and 0 <= b < 1 for b in pair):
        raise UserError(f"{what} is {pair!r}; two decays in [0, 1) were expected")


def no_unknown(optimizer: Any, unknown: Mapping[str, Any]) -> None:
    """No keyword that neither the method nor the routing has."""
    if not unknown:
        return
    known = {
        name
        for cls in type(optimizer).__mro__
        if "__init__" in vars(cls) and cls.__module__.startswith(__name__.rpartition(".")[0])
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    name, known = next(iter(unknown)), known - {"self", "params", "extra"}
    raise UserError(
        f"{type(optimizer).__name__} has no setting {name!r}; "
        f"{suggestion(name, known, noun='setting')}"
    )


def parameters(named: Iterable[tuple[str, Any]], known: Mapping[Tensor, str] | None = None) -> None:
    """Real, floating tensors, none of them twice nor in `known` (tensor to its name)."""
    seen: dict[int, str] = {id(p): name for p, name in (known or {}).items()}
    for name, p in named:
        if not isinstance(p, Tensor):
            raise UserError(
                f"parameter {name} is {type(p).__name__}, not a tensor; pass a model, parameters, "
                "or groups"
            )
        if not p.is_floating_point():
            raise UserError(
                f"parameter {name} is {p.dtype}; only real floating-point ones can be trained, so "
                "leave it out" + (" or pass its torch.view_as_real" if p.is_complex() else "")
            )
        if not p.is_leaf:
            raise UserError(
                f"parameter {name} was computed from others; pass the parameters it came from"
            )
        if id(p) in seen:
            raise UserError(
                f"parameter {name} is given twice (also as {seen[id(p)]}); leave one of them out"
            )
        seen[id(p)] = name


def group_options(group: Mapping[str, Any]) -> None:
    """The numbers of a parameter group, which may come from the user."""
    for what in ("lr", "eps", "weight_decay"):
        if what in group:
            from_zero(f"{what} of a parameter group", group[what])
    if "betas" in group:
        decays("betas of a parameter group", group["betas"])


def _is_scalar(value: Any) -> TypeGuard[Tensor]:
    """Learning rates may be tensors of one element, as in torch."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
