"""What an optimiser is given, refused in one sentence before anything is built from it.

Read by base.py, whitening.py and muon.py.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from skipless.errors import UserError, suggestion
from skipless.ranges import is_real, is_whole

_BATCHED = "leave it out, products are batched by themselves"
FROM_ELSEWHERE = {
    "foreach": _BATCHED, "fused": _BATCHED, "capturable": "leave it out, a step reads the host",
    "differentiable": "leave it out, steps carry no gradient", "amsgrad": "leave it out",
    "maximize": "negate the loss", "shampoo_beta": "use the second of betas",
    "precondition_frequency": "use refresh_every", "precond_freq": "use refresh_every",
    "max_precond_dim": "use block_size or max_side", "adjust_lr_fn": "use scale",
}  # fmt: skip
"""Keywords of other optimisers, and what to do here."""
OF_ONE_METHOD = {
    "momentum", "nesterov", "scale", "steps", "coefficients", "dtype", "block_size", "split",
    "refresh_every", "root", "update_rms", "reference", "start", "max_side", "wide", "rank",
    "one_sided", "momentum_dtype", "packed",
}  # fmt: skip
"""Settings of some optimiser here, which another does not use."""
SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""Keys that schedulers of torch keep in groups."""


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


def either(what: str, value: Any) -> None:
    """True or False, nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise UserError(f"{what} is {value!r}; True or False was expected")


def splits(split: Any) -> None:
    """{part of a name: number of matrices}, or nothing."""
    if split is None:
        return
    if not isinstance(split, Mapping) or not all(isinstance(name, str) for name in split):
        raise UserError(
            f"split is {split!r}; a dictionary from a part of a name to a number was expected, "
            "such as {'qkv_proj': 3}"
        )
    for name, parts in split.items():
        at_least_one(f"split of {name!r}", parts)


def settings_of(optimizer: Any) -> set[str]:
    """Keywords that the constructor takes: the method's own, and the routing's that it hands on."""
    own, routing = set(), set()
    for cls in type(optimizer).__mro__:
        if "__init__" in vars(cls) and cls.__module__.startswith(__name__.rpartition(".")[0]):
            known = inspect.signature(cls.__init__).parameters.values()
            is_base = any(p.name == "extra" for p in known)
            named = {p.name for p in known if p.kind is not p.VAR_KEYWORD}
            required = {p.name for p in known if p.default is p.empty}
            routing |= named - required if is_base else set()
            own |= set() if is_base else named
    return (own | routing) - {"self", "params", "extra", *optimizer.without}


def no_unknown(optimizer: Any, given: Mapping[str, Any]) -> None:
    """No keyword that neither the method nor the routing has."""
    known = settings_of(optimizer)
    for name in given:
        if name not in known:
            hint = FROM_ELSEWHERE.get(name) or suggestion(name, known, noun="setting")
            raise UserError(f"{type(optimizer).__name__} has no setting {name!r}; {hint}")


def group_keys(optimizer: Any, group: Mapping[str, Any]) -> None:
    """No setting of the whole optimiser, nor a misspelt one, in a parameter group; other keys may
    be tags of the user's or a scheduler's."""
    own = set(optimizer.defaults)
    for key in set(group) - own - SCHEDULERS - {"params", "param_names"}:
        if key in settings_of(optimizer):
            raise UserError(
                f"{key} holds for all parameter groups; give it to {type(optimizer).__name__}, not "
                "to a group"
            )
        if key in FROM_ELSEWHERE or key in OF_ONE_METHOD:
            hint = FROM_ELSEWHERE.get(key, "leave it out")
            raise UserError(
                f"a parameter group has {key!r}, which {type(optimizer).__name__} does not use; "
                f"{hint}"
            )
        if difflib.get_close_matches(str(key), own, n=1, cutoff=0.8):
            raise UserError(
                f"a parameter group has {key!r}, which is no setting; {suggestion(str(key), own)}"
            )


def parameters(named: Iterable[tuple[str, Any]], known: Mapping[Tensor, str] | None = None) -> None:
    """Real, floating tensors with memory, none of them nor of their names twice nor in `known`
    (tensor to its name)."""
    seen: dict[int, str] = {id(p): name for p, name in (known or {}).items()}
    named_so_far = set(seen.values())
    for name, p in named:
        if not isinstance(name, str):
            raise UserError(
                f"a parameter's name is of type {type(name).__name__}; pairs (name, parameter) "
                "were expected"
            )
        if not isinstance(p, Tensor):
            raise UserError(
                f"parameter {name} is {type(p).__name__}, not a tensor; pass a model, parameters, "
                "or groups"
            )
        if nn.parameter.is_lazy(p):
            raise UserError(
                f"parameter {name} has no shape yet (a lazy module); run the model once, then "
                "build the optimiser"
            )
        if not p.is_floating_point():
            raise UserError(
                f"parameter {name} is {p.dtype}; only real floating-point ones can be trained, so "
                "leave it out" + (" or pass its torch.view_as_real" if p.is_complex() else "")
            )
        if p.is_meta:
            raise UserError(
                f"parameter {name} is on the meta device, where nothing can be trained; give the "
                "model memory (to_empty) and values, then build the optimiser"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise UserError(
                f"entries of parameter {name} share memory (expand), so they cannot be trained one "
                "by one; pass a clone"
            )
        if not p.is_leaf:
            raise UserError(
                f"parameter {name} was computed from others; pass the parameters it came from"
            )
        if id(p) in seen:
            raise UserError(
                f"parameter {name} is given twice (also as {seen[id(p)]}); leave one of them out"
            )
        if name in named_so_far:
            raise UserError(
                f"two parameters are named {name!r}, so their state could not be told apart; "
                "give them names of their own, such as f'late.{name}'"
            )
        seen[id(p)] = name
        named_so_far.add(name)


def group_options(group: Mapping[str, Any]) -> None:
    """The numbers of a parameter group, which may come from the user."""
    for what in ("lr", "eps", "weight_decay"):
        if what in group:
            from_zero(f"{what} of a parameter group", group[what])
    if group.get("base_lr") is not None:
        from_zero("base_lr of a parameter group", group["base_lr"])
    if "betas" in group:
        decays("betas of a parameter group", group["betas"])


def _is_scalar(value: Any) -> TypeGuard[Tensor]:
    """Learning rates may be tensors of one element, as in torch."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
