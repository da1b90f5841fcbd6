"""How quantisation error arises at each site and grows through depth (S3, S9, S11).

`site_sqnr` looks at one tensor at a time, activations and weights: how well its values fit the
integers, against what a Gaussian tensor would give. `error_propagation` runs the full-precision and
the quantised model side by side and follows the stream's relative error R_l, in which errors
multiply from layer to layer; the two can disagree, and R_N is the one that predicts the damage.
Sums in float64, one batch in memory at a time. Read by the CLI, the report and `skipless.measure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import unwrapped
from skipless.errors import UserError
from skipless.evaluate.losses import as_list, without_padding
from skipless.quant import (
    Scheme,
    evaluation_mode,
    gaussian_sqnr,
    measured,
    paused,
    quantization,
    quantized,
    run_batch,
)
from skipless.sites import Site, find_sites, first_tensor


def error_propagation(
    model: nn.Module,
    scheme: Scheme | str,
    batches: Iterable[Any],
    scope: str = "block",
    *,
    method: str = "rtn",
    calibration: Iterable[Any] | None = None,
    include_head: bool = False,
) -> list[dict[str, Any]]:
    """R_l = |x_l^q - x_l| / |x_l| at every stream site, in the order of the forward pass (S9).

    `method` as in `quantize`; where it rotates the stream, both passes are rotated. The norms run
    over all channels and tokens of all batches, without those that `attention_mask` leaves out.
    Keys: site, layer, sublayer, r.
    Raises UserError for a model without stream sites, a stream site that never runs, or no batch.
    """
    model = unwrapped(model)
    sites = find_sites(model, "stream")
    totals = {site.name: torch.zeros(2, dtype=torch.float64, device="cpu") for site in sites}
    order: dict[str, None] = {}
    with quantized(
        model, scheme, scope, method=method, calibration=calibration, include_head=include_head
    ), evaluation_mode(model):  # fmt: skip
        for batch in as_list(batches):
            with paused(model):
                reference = _record(model, sites, batch)
            approximate = _record(model, sites, batch)
            for name, stream in reference.items():
                order.setdefault(name)
                x, near = (without_padding(y, batch) for y in (stream, approximate[name]))
                error = _square_sum(near - x)
                energy = _square_sum(x)
                totals[name] += torch.tensor([error, energy], dtype=torch.float64, device="cpu")
    if not order:
        raise UserError("there is no batch to follow the error on; give at least one")
    by_name = {site.name: site for site in sites}
    rows = []
    for name in order:
        error, energy = totals[name].tolist()
        site = by_name[name]
        rows.append(
            {
                "site": name,
                "layer": site.layer,
                "sublayer": site.sublayer,
                "r": math.sqrt(error / energy) if energy > 0 else (0.0 if error == 0 else math.inf),
            }
        )
    return rows


def site_sqnr(
    model: nn.Module,
    scheme: Scheme | str,
    batches: Iterable[Any],
    scope: str = "block",
    *,
    method: str = "rtn",
    calibration: Iterable[Any] | None = None,
    include_head: bool = False,
    include_weights: bool = True,
) -> list[dict[str, Any]]:
    """Signal-to-quantisation-noise ratio of every quantised tensor beside the yardstick (S3, S11).

    The values are the full-precision model's, scaled or rotated where `method` does that, so that
    every tensor is judged by itself. One row an
    activation site, then (unless `include_weights` is False) one a weight matrix: kind "weight",
    site the module's name. Keys: site, kind, layer, sublayer, bits, sqnr, ideal (of a Gaussian
    tensor at the same width), gap = ideal - sqnr, all dB (sqnr is None where nothing is lost, as on
    an all-zero tensor). Raises UserError when the scheme leaves activations in floating point and
    weights are not wanted, and as `quantize` does.
    """
    scheme, model = Scheme.parse(scheme), unwrapped(model)
    rows = []
    with quantized(
        model, scheme, scope, method=method, calibration=calibration, include_head=include_head
    ), evaluation_mode(model):  # fmt: skip
        record = quantization(model)
        assert record is not None, "quantized() left no record"
        if not record.activations and not include_weights:
            raise UserError(
                f"{scheme} leaves activations in floating point, so that no site can be measured; "
                "give them a width or pass include_weights=True"
            )
        sums = {q.site.name: [0.0, 0.0] for q in record.activations}
        count = 0
        with measured(model, lambda name, x, result: _add(sums[name], x, result)):
            for batch in as_list(batches):
                run_batch(model, batch)
                count += 1
        if not count:
            raise UserError("there is no batch to measure on; give at least one")
        for q in record.activations:
            signal, noise = sums[q.site.name]
            row = {"site": q.site.name, "kind": q.site.kind, "layer": q.site.layer,
                   "sublayer": q.site.sublayer}  # fmt: skip
            rows.append(row | _ratio(signal, noise, q.bits))
        sublayers = {site.module: site.sublayer for site in find_sites(model)}
        for weight in record.weights if include_weights else ():
            noise = _square_sum(weight.parameter.data.float() - weight.stored.float())
            module = weight.name.removesuffix(".weight")
            row = {"site": module, "kind": "weight", "layer": weight.layer,
                   "sublayer": sublayers.get(module)}  # fmt: skip
            rows.append(row | _ratio(_square_sum(weight.stored), noise, weight.scheme.weight_bits))
    return rows


def _add(total: list[float], x: Tensor, result: Tensor) -> None:
    total[0] += _square_sum(x)
    total[1] += _square_sum(result.to(x.dtype) - x)


def _ratio(signal: float, noise: float, bits: int) -> dict[str, Any]:
    ideal = gaussian_sqnr(bits)
    if noise == 0:
        measured = None
    elif signal == 0:
        measured = -math.inf
    else:
        measured = 10 * math.log10(signal / noise)
    gap = None if measured is None else ideal - measured
    return {"bits": bits, "sqnr": measured, "ideal": ideal, "gap": gap}


def _square_sum(x: Tensor) -> float:
    flat = x.detach().reshape(-1)
    flat = (flat.cpu() if flat.device.type == "mps" else flat).double()  # MPS has no float64
    return float(torch.dot(flat, flat))


def _record(model: nn.Module, sites: list[Site], batch: Any) -> dict[str, Tensor]:
    """Outputs of `sites` in the order in which they ran."""
    modules = dict(model.named_modules())
    seen: dict[str, Tensor] = {}

    def hook(site: Site):
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            value = first_tensor(output)
            if value is not None:
                seen[site.name] = value.detach()

        return keep

    handles = [modules[site.module].register_forward_hook(hook(site)) for site in sites]
    try:
        run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if missing := [site.name for site in sites if site.name not in seen]:
        raise UserError(
            f"{missing[0]} never ran in the forward pass of {type(model).__name__}, so that the "
            "error cannot be followed there"
        )
    return seen
