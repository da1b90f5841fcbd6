"""What a method does to a model besides rounding, in a form that can be undone.

`Changes` holds the original tensors of parameters that were scaled or rotated; `InputChange` is the
hook by which layers get x / s or x R instead of x. Read by `transforms.session` and `quant.apply`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import uncompiled
from skipless.errors import UserError
from skipless.quant.replacing import moved, replace_input


class Changes:
    """Parameters that were replaced, with what they were."""

    def __init__(self) -> None:
        self.originals: list[tuple[nn.Parameter, Tensor]] = []

    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Put `value` in place, in the parameter's dtype; the first original is kept.

        Raises UserError where the dtype cannot hold it.
        """
        value = value.to(parameter.device, parameter.dtype)
        if not bool(torch.isfinite(value).all()):
            raise UserError(
                f"a weight leaves the range of {parameter.dtype} when it is scaled or rotated; "
                "convert the model to float32 first"
            )
        if not any(known is parameter for known, _ in self.originals):
            self.originals.append((parameter, parameter.data))
        parameter.data = value.contiguous()

    def undo(self) -> None:
        """Every original tensor back in its place, in what the model was cast to meanwhile."""
        for parameter, original in self.originals:
            parameter.data = original.to(parameter.device, parameter.dtype)
        self.originals.clear()


class Divide:
    """x / s per channel."""

    def __init__(self, factors: Tensor) -> None:
        self.factors = factors

    def __call__(self, x: Tensor) -> Tensor:
        self.factors = moved(self.factors, x)
        return x / self.factors.to(x.dtype)


class InputChange:
    """What the layers of one group get instead of their input; one result shared by all."""

    def __init__(self) -> None:
        self.steps: list[Callable[[Tensor], Tensor]] = []
        self._last: tuple[weakref.ref[Tensor], int, bool, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        traceable = not torch.is_inference(x)
        if self._last is not None and traceable:
            source, version, records_gradient, result = self._last
            usable = records_gradient or not torch.is_grad_enabled()
            if source() is x and version == x._version and usable:
                return result
        result = x
        for step in self.steps:
            result = step(result)
        if traceable:
            self._last = weakref.ref(x), x._version, torch.is_grad_enabled(), result
        return result

    @uncompiled
    def hook(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        """A forward pre-hook with keyword arguments."""
        return replace_input(args, kwargs, self)

    def forget(self, *_: Any) -> None:
        """Let go of the last tensor."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}
