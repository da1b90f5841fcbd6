"""What rounding costs every weight matrix, and what finer scales would give (S1, S3, S11).

Tied weights are taken once; embeddings and heads are measured too and said not to be quantised.
Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipless.heads import find_heads
from skipless.probes import sqnr
from skipless.probes.moments import batch_moments
from skipless.quant import Scheme, gaussian_sqnr, quantize_weight
from skipless.sites import find_sites, is_linear, weight_of

GROUP = 32


def weight_rows(model: nn.Module, schemes: Sequence[Scheme]) -> list[dict[str, Any]]:
    """A row a matrix: site (module), layer, sublayer, shape, quantised, std, max_over_std, kurtosis
    and, by scheme, sqnr, ideal, gap (dB) and remedies {channel, g32, clip:mse: sqnr in dB}."""
    heads, places = find_heads(model), {site.module: site for site in find_sites(model)}
    rows, seen = [], set()
    for name, module in model.named_modules():
        if not is_linear(module) and not isinstance(module, nn.Embedding):
            continue
        weight = weight_of(module)
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        matrix = weight.detach()
        matrix = matrix.t() if type(module).__name__ == "Conv1D" else matrix
        site, moments = places.get(name), batch_moments(matrix)
        row = {
            "site": name, "layer": site.layer if site else None,
            "sublayer": site.sublayer if site else None, "shape": list(matrix.shape),
            "quantised": is_linear(module) and name not in heads,
            "std": moments.std(), "max_abs": moments.max_abs,
            "max_over_std": moments.max_abs / moments.std() if moments.std() > 0 else None,
            "kurtosis": moments.kurtosis(), "sqnr": {}, "ideal": {}, "gap": {}, "remedies": {},
        }  # fmt: skip
        if row["quantised"]:
            for scheme in schemes:
                key, ideal = str(scheme), gaussian_sqnr(scheme.weight_bits)
                found = _ratio(matrix, scheme)
                row["sqnr"][key], row["ideal"][key] = found, ideal
                row["gap"][key] = None if found is None else ideal - found
                row["remedies"][key] = _finer(matrix, scheme)
        rows.append(row)
    return rows


def _ratio(matrix: Tensor, scheme: Scheme) -> float | None:
    found = sqnr(matrix.float(), quantize_weight(matrix.float(), scheme))
    return found if math.isfinite(found) else None


@torch.no_grad()
def _finer(matrix: Tensor, scheme: Scheme) -> dict[str, float | None]:
    changes = {"channel": {"weight_granularity": "channel"}, "clip:mse": {"clip": "mse"}}
    if matrix.shape[1] % GROUP == 0:
        changes[f"g{GROUP}"] = {"weight_granularity": f"g{GROUP}"}
    return {what: _ratio(matrix, replace(scheme, **change)) for what, change in changes.items()}


def check_finite(model: nn.Module) -> None:
    """Raise UserError naming the first parameter that holds a NaN or infinity, or is on the meta
    device."""
    from skipless.errors import UserError

    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(f"{name} is on the meta device; load the model's weights first")
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            broken = int((~torch.isfinite(parameter)).sum())
            raise UserError(
                f"the parameter {name} holds NaN or infinity ({broken} of {parameter.numel()} "
                "numbers); load the model again, or train it from a checkpoint before it broke"
            )
