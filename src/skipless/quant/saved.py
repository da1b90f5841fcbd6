"""A quantised model as tensors and settings, and back, bit for bit.

    tensors, settings = saved_form(model)       # after quantize(model, ...)
    resume(fresh, tensors, settings)            # another model of the same class, any weights

The tensors are the model's state_dict with every quantised weight as packed codes and scales
(`bits`); the settings, JSON, say scheme, scope, method and static ranges. A resumed model simulates
with the same values and runs on integers with the same codes. The weights before rounding are not
in the file, so that `restore` then leaves the rounded ones, without hooks. Read by
`skipless.export` and `skipless.hf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import unwrapped
from skipless.errors import UserError
from skipless.quant.apply import Quantization, quantization, quantize, restore
from skipless.quant.bits import SUFFIXES, pack_weight, unpack_weight
from skipless.quant.fake import Codes
from skipless.quant.weights import QuantizedWeight
from skipless.scheme import Scheme

METHOD = "skipless"
VERSION = 1
_KINDS = {
    "scheme": str, "scope": str, "include_head": bool, "method": str,
    "layers": list, "weights": dict, "ranges": dict,
}  # fmt: skip


def saved_form(
    model: nn.Module, form: str = "skipless"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, settings) of a quantised model; tied tensors once.

    `form` is one of `bits.FORMS`. Raises UserError for a model that is
    not quantised or is in full precision for now, weights changed since, and for methods whose
    result is more than codes and scales.
    """
    model = unwrapped(model)
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; call quantize(model, scheme) first")
    _check(record)
    packed: dict[str, Tensor] = {}
    weights: dict[str, Any] = {}
    for weight in record.weights:
        stem = weight.name.removesuffix("weight")
        scheme = weight.scheme
        codes = weight.codes()
        parts = pack_weight(codes, scheme.weight_bits, scheme.symmetric, form)
        packed |= {stem + suffix: tensor.contiguous() for suffix, tensor in parts.items()}
        weights[weight.name] = {"bits": scheme.weight_bits}
        if scheme.group_size is not None:
            weights[weight.name]["group_size"] = scheme.group_size
        if weight.transposed:
            weights[weight.name]["transposed"] = True
    skipped = {id(weight.parameter) for weight in record.weights}
    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in skipped or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        tensors[name] = tensor.detach().cpu().contiguous()
    return tensors | packed, _settings(record, weights)


def _settings(record: Quantization, weights: dict[str, Any]) -> dict[str, Any]:
    ranges = {
        site.site.name: [float(end) for end in _ends(site.clip)]
        for site in record.activations
        if not isinstance(site.clip, str)
    }
    layers = {weight.layer for weight in record.weights}
    layers |= {site.site.layer for site in record.activations}
    return {
        "quant_method": METHOD, "version": VERSION, "scheme": str(record.scheme),
        "scope": record.scope, "include_head": record.include_head,
        "include_convolutions": record.include_convolutions, "method": record.method,
        "layers": sorted(layers, key=lambda layer: (layer is None, layer or 0)),
        "weights": weights, "ranges": ranges,
    }  # fmt: skip


def _ends(clip: Any) -> tuple:
    return clip if isinstance(clip, tuple) else (clip,)


def _check(record: Quantization) -> None:
    if record.state.mode != "quantize":
        raise UserError("the model is in full precision for now; leave the paused block first")
    for weight in record.weights:
        weight.check_unchanged()
    if record.inputs:
        some = ", ".join(list(record.inputs)[:3])
        raise UserError(
            f"the method {record.method!r} changes the inputs of {some} when the model runs, which "
            "a file of codes and scales does not hold; save a model quantised by 'rtn' or 'gptq'"
        )


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise UserError for settings of another version of the format, and for damaged ones; `where`
    is what the sentence says holds them."""
    if settings.get("version") != VERSION:
        raise UserError(
            f"the quantisation was saved in version {settings.get('version')!r} of the format and "
            f"this skipless reads {VERSION}; install a newer skipless"
        )
    for key, kind in _KINDS.items():
        if not isinstance(settings.get(key), kind):
            raise UserError(
                f"{where} says {settings.get(key)!r} for quantization_config.{key}, which "
                "save_quantized does not write; save the model again"
            )


def is_packed(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a tensor of the file belongs to a packed weight."""
    stem, dot, suffix = name.rpartition(".")
    return suffix in SUFFIXES and f"{stem}{dot}weight" in settings["weights"]


def read_codes(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Codes]:
    """{name of a weight: its codes and scale}. Raises UserError when some are missing."""
    found = {}
    for name, about in settings["weights"].items():
        stem = name.removesuffix("weight")
        parts = {s: tensors[stem + s] for s in SUFFIXES if stem + s in tensors}
        if "weight_scale" not in parts:
            raise UserError(f"the file has no packed {name}; it is damaged, save it again")
        found[name] = unpack_weight(name, parts, about["bits"], about.get("group_size"))
    return found


def values_of(codes: Codes, transposed: bool, dtype: torch.dtype) -> Tensor:
    """The rounded weight as the model holds it, the same bits as `quantize` gave."""
    matrix = codes.dequantize().flatten(1).to(dtype)
    return matrix.t().contiguous() if transposed else matrix


def resume(model: nn.Module, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Quantise `model` with codes from a file, in place; its other weights are left alone.

    `tensors` need hold the packed ones only. Raises UserError for settings of a later version, a
    model that does not have these weights, and damaged tensors; the model then is not quantised.
    """
    check_settings(settings, "the file")
    model = unwrapped(model)
    codes = read_codes(tensors, settings)
    scheme = Scheme.parse(settings["scheme"])
    with torch.no_grad():
        for name, own in codes.items():
            parameter = _parameter(model, name)
            transposed = settings["weights"][name].get("transposed", False)
            values = values_of(own, transposed, parameter.dtype)
            if len(parameter) == len(values) and parameter.numel() == values.numel():
                values = values.reshape(parameter.shape)  # a kernel is saved as [out, in * k]
            if values.shape != parameter.shape:
                raise UserError(
                    f"{name} is {list(values.shape)} in the file and {list(parameter.shape)} in "
                    "the model; they do not belong together"
                )
            parameter.data = values.to(parameter.device)
    layers = settings["layers"] if len(settings["layers"]) else None
    # Ranges are in the file, so no batch is needed for them.
    quantize(
        model, _dynamic(scheme), settings["scope"], include_head=settings["include_head"],
        include_convolutions=settings.get("include_convolutions", False), layers=layers,
    )  # fmt: skip
    record = quantization(model)
    assert record is not None, "quantize leaves a record"
    if missing := [weight.name for weight in record.weights if weight.name not in codes]:
        restore(model)
        raise UserError(f"the file has no codes of {missing[0]}; it belongs to another model")
    originals = {str(_dynamic(part)): part for part in scheme.parts()}
    for weight in record.weights:
        _put(weight, codes[weight.name])
        weight.scheme = originals.get(str(weight.scheme), weight.scheme)
    for site in record.activations:
        if (ends := settings["ranges"].get(site.site.name)) is not None:
            kept = [_end(end) for end in ends]
            site.fix(tuple(kept) if len(kept) > 1 else kept[0])
    record.scheme, record.method = scheme, settings["method"]


def _end(value: float) -> Tensor:
    """An end of a range in the dtype it was found in: float32, of double models float64."""
    wide = torch.tensor(value, dtype=torch.float64, device="cpu")
    return wide.float() if wide.float() == wide else wide


def _put(weight: QuantizedWeight, codes: Codes) -> None:
    """Use these codes; there is no weight before rounding, so the same tensor stands for it."""
    values = values_of(codes, weight.transposed, weight.parameter.dtype)
    values = values.reshape(weight.parameter.shape)
    weight.parameter.data = values.to(weight.parameter.device)
    weight.stored = weight.parameter.data
    weight.reconstructed, weight.is_uniform = codes, True
    weight.version = weight.parameter._version


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    try:
        return model.get_parameter(name)
    except AttributeError:
        raise UserError(
            f"the file holds {name}, which {type(model).__name__} does not have; it belongs to "
            "another model"
        ) from None


def _dynamic(scheme: Scheme) -> Scheme:
    """The scheme without -static, in its exceptions too."""
    overrides = tuple(
        (pattern, text if text == "fp" else str(_dynamic(Scheme.parse(text))))
        for pattern, text in scheme.overrides
    )
    return replace(scheme, dynamic=True, overrides=overrides)
