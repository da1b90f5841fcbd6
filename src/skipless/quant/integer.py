"""Integer execution: linear layers of a quantised model computed with integers (Q4).

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
no gradient. Convolutions stay simulated, and `describe()` says so. Read by users and
`quant.hardware`'s callers; works on any nn.Module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.apply import Quantization, quantization
from skipless.quant.codes import given_step, site_codes
from skipless.quant.convolutions import is_convolution
from skipless.quant.engines import ENGINES, KernelEngine, Prepared, Problem
from skipless.quant.fake import simulate
from skipless.quant.hardware import pick
from skipless.quant.kvcache import pack_cache, unpack_cache
from skipless.quant.scheme import Scheme
from skipless.quant.subclasses import Replaced, combined, named
from skipless.quant.weights import QuantizedWeight
from skipless.sites import bias_of, is_linear

_STATE = "_skipless_integer"
_ON_INTEGERS = "on integers: "


@dataclass(kw_only=True)
class _Integer:
    """What an integer layer carries besides its parameters."""

    engine: str
    prepared: Prepared
    quantizer: ActivationQuantizer
    weight: QuantizedWeight
    device: str
    plain_class: type
    sharing: _Sharing
    alone: bool = False
    """Nobody else wanted the codes this layer made, so that they can stay inside one C++ call."""


@dataclass
class _Sharing:
    """Whose codes were made last in this model, and whether another layer used them."""

    maker: _Integer | None = None
    used: bool = False

    def made_by(self, maker: _Integer) -> None:
        if self.maker is not None and not self.used:
            self.maker.alone = True
        self.maker, self.used = maker, False


class _IntegerForward(Replaced):
    """Mixed in before the layer's own class."""

    def forward(self, x: Tensor) -> Tensor:
        own: _Integer = getattr(self, _STATE)
        site = own.quantizer
        if site.state.mode != "quantize":  # the hook did what there was to do
            return super().forward(x)
        if self.training and torch.is_grad_enabled():
            result, scale = simulate(x, site.bits, site.granularity, True, site.clip)
            if isinstance(site.clip, str):
                site.state.note_scale(site.site.name, scale)
            return super().forward(result)
        _check_input(own, x)
        own.weight.check_unchanged()
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], own.prepared.problem.out_features)
        with torch.no_grad():
            bias = bias_of(self)
            bias = None if bias is None else bias.detach().float()
            out = _fused(own, x, bias) if own.alone else None
            if out is None:
                codes, scale = _shared_codes(own, x)
                out = ENGINES[own.engine].linear(own.prepared, codes, scale, bias)
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        own: _Integer = getattr(self, _STATE)
        problem = own.prepared.problem
        text = super().extra_repr()
        widths = f"W{problem.weight_bits}A{problem.activation_bits}"
        return f"{text}{', ' if text else ''}{widths}, engine={own.engine}"


@named
class IntegerLinear(_IntegerForward, nn.Linear):
    """An nn.Linear computed with integers; made by `to_integer`, not by hand."""


def to_integer(model: nn.Module, engine: str | None = None) -> nn.Module:
    """Compute the quantised linear layers of `model` with integers, in place; returns it.

    `engine` is a name in `engines.ENGINES`; by default the fastest exact one for each layer
    (`hardware.pick`). The model has to be quantised by `quantize` with integer activations,
    symmetric, weights per tensor or channel. Where keys and values are quantised, caches of our
    models then hold packed integers (`kvcache`). Raises UserError, leaving the model as it was, for
    anything else, for weights changed since, and when an engine refuses.
    """
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; call quantize(model, scheme) first")
    kernels = {id(m.weight): name for name, m in model.named_modules() if is_convolution(m)}
    simulated = [kernels[id(w.parameter)] for w in record.weights if id(w.parameter) in kernels]
    executed = [weight for weight in record.weights if id(weight.parameter) not in kernels]
    for scheme in dict.fromkeys(weight.scheme for weight in executed):
        _check_scheme(scheme)
    if integer_layers(model):
        raise UserError("the model runs on integers already; call from_integer(model) first")
    if record.state.mode != "quantize":
        raise UserError("the model is in full precision for now; leave the paused block first")
    layers = _find_layers(model, record)
    if not layers:
        raise UserError(
            f"no linear layer of {type(model).__name__} has both a quantised weight and a "
            f"quantised input ({record.describe()}), so nothing would run on integers"
        )
    weights = {id(weight.parameter): weight for weight in record.weights}
    made: list[tuple[nn.Module, _Integer]] = []
    sharing = _Sharing()
    for module, site in layers:
        weight = weights[id(module.weight)]
        weight.check_unchanged()
        own = _prepare(module, weight, site, engine, sharing)
        made.append((module, own))
    for module, own in made:
        setattr(module, _STATE, own)
        module.__class__ = combined(_IntegerForward, own.plain_class)
        own.quantizer.is_integer = True
        record.handles.append(_Handle(module))
    if simulated:
        more = f" and {len(simulated) - 3} more" if len(simulated) > 3 else ""
        record.notes.append(
            f"{_ON_INTEGERS}convolutions {', '.join(simulated[:3])}{more} simulated"
        )
    pack_cache(model)
    return model


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
        name: getattr(module, _STATE).engine
        for name, module in model.named_modules()
        if isinstance(module, _IntegerForward)
    }


def _check_input(own: _Integer, x: Tensor) -> None:
    """UserError for what the packed weight cannot be multiplied with; no engine looks itself."""
    name, width = own.quantizer.site.module, own.prepared.problem.in_features
    if x.device.type != own.device:
        raise UserError(
            f"the integer weights of {name} are on {own.device} and the input on {x.device}; call "
            "from_integer(model), move the model, then to_integer(model)"
        )
    if not x.is_floating_point():
        raise UserError(f"{name} was given {x.dtype}; give floating-point values, as x.float()")
    if x.shape[-1:] != (width,):
        raise UserError(
            f"{name} takes {width} inputs and was given {list(x.shape)}, whose last dimension "
            "differs; give it the tensor that the model was made for"
        )


def _fused(own: _Integer, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The layer's output in one C++ call, or None where that does not apply."""
    engine, site = ENGINES[own.engine], own.quantizer
    given = not isinstance(site.clip, str)
    if not isinstance(engine, KernelEngine) or x.dtype != torch.float32:
        return None
    if not (given or site.clip == "absmax") or site.state.remembered_scale(x, site.key) is not None:
        return None
    rows = x.detach().reshape(-1, x.shape[-1])
    step = given_step(rows, site.bits, site.clip) if given else -1.0
    out, scale = engine.from_floats(own.prepared, rows, site.granularity == "token", step, bias)
    if not given:
        site.state.note_scale(site.site.name, scale)
    return out


def _shared_codes(own: _Integer, x: Tensor) -> tuple[Tensor, Tensor]:
    """`site_codes`, noting whether layers that read the same tensor come after one another."""
    site = own.quantizer
    if (known := site.state.remembered_codes(x, site.key)) is not None:
        own.sharing.used = True
        return known
    own.sharing.made_by(own)
    return site_codes(site, x)


def integer_state(module: nn.Module) -> _Integer | None:
    """What an integer layer carries: its engine, packed weight and quantiser; None for others."""
    return getattr(module, _STATE, None)


def _prepare(
    module: nn.Module,
    weight: QuantizedWeight,
    site: ActivationQuantizer,
    engine: str | None,
    sharing: _Sharing,
) -> _Integer:
    codes, scale = weight.codes()
    out_features, in_features = codes.shape
    problem = Problem(
        weight_bits=weight.scheme.weight_bits, activation_bits=site.bits, in_features=in_features,
        out_features=out_features, device=codes.device.type,
    )  # fmt: skip
    try:
        chosen = pick(problem, engine)
    except UserError as error:
        raise UserError(f"{site.site.module}: {error}") from None
    scale = scale.float().reshape(-1).expand(out_features)
    return _Integer(
        engine=chosen.name, prepared=chosen.prepare(codes.to(torch.int16), scale, problem),
        quantizer=site, weight=weight, device=problem.device, plain_class=type(module),
        sharing=sharing,
    )  # fmt: skip


def _find_layers(
    model: nn.Module, record: Quantization
) -> list[tuple[nn.Module, ActivationQuantizer]]:
    quantised = {id(weight.parameter) for weight in record.weights}
    found = []
    for site in record.activations:
        if site.site.kind == "linear_input" and site.site.direction == "input":
            module = model.get_submodule(site.site.module)
            if is_linear(module) and id(module.weight) in quantised:
                found.append((module, site))
    return found


def _check_scheme(scheme: Scheme) -> None:
    if scheme.activation_bits is None:
        problem = f"{scheme} keeps activations in floating point"
    elif not scheme.symmetric:
        problem = f"{scheme} has zero points"
    elif scheme.weight_granularity not in ("tensor", "channel"):
        problem = f"{scheme} has several scales in one sum"
    else:
        return
    raise UserError(
        f"{problem}, which integer execution does not cover; use a symmetric W<b>A<b> scheme with "
        "weights per tensor or channel"
    )


def needs_integer(handle: object) -> bool:
    """Whether a handle of `quantize` is undone together with integer execution."""
    return getattr(handle, "needs_integer", False)


class _Handle:
    """Among the hooks' handles, so that `restore` removes integer execution with them."""

    needs_integer = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def remove(self) -> None:
        own: _Integer = getattr(self.module, _STATE)
        self.module.__class__ = own.plain_class
        own.quantizer.is_integer = False
        delattr(self.module, _STATE)
