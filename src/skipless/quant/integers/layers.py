"""Integer execution: layers of a quantised model computed with integers (Q4).

    quantize(model, "W8A12")          # simulated: rounded values in floating point
    to_integer(model)                 # executed: int16 codes x int8 codes, exact sums
    from_integer(model)               # simulated again; restore(model) undoes both

1. codes of the activation and its scale, one for the tensor or one a token
2. an engine's exact integer sums with the weight's codes, packed once
3. y = (s_a s_w) sum + b in float32, then the layer's dtype

Every engine gives the same bits; `engine="float"` is Q4's evaluation-mode simulation. The hooks of
`quantize` alone multiply rounded floats, which differs from the exact sum in the last float32
digits, as does a network that such a difference tips over a rounding border later on.

A layer keeps its place, its class's name, weight, bias, hooks and state_dict; its class becomes a
subclass with another `forward`. `paused` and `measured` compute in floating point as before; so
does a layer in training mode while gradients are recorded, straight through. Integer outputs carry
no gradient. Convolutions whose scheme is not covered, and layers with a `forward` of their own,
stay simulated, and `describe()` says so.
Works on any nn.Module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from skipless.compiled import lasting, unwrapped
from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.apply import Quantization, quantization, quantized
from skipless.quant.convolutions import is_convolution
from skipless.quant.integers.convolving import IntegerKernel, by_groups
from skipless.quant.integers.engines import Problem
from skipless.quant.integers.executing import (
    STATE,
    Executed,
    Executing,
    IntegerForward,
    IntegerLinear,
    Sharing,
    integer_state,
    packed,
)
from skipless.quant.integers.hardware import pick
from skipless.quant.kvcache import pack_cache, unpack_cache
from skipless.quant.subclasses import combined, has_own_forward
from skipless.quant.weights import QuantizedWeight
from skipless.scheme import Scheme
from skipless.sites import is_linear

__all__ = [
    "IntegerLinear",
    "executed",
    "from_integer",
    "integer_layers",
    "integer_state",
    "needs_integer",
    "to_integer",
]

_ON_INTEGERS = "on integers: "


@lasting
def to_integer(model: nn.Module, engine: str | None = None) -> nn.Module:
    """Compute the quantised layers of `model` with integers, in place; returns it.

    `engine` is a name in `engines.ENGINES`; by default the fastest exact one for each layer
    (`hardware.pick`). The model has to be quantised by `quantize` with integer activations,
    symmetric, weights per tensor or channel. Where keys and values are quantised, caches of our
    models then hold packed integers (`kvcache`). Raises UserError, leaving the model as it was, for
    anything else, for weights changed since, and when an engine refuses.
    """
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; call quantize(model, scheme) first")
    layers, simulated = _find_layers(model, record)
    kernels = {id(m.weight) for m in model.modules() if is_convolution(m)}
    executed = [weight for weight in record.weights if id(weight.parameter) not in kernels]
    for scheme in dict.fromkeys(weight.scheme for weight in executed):
        if reason := _refusal(scheme):
            raise UserError(
                f"{reason}, which integer execution does not cover; use a symmetric W<b>A<b> "
                "scheme with weights per tensor or channel"
            )
    if integer_layers(model):
        raise UserError("the model runs on integers already; call from_integer(model) first")
    if record.state.mode != "quantize":
        raise UserError("the model is in full precision for now; leave the paused block first")
    if simulated and not layers:
        raise UserError(
            f"{simulated[0]} has a scheme or a forward of its own that integers do not cover, and "
            f"{type(model).__name__} has no other layer, so nothing would run on integers"
        )
    if not layers:
        raise UserError(
            f"no layer of {type(model).__name__} has both a quantised weight and a "
            f"quantised input ({record.describe()}), so nothing would run on integers"
        )
    weights = {id(weight.parameter): weight for weight in record.weights}
    made: list[tuple[nn.Module, Executed]] = []
    sharing = Sharing()
    for module, site in layers:
        weight = weights[id(module.weight)]
        weight.check_unchanged()
        own = _prepare(module, weight, site, engine, sharing)
        made.append((module, own))
    for module, own in made:
        setattr(module, STATE, own)
        module.__class__ = combined(
            IntegerKernel if is_convolution(module) else IntegerForward, own.plain_class
        )
        own.quantizer.is_integer = True
        record.handles.append(_Handle(module))
    if simulated:
        more = f" and {len(simulated) - 3} more" if len(simulated) > 3 else ""
        record.notes.append(
            f"{_ON_INTEGERS}all but {', '.join(simulated[:3])}{more}, which stay simulated"
        )
    pack_cache(model)
    return model


@contextmanager
def executed(
    model: nn.Module, scheme: Scheme | str, scope: str = "linear", **options: Any
) -> Iterator[str]:
    """`quantized`, on integers where these cover the scheme: what a measurement should run.

    Yields "" on integers, else the sentence that says why the model is simulated. Raises as
    `quantize` does.
    """
    with quantized(model, scheme, scope, **options):
        reason = ""
        try:
            inspect.unwrap(to_integer)(unwrapped(model))  # compiled code is kept, as there
        except UserError as error:
            reason = str(error)
        yield reason


@lasting
def from_integer(model: nn.Module) -> nn.Module:
    """Back to the simulation by hooks. Raises UserError if no layer runs on integers."""
    record = quantization(model)
    handles = [h for h in record.handles if needs_integer(h)] if record else []
    if record is None or not handles:
        raise UserError("the model does not run on integers; there is nothing to undo")
    for handle in handles:
        handle.remove()
        record.handles.remove(handle)
    record.notes[:] = [note for note in record.notes if not note.startswith(_ON_INTEGERS)]
    unpack_cache(model)
    return model


def integer_layers(model: nn.Module) -> dict[str, str]:
    """{name of a layer: its engine} for the layers that run on integers."""
    return {
        name: getattr(module, STATE).engine
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, Executing)
    }


def _prepare(
    module: nn.Module,
    weight: QuantizedWeight,
    site: ActivationQuantizer,
    engine: str | None,
    sharing: Sharing,
) -> Executed:
    parts = by_groups(weight.codes(), getattr(module, "groups", 1))
    out_features, in_features = parts[0].codes.shape
    problem = Problem(
        weight_bits=weight.scheme.weight_bits, activation_bits=site.bits, in_features=in_features,
        out_features=out_features, device=parts[0].codes.device.type,
    )  # fmt: skip
    try:
        chosen = pick(problem, engine)
    except UserError as error:
        raise UserError(f"{site.site.module}: {error}") from None
    return Executed(
        engine=chosen.name, quantizer=site,
        products=tuple(packed(chosen, part, problem) for part in parts),
        weight=weight, device=problem.device, plain_class=type(module), sharing=sharing,
    )  # fmt: skip


def _find_layers(
    model: nn.Module, record: Quantization
) -> tuple[list[tuple[nn.Module, ActivationQuantizer]], list[str]]:
    """(layers to execute with the quantisers of their inputs, layers that stay simulated)."""
    weights = {id(weight.parameter): weight for weight in record.weights}
    found, simulated = [], []
    for site in record.activations:
        if site.site.kind != "linear_input" or site.site.direction != "input":
            continue
        module = model.get_submodule(site.site.module)
        is_kernel = is_convolution(module)
        if not (is_kernel or is_linear(module)) or id(module.weight) not in weights:
            continue
        scheme = weights[id(module.weight)].scheme
        if has_own_forward(module) or (is_kernel and _refusal(scheme)):
            simulated.append(site.site.module)
        else:
            found.append((module, site))
    return found, simulated


def _refusal(scheme: Scheme) -> str:
    """Why integer execution does not cover the scheme; "" if it does."""
    if scheme.activation_bits is None:
        return f"{scheme} keeps activations in floating point"
    if not scheme.symmetric:
        return f"{scheme} has zero points"
    if scheme.weight_granularity not in ("tensor", "channel"):
        return f"{scheme} has several scales in one sum"
    return ""


def needs_integer(handle: object) -> bool:
    """Whether a handle of `quantize` is undone together with integer execution."""
    return getattr(handle, "needs_integer", False)


class _Handle:
    """Among the hooks' handles, so that `restore` removes integer execution with them."""

    needs_integer = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def remove(self) -> None:
        own: Executed = getattr(self.module, STATE)
        self.module.__class__ = own.plain_class
        own.quantizer.is_integer = False
        delattr(self.module, STATE)
