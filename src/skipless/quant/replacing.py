"""What hooks of this room share: a changed tensor where a module's argument or result was, and
tensors of their own that stay where the inputs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def replace_first(value: Any, function: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """`value` with its first floating-point tensor passed through `function`, at any depth."""
    if isinstance(value, Tensor):
        return (function(value), True) if value.is_floating_point() else (value, False)
    if isinstance(value, dict):
        for key, item in value.items():
            new, found = replace_first(item, function)
            if found:
                changed = type(value)(value) if type(value) is not dict else dict(value)
                changed[key] = new
                return changed, True
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            new, found = replace_first(item, function)
            if found:
                items = [*value[:index], new, *value[index + 1 :]]
                is_named = hasattr(value, "_fields")
                return (type(value)(*items) if is_named else type(value)(items)), True
    return value, False


def replace_input(
    args: tuple, kwargs: dict, function: Callable[[Tensor], Tensor]
) -> tuple[tuple, dict] | None:
    """What a forward pre-hook with keyword arguments returns to pass a module's first
    floating-point tensor through `function`; None where there is none."""
    replaced, found = replace_first((args, kwargs), function)
    return replaced if found else None


def moved(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` on the device of `x`, to be kept there: no pass needs it from elsewhere again, and
    one that was in inference mode leaves nothing that gradients could not pass."""
    if tensor.device == x.device:
        return tensor
    with torch.inference_mode(False):
        return tensor.to(x.device)
