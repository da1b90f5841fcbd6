"""What a quantised model rounds, in a graph: QuantizeLinear, DequantizeLinear and Clip (Q1).

    activation   Clip to the scheme's range, QuantizeLinear, DequantizeLinear
    weight       integer constant, DequantizeLinear

The Clip is what makes the pair exactly ours: a container has room for codes that the scheme does
not have, such as -128. Weights up to 8 bits are int8, activations uint8 whose code 128 is 0, the
form in which ONNX Runtime multiplies; above 8 bits both are int16. Asymmetric ones are uint8 and
uint16 with a zero point. A static range is a constant.
A dynamic one is computed in the graph, from the tensor as in our simulation; 8-bit asymmetric ones
are DynamicQuantizeLinear, whose definition they share. Read by `decoder.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.export.graphs.nodes import Graph
from skipless.quant.activations import ActivationQuantizer
from skipless.quant.apply import Quantization
from skipless.quant.fake import quantizer
from skipless.quant.weights import QuantizedWeight


class Rounding:
    """Pairs for the sites and weights of one quantised model; none for one that is not."""

    def __init__(self, graph: Graph, record: Quantization | None) -> None:
        self.graph = graph
        self.sites: dict[str, ActivationQuantizer] = {}
        self.weights: dict[int, QuantizedWeight] = {}
        self._known: dict[tuple, str] = {}
        self._results: dict[str, tuple] = {}
        self._unused: set[str] = set()
        if record is not None:
            check_scheme(record)
            self.sites = {site.site.name: site for site in record.activations}
            self.weights = {id(weight.parameter): weight for weight in record.weights}
            self._unused = set(self.sites)

    def at(self, name: str, value: str) -> str:
        """`value` rounded as the site `name` does, itself where nothing is rounded there."""
        site = self.sites.get(name)
        if site is None:
            return value
        self._unused.discard(name)
        if self._results.get(value) == site.key:
            return value  # a stream without skip is the sublayer's output
        key = (value, site.key)
        if key not in self._known:
            self._known[key] = self._pair(site, value)
            self._results[self._known[key]] = site.key
        return self._known[key]

    def check_used(self) -> None:
        """Every site of the scheme has its pair."""
        assert not self._unused, f"sites without a pair: {sorted(self._unused)}"

    def _pair(self, site: ActivationQuantizer, value: str) -> str:
        graph = self.graph
        kind, zero_code = _activation_container(site.bits, site.symmetric)
        full = site.bits in (8, 16) and not site.symmetric  # the container's codes are the scheme's
        if isinstance(site.clip, str):
            if site.bits == 8 and not site.symmetric:
                outputs = graph.node_many("DynamicQuantizeLinear", 3, value)
                return graph.node("DequantizeLinear", *outputs)
            scale, zero, ends = self._dynamic(site, value, kind, zero_code)
            ends = None if site.symmetric else ends  # |x| <= absmax
        else:
            step, (low, high), _ = quantizer(
                torch.zeros(1), site.bits, site.symmetric, _plain(site.clip), True
            )
            step = step.reshape(())
            scale = graph.constant(step.numpy())
            offset = zero_code if site.symmetric else -int(low)
            zero = graph.constant(np.array(offset, kind))
            ends = tuple(graph.constant((torch.as_tensor(e) * step).float().numpy().reshape(()))
                         for e in (low, high))  # fmt: skip
        if ends is not None and not full:
            value = graph.node("Clip", value, *ends)
        codes = graph.node("QuantizeLinear", value, scale, zero)
        return graph.node("DequantizeLinear", codes, scale, zero)

    def _dynamic(
        self, site: ActivationQuantizer, value: str, kind: type, zero_code: int
    ) -> tuple[str, str, tuple[str, str] | None]:
        """(scale, zero point, ends of the range) of this very tensor."""
        graph, tiny = self.graph, float(np.finfo(np.float32).tiny)
        levels = 2 ** (site.bits - 1) - 1 if site.symmetric else 2**site.bits - 1
        many = graph.constant(float(levels))
        if site.symmetric:
            largest = graph.node("ReduceMax", graph.node("Abs", value), keepdims=0)
            largest = graph.node("Max", largest, graph.constant(tiny * levels))
            zero = graph.constant(np.array(zero_code, kind))
            return graph.node("Div", largest, many), zero, None
        nothing = graph.constant(0.0)
        low = graph.node("Min", graph.node("ReduceMin", value, keepdims=0), nothing)
        high = graph.node("Max", graph.node("ReduceMax", value, keepdims=0), nothing)
        step = graph.node("Sub", graph.node("Div", high, many), graph.node("Div", low, many))
        step = graph.node("Max", step, graph.constant(tiny))
        offset = graph.node("Round", graph.node("Div", graph.node("Neg", low), step))
        ends = (
            graph.node("Mul", graph.node("Neg", offset), step),
            graph.node("Mul", graph.node("Sub", many, offset), step),
        )
        return step, graph.cast(offset, np.dtype(kind).name.upper()), ends

    def matrix(self, name: str, module: nn.Module) -> str:
        """The weight [in, out] of a linear layer, for MatMul.

        A pair right before MatMul is what ONNX Runtime turns into a product of bytes. It must not
        stand there for wider activations, which it would round to 8 bits by blocks
        (MatMulNBits), nor for weights in groups, which it cannot run then (1.32): these are
        stored [out, in], in groups of a whole row if need be, and turned behind the pair.
        """
        graph, parameter = self.graph, module.get_parameter("weight")
        weight = self.weights.get(id(parameter))
        if weight is None:
            return graph.constant(_numpy(parameter).T, f"{name}.weight")
        codes, scale, zero, group = stored(weight)
        names = [f"{name}.weight", f"{name}.weight_scale", f"{name}.weight_zero_point"]
        site = self.sites.get(f"{name}:input")
        if group is not None or site is None or site.bits > 8 or codes.itemsize > 1:
            codes = codes.reshape(len(codes), -1)
            size = group or codes.shape[1]
            ends = [np.broadcast_to(part.reshape(part.shape[0] if part.ndim else 1, -1),
                                    (len(codes), codes.shape[1] // size))
                    for part in (scale, zero)]  # fmt: skip
            given = [graph.constant(part, n) for part, n in zip((codes, *ends), names, strict=True)]
            value = graph.node("DequantizeLinear", *given, axis=1, block_size=size)
            return graph.node("Transpose", value, perm=[1, 0])
        shape = (-1,) if scale.ndim else ()
        parts = (codes.T, scale.reshape(shape), zero.reshape(shape))
        given = [graph.constant(part, n) for part, n in zip(parts, names, strict=True)]
        return graph.node("DequantizeLinear", *given, **({"axis": 1} if shape else {}))

    def rows(self, name: str, module: nn.Module, ids: str) -> str:
        """Rows [..., D] of a table of embeddings by their ids."""
        graph, parameter = self.graph, module.get_parameter("weight")
        weight = self.weights.get(id(parameter))
        if weight is None:
            return graph.node("Gather", graph.constant(_numpy(parameter), f"{name}.weight"), ids)
        codes, scale, zero, group = stored(weight)
        shape = (len(codes), -1, group) if group is not None else (len(codes), 1, codes[0].size)
        table = graph.constant(codes.reshape(shape), f"{name}.table")  # [V, groups, n]
        value = graph.cast(graph.node("Gather", table, ids), "FLOAT")
        for what, part, op in (("zero_point", zero, "Sub"), ("scale", scale, "Mul")):
            if not part.any():
                continue
            own = part.astype(np.float32).reshape((-1, 1, 1) if part.ndim < 3 else part.shape)
            own = graph.constant(own if part.ndim else own.reshape(1), f"{name}.table_{what}")
            value = graph.node(op, value, graph.node("Gather", own, ids) if part.ndim else own)
        return graph.node("Reshape", value, graph.constant([0, 0, parameter.shape[1]]))


def linear(graph: Graph, rounding: Rounding, name: str, module: nn.Linear, x: str) -> str:
    """x W^T, with the pairs of its input and weight."""
    x = rounding.at(f"{name}:input", x)
    out = graph.node("MatMul", x, rounding.matrix(name, module))
    return rounding.at(f"{name}:output", out)


def check_scheme(record: Quantization) -> None:
    """Raise UserError for what a pair of nodes does not say, with the nearest that it does."""
    if record.state.mode != "quantize":
        raise UserError("the model is in full precision for now; leave the paused block first")
    if record.inputs:
        raise UserError(
            f"the method {record.method!r} changes the inputs of {next(iter(record.inputs))} when "
            "the model runs, which no quantised node does; quantise by 'rtn' or 'gptq'"
        )
    for site in record.activations:
        if site.granularity == "token" and isinstance(site.clip, str):
            raise UserError(
                f"{record.scheme} has a scale for each token, and QuantizeLinear one for a tensor "
                "[batch, tokens, channels]; leave out -a:token, or take -static"
            )
        if isinstance(site.clip, str) and site.clip != "absmax":
            raise UserError(
                f"{record.scheme} looks for the range of each tensor by {site.clip!r}, which a "
                "graph would do slowly; take -static, which looks for it once, or leave -clip out"
            )


def stored(
    weight: QuantizedWeight,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int | None]:
    """(codes [out, in] or [out, groups, n], scale, zero point, group size) as they are stored."""
    codes, scale = (part.cpu() for part in weight.codes())
    group = weight.scheme.group_size
    kind = _weight_container(weight.scheme.weight_bits, weight.scheme.symmetric)
    if weight.scheme.symmetric:
        # said although 0 is the default: turning int8 into uint8, as `session.x64quantprecision`
        # asks for, ONNX Runtime (1.32) takes the default for a scalar, which then does not fit
        zero = np.zeros(tuple(scale.shape), kind)
        return codes.numpy().astype(kind), _numpy(scale), zero, group
    # Codes come with the zero point taken off; any that makes the smallest one fit will do.
    smallest = codes.amin() if scale.dim() == 0 else codes.amin(-1, keepdim=True)
    zero = -smallest.clamp(max=0)
    whole = (codes + zero).numpy().astype(kind)
    return whole, _numpy(scale), zero.numpy().astype(kind), group


def _weight_container(bits: int, symmetric: bool) -> type:
    if symmetric:
        return np.int8 if bits <= 8 else np.int16
    return np.uint8 if bits <= 8 else np.uint16


def _activation_container(bits: int, symmetric: bool) -> tuple[type, int]:
    """(type, code of 0) for activations."""
    if bits <= 8:
        return np.uint8, 128
    return (np.int16, 0) if symmetric else (np.uint16, 0)


def _plain(clip: Any) -> Any:
    """A range from calibration, without gradients and on the CPU."""
    if isinstance(clip, tuple):
        return tuple(_plain(end) for end in clip)
    return clip.detach().cpu() if isinstance(clip, Tensor) else clip


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().numpy()
