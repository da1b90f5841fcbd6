"""The layout of compressed-tensors: which settings say the same as a scheme of ours.

A group of modules for each format that occurs, targets by name. Weights lose nothing: codes and
scales are stored as they are. Of dynamic activations the layout says width and granularity, and the
reading program takes its own range (its symmetric scale is absmax / (2^b - 1) * 2), so that
activations agree to rounding, not bit for bit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from skipless.errors import UserError
from skipless.heads import find_heads
from skipless.quant import quantization
from skipless.scheme import Scheme
from skipless.sites import is_linear

_STRATEGIES = {"tensor": "tensor", "channel": "channel", "token": "token"}


def settings_of(model: nn.Module) -> tuple[dict[str, Any], str]:
    """(`quantization_config`, form of the weights for `quant.bits`) of a quantised model.

    Raises UserError for what the layout has no words for.
    """
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; call quantize(model, scheme) first")
    if record.scope != "linear" or record.include_head or record.include_convolutions:
        raise UserError(
            "the layout compressed-tensors knows the inputs of linear layers only; quantise in "
            "scope 'linear' without head and convolutions, or use the layout skipless"
        )
    groups: dict[Scheme, list[str]] = {}
    for weight in record.weights:
        name = weight.name.removesuffix(".weight")
        if weight.transposed:
            raise UserError(
                f"{name} is a Conv1D, which the layout compressed-tensors does not know; use the "
                "layout skipless"
            )
        groups.setdefault(_checked(weight.scheme), []).append(name)
    form = "int-quantized" if all(_is_int8(scheme) for scheme in groups) else "pack-quantized"
    quantised = {name for names in groups.values() for name in names}
    heads = find_heads(model)
    ignored = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and name not in quantised
    ]
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": names, "format": form, "weights": _weights(scheme),
                "input_activations": _activations(scheme), "output_activations": None,
            }
            for index, (scheme, names) in enumerate(groups.items())
        },
        "ignore": sorted({*ignored, *heads}), "kv_cache_scheme": None,
    }, form  # fmt: skip


def _is_int8(scheme: Scheme) -> bool:
    return scheme.weight_bits == 8 and scheme.activation_bits == 8


def _checked(scheme: Scheme) -> Scheme:
    if scheme.weight_bits > 8:
        problem = f"holds weights of at most 8 bits, not {scheme.weight_bits}"
    elif not scheme.symmetric:
        problem = "is written for symmetric schemes only"
    elif not scheme.dynamic:
        problem = "is written for dynamic activation ranges only"
    elif scheme.kv_bits is not None or scheme.probability_bits is not None:
        problem = "is written without keys, values and probabilities"
    else:
        return scheme
    raise UserError(f"{scheme}: the layout compressed-tensors {problem}; use the layout skipless")


def _weights(scheme: Scheme) -> dict[str, Any]:
    strategy = _STRATEGIES.get(scheme.weight_granularity, "group")
    return {
        "num_bits": scheme.weight_bits, "type": "int", "symmetric": True, "strategy": strategy,
        "group_size": scheme.group_size, "dynamic": False,
    }  # fmt: skip


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activation_bits is None:
        return None
    return {
        "num_bits": scheme.activation_bits, "type": "int", "symmetric": True, "dynamic": True,
        "strategy": _STRATEGIES[scheme.activation_granularity], "observer": None,
    }  # fmt: skip
