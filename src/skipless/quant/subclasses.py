"""Layers that get another `forward` in their place: subclasses that copy and pickle.

Such a layer keeps its place, parameters, hooks and its class's name, by which transformers' Conv1D
is recognised. A class made at run time has no name that pickle could look up, so an object says
instead from which two classes it was made. Read by `quant.integers` and `quant.training`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_made: dict[tuple[type, type], type] = {}


class Replaced(nn.Module):
    """Base of the classes that are mixed in before a layer's own."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, type(self).__bases__, self.__dict__


def has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer or convolution computes otherwise than torch's or transformers' class,
    as layers with adapters do: another `forward` would leave that out."""
    definer = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    plain = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return "forward" in vars(module) or not (definer in plain or definer.__name__ == "Conv1D")


def combined(mixin: type, plain: type) -> type:
    """The subclass of both, always the same one; named as `plain` unless `named` gave another."""
    if (mixin, plain) not in _made:
        _made[mixin, plain] = type(plain.__name__, (mixin, plain), {})
    return _made[mixin, plain]


def named(cls: type) -> type:
    """A decorator: this class is what `combined` returns for its two bases."""
    mixin, plain = cls.__bases__
    _made[mixin, plain] = cls
    return cls


def _empty(mixin: type, plain: type) -> nn.Module:
    cls: Any = combined(mixin, plain)
    return cls.__new__(cls)
