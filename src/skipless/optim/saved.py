"""Saved optimiser state: matched by parameter name whatever the order, and refused before anything
is replaced where it does not fit. Read by base.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from skipless.errors import UserError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into names."""


def match_by_name(state_dict: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    """`state_dict` with its groups in the order and composition of `own` (param_groups).

    Matched by parameter name, wrappers apart, or by place if either has no names. Raises UserError
    when a parameter is missing on either side, was treated by another method, or when parameters
    of one group had different settings.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise UserError("that is no optimiser state; pass what state_dict() of one returned")
    groups = state_dict["param_groups"]
    if not all(g.get("param_names") for g in [*groups, *own] if g["params"]):
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in own]:
            raise UserError(
                "the saved optimiser state has no parameter names and other groups; build the "
                "optimiser, of the same class, for the model and groups it was saved with"
            )
        for group, source in zip(own, groups, strict=True):
            _same_method(group, source, "by place")
        return state_dict
    saved_names = plain_names(n for g in groups for n in g.get("param_names", ()))
    keys = [(g, key) for g in groups for key in g["params"]]
    place = dict(zip(saved_names, keys, strict=True))
    own_names = plain_names(n for g in own for n in g.get("param_names", ()))
    _same_names(own_names, place)
    rebuilt, names = [], iter(own_names)
    for group in own:
        found = [place[next(names)] for _ in group["params"]]
        for name, (source, _) in zip(group.get("param_names", ()), found, strict=True):
            _same_method(group, source, repr(name))
        rebuilt.append({
            **(_settings(group, found) if found else group),
            "params": [key for _, key in found],
            "param_names": list(group.get("param_names", ())),
        })  # fmt: skip
    return {**state_dict, "param_groups": rebuilt}


def plain_names(names: Iterable[str]) -> list[str]:
    """Names without wrappers; "module." goes where all begin so (DistributedDataParallel)."""
    plain = []
    for name in names:
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        plain.append(name)
    if plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def check_shapes(
    name: str, values: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError unless the saved `values` of a parameter are the tensors `expected`.

    A step count alone (no gradient yet, or another rank keeps the rest) is right for all.
    """
    found = {k: tuple(v.shape) for k, v in values.items() if k != "step" and isinstance(v, Tensor)}
    if not found or found == dict(expected):
        return
    what = next(k for k in [*expected, *found] if found.get(k) != expected.get(k))
    have, need = found.get(what, "missing"), expected.get(what, "not used")
    raise UserError(
        f"the saved state {what!r} of {name} is {have}, but here it is {need}; build the model and "
        "the optimiser (block_size, split, root, packed, one_sided, reference, max_side, wide) as "
        "they were when it was saved"
    )


def _same_names(own: list[str], place: Mapping[str, Any]) -> None:
    missing = [n for n in own if n not in place]
    if missing:
        raise UserError(
            f"the saved optimiser state has no parameter {missing[0]!r} "
            f"({len(missing)} missing); build the optimiser for the model it was saved with"
        )
    extra = sorted(set(place) - set(own))
    if extra:
        raise UserError(
            f"the saved optimiser state holds {extra[0]!r} ({len(extra)} more than this optimiser "
            "has), which would be lost; add those parameters with add_param_group, then load"
        )


def _same_method(group: Mapping[str, Any], source: Mapping[str, Any], name: str) -> None:
    was, now = source.get("algorithm", "another package's"), group["algorithm"]
    if was != now and group["params"]:
        raise UserError(
            f"the saved state of parameter {name} is {was}, but this optimiser uses {now} for it; "
            "continue with the class and roles it was saved with, or start without its state"
        )


def _settings(group: Mapping[str, Any], found: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    """Settings of the saved group(s) of all members, which must agree."""
    aside = ("params", "param_names", "role")
    first = {k: v for k, v in found[0][0].items() if k not in aside}
    for source, _ in found[1:]:
        for key, value in first.items():
            if source is not found[0][0] and source.get(key) != value:
                raise UserError(
                    f"parameters {group['param_names'][0]!r} and others of one group were saved "
                    f"with different {key}; build the optimiser with the groups it was saved with"
                )
    return found[0][0]
