"""One new token through attention or an MLP in one C++ call: the arguments of those calls (Q4).

`structures` are filled once for a sublayer from its integer layers; a step then hands over
addresses only. The integers are those of the layers themselves. Knows linear layers, norms as
tensors and numbers, and stores of keys and values; which module is which is the caller's to say
(`skipless.decoding`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.integers import building
from skipless.quant.integers.engines import ENGINES, KernelEngine
from skipless.quant.integers.executing import in_panels
from skipless.quant.integers.hardware import fastest_kernel, probe
from skipless.quant.integers.layers import integer_layers, integer_state
from skipless.quant.integers.structures import (
    ACTIVATIONS,
    NORMS,
    Attention,
    Linear,
    Mlp,
    Norm,
    Rounding,
    Store,
)
from skipless.quant.kvcache import PackedTensor
from skipless.sites import bias_of


@dataclass(kw_only=True)
class Step:
    """A sublayer's structure, the function that reads it, and what keeps its addresses valid."""

    structure: ctypes.Structure
    function: Any
    loaded: Any
    kept: list[Any]
    sites: list[ActivationQuantizer]
    """Whose inputs the bits of the function's result speak of, lowest first."""

    def report(self, bad: int) -> None:
        """Tell the forward state which inputs were not finite."""
        for place, site in enumerate(self.sites):
            if bad >> place & 1:
                site.state.note_scale(site.site.name, torch.tensor(torch.nan, device="cpu"))


class Builder:
    """Fills structures for one C++ engine and keeps what their addresses point to."""

    def __init__(self, engine: str = "") -> None:
        self.kept: list[Any] = []
        self.engine = engine

    def address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach()
        _check_place(tensor)
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            tensor = tensor.float().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()

    def linear(self, module: nn.Module) -> Linear:
        """Of a layer that runs on integers. Raises UserError for another."""
        own = integer_state(module)
        if own is None:
            raise UserError(
                "a fused step needs linear layers that run on integers; call to_integer first"
            )
        (engine, prepared), site = in_panels(own, self.engine), own.quantizer
        form, block = engine.form(prepared)
        self.kept.append(prepared)
        return Linear(
            w=prepared.data.data_ptr(), column_scale=prepared.column_scale.data_ptr(),
            bias=self.address(bias_of(module)), inputs=prepared.problem.in_features,
            groups=prepared.data.shape[1], columns=prepared.problem.out_features, block=block,
            form=form, limit=prepared.problem.largest_activation,
            per_row=int(site.granularity == "token"), step=_step(site),
        )  # fmt: skip

    def norm(self, kind: str, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Norm:
        return Norm(
            weight=self.address(weight), bias=self.address(bias), epsilon=epsilon,
            kind=NORMS[kind],
        )  # fmt: skip

    def done(self, structure: ctypes.Structure, name: str, sites: list) -> Step:
        loaded = building.loaded(self.engine)
        return Step(
            structure=structure, function=getattr(loaded, f"skipless_{name}"), loaded=loaded,
            kept=self.kept, sites=sites,
        )  # fmt: skip


def engine_of_steps(model: nn.Module) -> str:
    """The one C++ engine for all fused steps of a model: that of its layers if they agree, else the
    best that is exact here. Raises UserError without any.

    Layers may differ, since each got the one that was fastest when it was looked for, and packed
    weights are read by their own engine alone.
    """
    names = {name for name in integer_layers(model).values()
             if isinstance(ENGINES[name], KernelEngine)}  # fmt: skip
    if len(names) == 1:
        return names.pop()
    exact = [r.engine for r in probe() if r.usable and isinstance(ENGINES[r.engine], KernelEngine)]
    if not exact:
        raise UserError("a fused step needs a C++ compiler; set CXX to one")
    return exact[0]


def _step(site: ActivationQuantizer) -> float:
    """The fixed step of a site's codes, -1 for one from each input's absmax."""
    if isinstance(site.clip, str):
        if site.clip != "absmax":
            raise UserError(
                f"{site.site.name} takes its range by {site.clip}, which a fused step does not; "
                "use absmax or -static"
            )
        return -1.0
    if isinstance(site.clip, tuple):
        raise UserError(f"{site.site.name} has a zero point, which a fused step does not know")
    limit = 2 ** (site.bits - 1) - 1
    # as `fake.quantizer` computes it
    clip = torch.as_tensor(site.clip, dtype=torch.float32, device="cpu")
    return float(clip.clamp_min(torch.finfo(torch.float32).tiny * limit) / limit)


def _rounding(site: ActivationQuantizer | None) -> Rounding:
    if site is None:
        return Rounding(kind=0, limit=0, per_head=0, step=-1.0)
    packed = PackedTensor(site.bits, symmetric=site.symmetric)
    if packed.dtype != torch.int8:
        raise UserError(f"{site.site.name} is kept in more than 8 bits, which no fused step reads")
    return Rounding(
        kind=2 if packed.nibbles else 1, limit=2 ** (site.bits - 1) - 1,
        per_head=int(site.granularity == "token"), step=_step(site),
    )  # fmt: skip


def attention_step(
    engine: str,
    norm: tuple[str, Tensor | None, Tensor | None, float],
    projections: tuple[nn.Module, nn.Module, nn.Module, nn.Module],
    heads: tuple[int, int, int],
    head_scale: Tensor,
    identity_bias: Tensor | None,
    key: ActivationQuantizer | None,
    value: ActivationQuantizer | None,
) -> Step:
    """The step of an attention sublayer.

    `engine` of `engine_of_steps`; `norm` kind, gain, bias, epsilon; `projections` q, k, v, o;
    `heads` H, G, K; `head_scale` [H] multiplies the logits; `key` and `value` quantise the cache,
    None keeps float32. Raises UserError, leaving everything alone, for what no step covers.
    """
    make = Builder(engine)
    q, k, v, o = (make.linear(module) for module in projections)
    structure = Attention(
        norm=make.norm(*norm), q=q, k=k, v=v, o=o, key=_rounding(key), value=_rounding(value),
        heads=heads[0], groups=heads[1], size=heads[2], head_scale=make.address(head_scale),
        identity_bias=make.address(identity_bias),
    )  # fmt: skip
    first, last = (_site(projections[i]) for i in (0, 3))
    return make.done(structure, "attention_step", [first, key or first, value or first, last])


def mlp_step(
    engine: str,
    norm: tuple[str, Tensor | None, Tensor | None, float],
    gate: nn.Module | None,
    up: nn.Module,
    down: nn.Module,
    activation: str,
) -> Step:
    """The step of an MLP sublayer; arguments as in `attention_step`."""
    make = Builder(engine)
    structure = Mlp(
        norm=make.norm(*norm), gate=make.linear(gate) if gate is not None else Linear(),
        up=make.linear(up), down=make.linear(down), activation=ACTIVATIONS[activation],
    )  # fmt: skip
    return make.done(structure, "mlp_step", [_site(up), _site(down)])


def _site(module: nn.Module) -> ActivationQuantizer:
    own = integer_state(module)
    assert own is not None, "`linear` has looked"
    return own.quantizer


def store_of(tensor: Tensor, scales: Tensor | None) -> Store:
    """Where a step finds keys or values [B, G, capacity, ...] and their scales. Raises UserError
    for those of another device."""
    _check_place(tensor)
    return Store(
        codes=tensor.data_ptr(), scales=None if scales is None else scales.data_ptr(),
        capacity=tensor.shape[2],
    )  # fmt: skip


def _check_place(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UserError(
            f"a fused step reads memory of the CPU, and a part of the model or of its cache is on "
            f"{tensor.device}; move all of it with .cpu(), or unfuse(model)"
        )


def run_attention(
    step: Step, x: Tensor, tables: tuple[Tensor, Tensor] | None, stores: tuple, past: int
) -> Tensor:
    """The branch [B, 1, D] of contiguous float32 `x` [B, 1, D]; keys and values are stored."""
    out = torch.empty_like(x)
    cosine, sine = (None, None) if tables is None else (t.data_ptr() for t in tables)
    bad = step.function(
        ctypes.byref(step.structure), x.data_ptr(), x.shape[0], x.shape[-1], cosine, sine,
        ctypes.byref(stores[0]), ctypes.byref(stores[1]), past, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        step.report(bad)
    return out


def run_mlp(step: Step, x: Tensor) -> Tensor:
    """The branch [B, 1, D] of contiguous float32 `x` [B, 1, D]."""
    out = torch.empty_like(x)
    bad = step.function(
        ctypes.byref(step.structure), x.data_ptr(), x.shape[0], x.shape[-1], out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        step.report(bad)
    return out


def dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x w^T + b of a few float32 rows [..., K] in one C++ call."""
    kernel = fastest_kernel()
    if kernel is None:
        return nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(*x.shape[:-1], len(weight), dtype=torch.float32, device="cpu")
    building.loaded(kernel.name).skipless_dense(
        rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), len(rows),
        rows.shape[1], len(weight), out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out
