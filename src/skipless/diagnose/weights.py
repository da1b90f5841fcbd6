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

from skipless.diagnose.remedies import token_ratio
from skipless.diagnose.streaming import ensure_loaded, loaded_parameters
from skipless.errors import UserError
from skipless.fallback import near
from skipless.heads import find_heads
from skipless.probes.moments import batch_moments
from skipless.quant import Scheme, gaussian_sqnr, quantize_weight
from skipless.sites import find_sites, is_linear, weight_of

GROUP = 32


def weight_rows(model: nn.Module, schemes: Sequence[Scheme]) -> list[dict[str, Any]]:
    """A row a matrix: site (module), layer, sublayer, shape, quantised, std, max_over_std, kurtosis
    and, by scheme in dB, sqnr (S3, all values pooled), channel_sqnr (of the mean over output
    channels of noise over energy: every channel counts alike), ideal, gap of channel_sqnr, and
    remedies {channel, g32, clip:mse: channel_sqnr}. A matrix is judged at the format that a
    scheme's overrides give it; one left in full precision has no numbers at that scheme."""
    heads, places = find_heads(model), {site.module: site for site in find_sites(model)}
    rows: list[dict[str, Any]] = []
    found: dict[int, tuple[str, nn.Module]] = {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if is_linear(module) or isinstance(module, nn.Embedding):
            # While none is replaced from disk, the same object is the same weight.
            found.setdefault(id(weight_of(module)), (name, module))
            names.setdefault(id(weight_of(module)), []).append(name)
    for key, (name, module) in found.items():
        ensure_loaded(model, name)
        matrix = weight_of(module).detach()
        matrix = matrix.t() if type(module).__name__ == "Conv1D" else matrix
        site, summary = places.get(name), batch_moments(matrix).summary()
        row = {
            "site": name, "layer": site.layer if site else None,
            "sublayer": site.sublayer if site else None, "shape": list(matrix.shape),
            "quantised": is_linear(module) and name not in heads,
            **{key: summary[key] for key in ("std", "max_abs", "max_over_std", "kurtosis")},
            "sqnr": {}, "channel_sqnr": {}, "ideal": {}, "gap": {},
            "remedies": {},
        }  # fmt: skip
        if row["quantised"]:
            for scheme in schemes:
                if (part := scheme.at(*names[key])) is None:
                    continue
                text, ideal = str(scheme), gaussian_sqnr(part.weight_bits)
                pooled, each = _ratios(matrix, part)
                row["sqnr"][text], row["channel_sqnr"][text] = pooled, each
                row["ideal"][text] = ideal
                row["gap"][text] = None if each is None else ideal - each
                row["remedies"][text] = _finer(matrix, part)
        rows.append(row)
    return rows


def _ratios(matrix: Tensor, scheme: Scheme) -> tuple[float | None, float | None]:
    """S3 pooled and with every output channel alike; None where nothing is lost or there."""
    x = near(matrix).float()  # sums are float64
    ones = torch.ones(len(x), dtype=torch.float64, device=x.device)
    found = token_ratio(x, quantize_weight(x, scheme), ones)
    pooled, each = (value if math.isfinite(value) else None for value in found)
    return pooled, each


@torch.no_grad()
def _finer(matrix: Tensor, scheme: Scheme) -> dict[str, float | None]:
    changes = {"channel": {"weight_granularity": "channel"}, "clip:mse": {"clip": "mse"}}
    if matrix.shape[1] % GROUP == 0:
        changes[f"g{GROUP}"] = {"weight_granularity": f"g{GROUP}"}
    return {what: _ratios(matrix, replace(scheme, **change))[1] for what, change in changes.items()}


def check_finite(model: nn.Module) -> None:
    """Raise UserError naming the first parameter that holds a NaN or infinity, or is on the meta
    device."""
    for name, parameter in loaded_parameters(model):
        if parameter.is_meta:
            raise UserError(f"{name} is on the meta device; load the model's weights first")
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            broken = int((~torch.isfinite(parameter)).sum())
            raise UserError(
                f"the parameter {name} holds NaN or infinity ({broken} of {parameter.numel()} "
                "numbers); load the model again, or train it from a checkpoint before it broke"
            )
