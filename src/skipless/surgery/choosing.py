"""Which joins of a model a patch is for: sublayers, layers and stacks, read and checked."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from skipless.errors import UserError, check_choice
from skipless.model import Connection
from skipless.sublayers import SUBLAYERS
from skipless.surgery.records import connections
from skipless.surgery.stacks import Join, Layer, Stack, find_stacks

__all__ = ["Place", "check_patchable", "choose"]

Place = tuple[Stack, Layer, Join]
"""A join, and where it is."""

SYNONYMS = {"vision": ("vision", "visual", "image"), "text": ("text", "language")}
"""What a stack may be called that is asked for by these words."""


def choose(model: nn.Module, sites: Any, layers: Any, stacks: Any) -> list[Place]:
    """The joins that are meant, in the model's order; arguments as `patch` takes them.

    Raises UserError for what is no such argument, for what matches nothing, and for joins that
    cannot be patched.
    """
    sites, wanted = _read_sites(sites), _read_layers(layers)
    found = _choose_stacks(model, _read_stacks(stacks))
    chosen, present = [], set()
    for stack in found:
        count = len(stack.layers)
        for index in wanted or ():
            if not -count <= index < count:
                hint = "; choose one with stacks=" if len(found) > 1 else ""
                raise UserError(
                    f"layer {index} is out of range: {stack.name} has layers 0 to {count - 1}{hint}"
                )
        indices = range(count) if wanted is None else sorted({i % count for i in wanted})
        for index in indices:
            layer = stack.layers[index]
            present |= {join.sublayer for join in layer.joins}
            chosen += [(stack, layer, join) for join in layer.joins if join.sublayer in sites]
    explicit = sites if sites != SUBLAYERS else ()
    for site in explicit:
        if site not in present:
            raise UserError(
                f"{', '.join(s.name for s in found)} of {type(model).__name__} has no {site}; "
                f"it has {', '.join(sorted(present))}"
            )
    check_patchable(chosen)
    return chosen


def _choose_stacks(model: nn.Module, wanted: tuple[str, ...] | None) -> list[Stack]:
    if any(isinstance(module, Connection) for module in model.modules()) and not connections(model):
        raise UserError(
            f"{type(model).__name__} is built of skipless connections already; set "
            "ModelConfig.connection instead of patching"
        )
    found = find_stacks(model)
    if wanted is None:
        return found
    kept = []
    for entry in wanted:
        part = [s for s in found if fnmatchcase(s.name, entry) or f".{entry}." in f".{s.name}."]
        part = part or [s for s in found if _speaks_of(s.name, entry)]
        if not part:
            names = ", ".join(stack.name for stack in found)
            raise UserError(f"no stack of layers matches {entry!r}; the model has: {names}")
        kept += [stack for stack in part if stack not in kept]
    return kept


def _speaks_of(name: str, entry: str) -> bool:
    """Whether a word of the stack's name is `entry`, or what models call it: vision of
    vision_model."""
    words = set(re.split(r"[._]", name.lower()))
    return not words.isdisjoint(SYNONYMS.get(entry.lower(), (entry.lower(),)))


def check_patchable(chosen: list[Place]) -> None:
    """Raise UserError for a join that is patched already, or where a patch would have no effect."""
    owners: dict[int, str] = {}
    paths: set[str] = set()
    for _, layer, join in chosen:
        owner, path = layer.owner(join), layer.path(join)
        if hasattr(owner, join.name) or path in paths:
            raise UserError(f"{path} is patched already; unpatch(model) first")
        paths.add(path)
        if "forward" in vars(owner) or "forward" in vars(layer.module):
            raise UserError(
                f"the forward of {path.rpartition('.')[0]} was replaced on the object "
                "(accelerate's offloading does that), so a patch would have no effect; patch first"
            )
        first = owners.setdefault(id(layer.module), layer.name)
        if first != layer.name:
            raise UserError(f"{first} and {layer.name} are one layer, so their skips are one too")
        first = owners.setdefault(id(owner), layer.name)
        if first != layer.name:
            raise UserError(
                f"{first} and {layer.name} share their {join.owner}, so their skips are one too"
            )
        if any(hasattr(p, "placements") for p in owner.parameters()):
            raise UserError("the model is sharded; patch it before fully_shard")


def _read_sites(sites: Any) -> tuple[str, ...]:
    """Names of sublayers; None means all."""
    found = _several(SUBLAYERS if sites is None else sites, "sites", "names of sublayers")
    for site in found:
        check_choice("site", site, SUBLAYERS)
    return found


def _read_stacks(stacks: Any) -> tuple[str, ...] | None:
    """Names of stacks or patterns; None means all."""
    if stacks is None:
        return None
    found = _several(stacks, "stacks", "names of stacks")
    for entry in found:
        if not isinstance(entry, str):
            raise UserError(f"stacks holds {entry!r}; names of stacks were expected")
    return found


def _read_layers(layers: Any) -> list[int] | None:
    """Layer indices as they were given, negative ones included; None means all. Integers of numpy
    and torch are integers; booleans are not."""
    if layers is None:
        return None
    single = hasattr(layers, "__index__") and not getattr(layers, "ndim", 0)
    wanted = "layer indices, such as 0, [0, -1] or range(4), were expected"
    if isinstance(layers, str | bytes) or not single and not isinstance(layers, Iterable):
        raise UserError(f"layers is {layers!r}; {wanted}")
    entries: Any = [layers] if single else layers
    found = []
    for entry in entries:
        try:
            if isinstance(entry, bool):
                raise TypeError
            found.append(operator.index(entry))
        except TypeError:
            raise UserError(f"layers holds {entry!r}; {wanted}") from None
    if not found:
        raise UserError("layers is empty; leave the argument out to mean all")
    return found


def _several(values: Any, argument: str, expected: str) -> tuple[Any, ...]:
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Iterable):
        raise UserError(f"{argument} is {values!r}; {expected} were expected")
    found = tuple(values)
    if not found:
        raise UserError(f"{argument} is empty; leave the argument out to mean all")
    return found
