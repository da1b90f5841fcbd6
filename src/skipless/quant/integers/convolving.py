"""Convolutions computed with integers in their place (Q4).

The patches under the kernel are laid out first, as codes that are zero in the padding: that is the
product of a linear layer, with one row a position. In groups it is several: a few neighbouring
groups make one product, whose weight has blocks of zeros where a channel meets another group's
kernel, so that a product fills the engines' 16 columns. Sums stay exact. Made by `integers.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skipless.compiled import uncompiled
from skipless.errors import UserError
from skipless.quant.convolutions import by_example
from skipless.quant.fake import Codes
from skipless.quant.integers.codes import site_codes
from skipless.quant.integers.engines import ENGINES
from skipless.quant.integers.executing import (
    STATE,
    Executed,
    Executing,
    check_kind,
    float_bias,
    straight_through,
)
from skipless.quant.integers.packing import COLUMNS


class IntegerKernel(Executing):
    """Mixed in before a convolution's own class."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        x = input  # torch's name, by which models may pass it
        own: Executed = getattr(self, STATE)
        layer: Any = self
        site, dims = own.quantizer, layer.weight.dim() - 1
        if site.state.mode != "quantize":
            return super().forward(x)
        if self.training and torch.is_grad_enabled():
            rows = by_example(x, dims) if site.granularity == "token" else x
            return super().forward(straight_through(site, rows).reshape(x.shape))
        check_kind(own, x)
        own.weight.check_unchanged()
        if x.dim() not in (dims, dims + 1) or x.shape[-dims] != layer.in_channels:
            raise UserError(
                f"{site.site.module} takes {layer.in_channels} channels and was given "
                f"{list(x.shape)}; give it the tensor that the model was made for"
            )
        if x.numel() == 0:
            return super().forward(x)
        with torch.no_grad():
            batch = x if x.dim() > dims else x[None]
            codes, scale = site_codes(site, x, by_example(x, dims))
            patches, places = _patches(layer, codes.reshape(batch.shape))
            if len(scale) > 1:  # one an example
                scale = scale.repeat_interleave(len(patches) // len(batch))
            out = _product(own, patches, scale, float_bias(self))
            out = out.to(x.dtype).reshape(*places, -1).movedim(-1, 1)
        return out if x.dim() > dims else out[0]


def _product(own: Executed, patches: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [rows, out] of codes [rows, in * k]: every product takes its groups' columns."""
    engine, parts = ENGINES[own.engine], []
    column = row = 0
    for prepared in own.products:
        width, height = prepared.problem.in_features, prepared.problem.out_features
        codes = patches[:, column : column + width]
        part = None if bias is None else bias[row : row + height]
        parts.append(engine.linear(prepared, codes, scale, part))
        column, row = column + width, row + height
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _patches(layer: Any, codes: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What the kernel meets at every position: codes [N, C, ...] -> ([N * positions, C * k], (N,
    positions by dimension))."""
    around, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
    if not isinstance(layer.padding, str):
        around = [size for size in reversed(layer.padding) for _ in range(2)]
    if mode == "zeros":
        codes = F.pad(codes, around)
    else:  # in float32, which holds every code, since torch pads no integers in these modes
        codes = F.pad(codes.float(), around, mode=mode).to(torch.int16)
    for place, size in enumerate(layer.kernel_size):
        gap = layer.dilation[place]
        codes = codes.unfold(place + 2, (size - 1) * gap + 1, layer.stride[place])
        codes = codes[..., ::gap]
    number = len(layer.kernel_size)
    places = (len(codes), *codes.shape[2 : 2 + number])
    rows = codes.movedim(1, 1 + number)  # N, positions, C, k
    return rows.reshape(-1, layer.in_channels * rows.shape[2 + number :].numel()), places


def by_groups(weight: Codes, groups: int) -> list[Codes]:
    """The weights of the products of a convolution: codes [out, in / groups * k], with one scale or
    one a row, as one matrix for every few groups."""
    codes, scale = weight
    if groups == 1:
        return [weight]
    height, width = len(codes) // groups, codes.shape[1]
    most = max(1, COLUMNS // height)
    together = max(n for n in range(1, most + 1) if groups % n == 0)
    scales = scale.reshape(-1).expand(len(codes)).split(together * height)
    matrices = [
        torch.block_diag(*part.unflatten(0, (together, height)))
        for part in codes.split(together * height)
    ]
    assert matrices[0].shape[1] == together * width, "one block a group"
    return [Codes(matrix, own) for matrix, own in zip(matrices, scales, strict=True)]
