"""What would help a tensor: each remedy tried on the kept rows, in dB (S3, Q1, Q5).

| name            | is                                                                         |
|-----------------|----------------------------------------------------------------------------|
| as is           | the scheme's own range                                                     |
| clip:gauss      | one clip a tensor, best for a Gaussian of its standard deviation (S11)      |
| clip:mse        | one clip a tensor with the least squared error                             |
| token           | one scale a token                                                          |
| columns         | the 1 % of the channels with the largest values stay in full precision      |
| smoothing       | x / s and s W with s_j = sqrt(max |x_j| / max |w_j|), SmoothQuant           |
| rotation        | x H and H^T W with a Hadamard matrix H                                     |
| rotation, token | both                                                                       |

Three numbers each. `sqnr`: of the tensor, all values pooled, where a giant token decides alone.
`token_sqnr`: of the mean over tokens of noise over energy, where every token counts alike.
`output_sqnr`: the latter for the outputs of the linear layers that read the tensor, their weights
rounded as the scheme says too. Rows are weighted (`probes.outliers`). Read by
`skipless.diagnose.running`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipless.probes.outliers import decibels
from skipless.quant import Scheme, fake_quantize, gaussian_clip, quantize_weight
from skipless.quant.transforms.rotation import rotation

WORTH_DB = 3.0
"""A remedy that gives less is none."""
FIXED_DB = 6.0
"""One bit: a tensor this near to a Gaussian one counts as fixed."""
CLOSE_DB = 1.0
"""The simplest remedy this near to the best one is named."""
COLUMN_SHARE = 0.01
_SHARES = [2.0 ** (-j / 4) for j in range(49)]


def token_ratio(x: Tensor, q: Tensor, weights: Tensor) -> tuple[float, float]:
    """(S3 pooled, S3 of the mean ratio over tokens) in dB, of rows [n, D] with weights [n]."""
    x, q = x.double(), q.double()
    noise, energy = (q - x).square().sum(1), x.square().sum(1)
    ratio = torch.where(energy > 0, noise / energy, 0.0)
    pooled = decibels(float((weights * noise).sum()), float((weights * energy).sum()))
    return pooled, decibels(float((weights * ratio).sum()), float(weights.sum()))


def try_remedies(
    x: Tensor, weights: Tensor, scheme: Scheme, matrices: Sequence[Tensor] = ()
) -> list[dict[str, Any]]:
    """One row a remedy, simplest first: remedy, sqnr, token_sqnr, output_sqnr (None without
    `matrices`, the weights [out, D] that read the tensor).

    `x` [n, D] float32 with weights [n]. Empty for a scheme that leaves activations as they are.
    """
    bits = scheme.activation_bits
    if bits is None or x.numel() == 0 or not bool(x.any()):
        return []
    matrices = [matrix.detach().float().cpu() for matrix in matrices]
    exact = [x @ matrix.T for matrix in matrices]
    wanted = torch.cat(exact, 1) if exact else None
    rounded = [quantize_weight(matrix, scheme) for matrix in matrices]
    rows: list[dict[str, Any]] = []

    def add(name: str, q: Tensor, output: list[Tensor] | None = None) -> None:
        pooled, each = token_ratio(x, q, weights)
        found = None
        if wanted is not None:
            output = [q @ matrix.T for matrix in rounded] if output is None else output
            found = token_ratio(wanted, torch.cat(output, 1), weights)[1]
        rows.append({"remedy": name, "sqnr": pooled, "token_sqnr": each, "output_sqnr": found})

    def absmax(values: Tensor, granularity: str = "tensor") -> Tensor:
        return fake_quantize(values, bits, granularity=granularity, symmetric=scheme.symmetric)

    add("as is", fake_quantize(
        x, bits, granularity=scheme.activation_granularity, symmetric=scheme.symmetric,
        clip=scheme.clip,
    ))  # fmt: skip
    largest = float(x.abs().max())
    deviation = math.sqrt(float((weights * x.double().square().mean(1)).sum() / weights.sum()))
    clip = min(gaussian_clip(bits) * deviation, largest)
    add("clip:gauss", fake_quantize(x, bits, clip=clip))
    add("clip:mse", fake_quantize(x, bits, clip=_best_clip(x, weights, bits, largest)))
    add("token", absmax(x, "token"))

    columns = _largest_columns(x)
    if columns is not None:
        q = x.clone()
        q[:, columns] = 0
        q = absmax(q)
        q[:, columns] = x[:, columns]
        add("columns", q, [
            q @ low.index_copy(1, columns, matrix[:, columns]).T
            for matrix, low in zip(matrices, rounded, strict=True)
        ])  # fmt: skip
    if matrices:
        s = _smoothing(x, matrices)
        q = absmax(x / s)
        add("smoothing", q * s, [q @ quantize_weight(m * s, scheme).T for m in matrices])
    if x.shape[1] > 1:
        turn = rotation(x.shape[1])
        turned = [quantize_weight(matrix @ turn, scheme) for matrix in matrices]
        for name, granularity in (("rotation", "tensor"), ("rotation, token", "token")):
            q = absmax(x @ turn, granularity)
            add(name, q @ turn.T, [q @ matrix.T for matrix in turned])
    return rows


def _largest_columns(x: Tensor) -> Tensor | None:
    """The COLUMN_SHARE of the channels with the largest values; None where that is all of them."""
    number = max(1, math.ceil(COLUMN_SHARE * x.shape[1]))
    return x.abs().amax(0).topk(number).indices if number < x.shape[1] else None


def choose_remedy(rows: Sequence[dict[str, Any]], ideal: float) -> dict[str, Any] | None:
    """The simplest row within FIXED_DB of `ideal`, a Gaussian tensor's ratio at the width; where
    none is, the simplest within CLOSE_DB of the best. With "gain" in dB over the first row.

    Judged by `output_sqnr` where there is one, else by `token_sqnr`. None when nothing gives
    WORTH_DB.
    """
    if not rows:
        return None
    key = "token_sqnr" if rows[0]["output_sqnr"] is None else "output_sqnr"
    known = [row for row in rows[1:] if not math.isnan(row[key])]
    base = rows[0][key]
    if not known or math.isnan(base):
        return None
    best = max(row[key] for row in known)
    if not best - base >= WORTH_DB:
        return None
    enough = max(min(best - CLOSE_DB, ideal - FIXED_DB), base + WORTH_DB)
    near = next(row for row in known if row[key] >= min(enough, best))
    return near | {"gain": near[key] - base, "judged_by": key}


def _best_clip(x: Tensor, weights: Tensor, bits: int, largest: float) -> float:
    """The clip with the least weighted squared error, on a grid of quarter octaves."""
    errors = []
    for share in _SHARES:
        noise = (fake_quantize(x, bits, clip=largest * share) - x).double().square().sum(1)
        errors.append(float((weights * noise).sum()))
    return largest * _SHARES[min(range(len(errors)), key=errors.__getitem__)]


def _smoothing(x: Tensor, matrices: Sequence[Tensor], strength: float = 0.5) -> Tensor:
    """s_j = max |x_j|^a / max |w_j|^(1-a) (Q5), w over all that read x; 1 where either is 0."""
    of_x = x.abs().amax(0)
    of_w = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
    s = of_x.pow(strength) / of_w.pow(1 - strength)
    return torch.where((of_x > 0) & (of_w > 0), s, torch.ones_like(s))
