"""Layers that compute with integers in their place: what they carry, and their `forward` (Q4).

A linear layer multiplies the codes of its input [..., in] with those of its weight; convolutions
are in `convolving`. Made by `integers.layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipless.compiled import uncompiled
from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.fake import Codes, simulate
from skipless.quant.integers.codes import given_step, site_codes
from skipless.quant.integers.engines import ENGINES, Engine, KernelEngine, Prepared, Problem
from skipless.quant.subclasses import Replaced, named
from skipless.quant.weights import QuantizedWeight
from skipless.sites import bias_of

STATE = "_skipless_integer"


@dataclass(kw_only=True)
class Executed:
    """What an integer layer carries besides its parameters."""

    engine: str
    products: tuple[Prepared, ...]
    """One; of a convolution in groups one for every few groups."""
    quantizer: ActivationQuantizer
    weight: QuantizedWeight
    device: str
    plain_class: type
    sharing: Sharing
    alone: bool = False
    """Nobody else wanted the codes this layer made, so that they can stay inside one C++ call."""
    panels: tuple[str, Prepared] | None = None
    """For fused steps, if they run by another engine than `engine`: that one, and its weight."""

    @property
    def prepared(self) -> Prepared:
        """The weight of the first product."""
        return self.products[0]


def packed(engine: Engine, weight: Codes, problem: Problem) -> Prepared:
    """Weight codes [out, in], with one scale or one a row, as `engine` wants them."""
    scale = weight.scale.float().reshape(-1).expand(problem.out_features)
    return engine.prepare(weight.codes.to(torch.int16), scale, problem)


def in_panels(own: Executed, name: str) -> tuple[KernelEngine, Prepared]:
    """The C++ engine called `name` and the layer's weight packed for it, what fused steps read.

    Where another engine runs the layer, the weight is packed once more beside it. Raises UserError
    if that engine does not compute this product exactly.
    """
    kernel = ENGINES[name]
    assert isinstance(kernel, KernelEngine), "`engine_of_steps` chose it"
    if own.engine == name:
        return kernel, own.prepared
    if own.panels is None or own.panels[0] != name:
        own.weight.check_unchanged()
        own.panels = name, packed(kernel, own.weight.codes(), own.prepared.problem)
    return kernel, own.panels[1]


@dataclass
class Sharing:
    """Whose codes were made last in this model, and whether another layer used them."""

    maker: Executed | None = None
    used: bool = False

    def made_by(self, maker: Executed) -> None:
        if self.maker is not None and not self.used:
            self.maker.alone = True
        self.maker, self.used = maker, False


class Executing(Replaced):
    """Base of all, by which such layers are known."""

    def extra_repr(self) -> str:
        own: Executed = getattr(self, STATE)
        problem = own.prepared.problem
        text = super().extra_repr()
        widths = f"W{problem.weight_bits}A{problem.activation_bits}"
        return f"{text}{', ' if text else ''}{widths}, engine={own.engine}"


class IntegerForward(Executing):
    """Mixed in before a linear layer's own class."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        x = input  # torch's name, by which models may pass it
        own: Executed = getattr(self, STATE)
        site = own.quantizer
        if site.state.mode != "quantize":  # the hook did what there was to do
            return super().forward(x)
        if self.training and torch.is_grad_enabled():
            return super().forward(straight_through(site, x))
        _check_input(own, x)
        own.weight.check_unchanged()
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], own.prepared.problem.out_features)
        with torch.no_grad():
            bias = float_bias(self)
            out = _fused(own, x, bias) if own.alone else None
            if out is None:
                codes, scale = _shared_codes(own, x)
                out = ENGINES[own.engine].linear(own.prepared, codes, scale, bias)
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


@named
class IntegerLinear(IntegerForward, nn.Linear):
    """An nn.Linear computed with integers; made by `to_integer`, not by hand."""


def float_bias(layer: nn.Module) -> Tensor | None:
    """The layer's bias in float32, without gradient."""
    bias = bias_of(layer)
    return None if bias is None else bias.detach().float()


def straight_through(site: ActivationQuantizer, x: Tensor) -> Tensor:
    """The simulation of a site's tensor, whose gradient goes through the rounding (Q3)."""
    result, scale = simulate(x, site.bits, site.granularity, True, site.clip)
    if isinstance(site.clip, str):
        site.state.note_scale(site.site.name, scale)
    return result


def _check_input(own: Executed, x: Tensor) -> None:
    """UserError for what the packed weight cannot be multiplied with; no engine looks itself."""
    check_kind(own, x)
    name, width = own.quantizer.site.module, own.prepared.problem.in_features
    if x.shape[-1:] != (width,):
        raise UserError(
            f"{name} takes {width} inputs and was given {list(x.shape)}, whose last dimension "
            "differs; give it the tensor that the model was made for"
        )


def check_kind(own: Executed, x: Tensor) -> None:
    """UserError for another device and for integers."""
    name = own.quantizer.site.module
    if x.device.type != own.device:
        raise UserError(
            f"the integer weights of {name} are on {own.device} and the input on {x.device}; call "
            "from_integer(model), move the model, then to_integer(model)"
        )
    if not x.is_floating_point():
        raise UserError(f"{name} was given {x.dtype}; give floating-point values, as x.float()")


def _fused(own: Executed, x: Tensor, bias: Tensor | None) -> Tensor | None:
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


def _shared_codes(own: Executed, x: Tensor) -> tuple[Tensor, Tensor]:
    """`site_codes`, noting whether layers that read the same tensor come after one another."""
    site = own.quantizer
    if site.state.remembered_codes(x, site.key) is None:
        own.sharing.made_by(own)
    else:
        own.sharing.used = True
    return site_codes(site, x)


def integer_state(module: nn.Module) -> Executed | None:
    """What an integer layer carries: its engine, packed weight and quantiser; None for others."""
    return getattr(module, STATE, None)
