"""An optimiser's state as tensors plus JSON, and back without loss.

`pack` walks a nested state, moves tensors into a flat dict and leaves holes; what remains is JSON
in which tuples and non-text keys are marked. Read by states.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

TENSOR, TUPLE, PAIRS = "__tensor__", "__tuple__", "__pairs__"


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of `value`; its tensors are put into `tensors` under names from `path`.

    Raises TypeError for anything but dict, list, tuple, tensor, str, int, float, bool and None.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {TENSOR: path}
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: pack(v, f"{path}.{k}", tensors) for k, v in value.items()}
        return {PAIRS: [[k, pack(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [pack(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}; an optimiser state holds tensors, "
                    "numbers, text and lists of them")  # fmt: skip


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`. Raises KeyError naming a tensor that is missing."""
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        if TUPLE in value:
            return tuple(unpack(v, tensors) for v in value[TUPLE])
        if PAIRS in value:
            return {k: unpack(v, tensors) for k, v in value[PAIRS]}
        return {k: unpack(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [unpack(v, tensors) for v in value]
    return value


def tensor_paths(value: Any) -> list[str]:
    """The names of all tensors that `unpack` would ask for."""
    if isinstance(value, dict):
        if TENSOR in value:
            return [value[TENSOR]]
        value = list(value.values())
    if isinstance(value, list):
        return [path for item in value for path in tensor_paths(item)]
    return []
