"""What surgery is given, read and checked: model, weights, sublayers, layer indices, stacks.

Nothing here looks into layers; `stacks.py` does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import nn

from skipless.errors import UserError, check_choice
from skipless.surgery.stacks import SUBLAYERS

__all__ = ["check_finite", "check_model", "read_layers", "read_sites", "read_stacks"]


def check_model(model: Any, *, wrapped: bool = False) -> None:
    """Raise UserError unless `model` is a module and, if not `wrapped`, none that a wrapper holds
    whose gradients or files would leave the connections out."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__} and no loaded model; load one first, such as "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    for module in () if wrapped else model.modules():
        name = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UserError(
                f"{name} reduces the gradients of the parameters it was made with, which gains put "
                "in later are not; patch the model, then wrap it"
            )
        if hasattr(type(module), "get_base_model") and hasattr(module, "peft_config"):
            raise UserError(
                f"{name} saves adapters and would leave the connections out; patch the model "
                "before get_peft_model (modules_to_save keeps trained gains in the adapter)"
            )


def check_finite(model: nn.Module, where: str = "") -> None:
    """Raise UserError for a weight that is NaN or infinite, with its name and its first such entry.

    `where` is what the sentence calls the model: its folder, or else its class.
    """
    for name, parameter in model.named_parameters():
        broken = ~parameter.detach().isfinite()
        if bool(broken.any()):
            index, *more = broken.nonzero().tolist()
            value = float(parameter.detach()[tuple(index)])
            others = f" (and {len(more):,} others are not finite)" if more else ""
            raise UserError(
                f"{where or type(model).__name__} computes no numbers: {name} is {value} at "
                f"{index}{others}; get its weights anew"
            )


def read_sites(sites: Any) -> tuple[str, ...]:
    """Names of sublayers; None means all."""
    found = _several(SUBLAYERS if sites is None else sites, "sites", "names of sublayers")
    for site in found:
        check_choice("site", site, SUBLAYERS)
    return found


def read_stacks(stacks: Any) -> tuple[str, ...] | None:
    """Names of stacks or patterns; None means all."""
    if stacks is None:
        return None
    found = _several(stacks, "stacks", "names of stacks")
    for entry in found:
        if not isinstance(entry, str):
            raise UserError(f"stacks holds {entry!r}; names of stacks were expected")
    return found


def read_layers(layers: Any) -> list[int] | None:
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
