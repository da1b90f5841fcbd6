"""Integer codes as bytes: the panels that the C++ kernel reads, of 4-bit codes two in a byte.

A panel holds 16 output columns, its codes in one of two forms (`kernels/lanes.hpp`).

Pairs: for each pair of inputs k, k+1 the 32 codes lie side by side, two's complement:

    whole     [panel][pair][column 0..15][k, k+1]             32 bytes a pair, codes of 2-8 bits
    nibbles   [panel][pair][column 0..7][k, k+1]              16 bytes a pair, codes of 2-4 bits;
              low half of a byte columns 0-7, high half 8-15

Quads: four inputs side by side, unsigned by an offset of 128, nibbles by 8:

    whole     [panel][quad][column 0..15][k .. k+3]           64 bytes a quad
    nibbles   [panel][8 inputs][column 0..15][k .. k+3]       64 bytes; low half of a byte input k,
              high half k+4

Rows and columns that fill up the last group and panel are zero. Read by `integers.engines`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipless.errors import UserError

COLUMNS = 16


def pack_panels(codes: Tensor, *, nibbles: bool, quads: bool = False) -> Tensor:
    """Weight codes [out, in] -> int8 [panels, groups, bytes] on the CPU; groups as above."""
    limit = 7 if nibbles else 127
    _check(codes, -limit - 1, limit)
    out, width = codes.shape
    group = group_size(nibbles=nibbles, quads=quads)
    panels, groups = -(-out // COLUMNS), max(1, -(-width // group))
    full = codes.new_zeros(panels * COLUMNS, groups * group, dtype=torch.int8, device="cpu")
    full[:out, :width] = codes.cpu()
    if not quads:
        laid = full.reshape(panels, COLUMNS, groups, 2).permute(0, 2, 1, 3)
        laid = laid.reshape(panels, groups, 2 * COLUMNS)
        if nibbles:
            laid = (laid[..., :COLUMNS] & 15) | (laid[..., COLUMNS:] << 4)
        return laid.contiguous()
    if not nibbles:
        laid = (full ^ -128).reshape(panels, COLUMNS, groups, 4).permute(0, 2, 1, 3)
        return laid.reshape(panels, groups, 4 * COLUMNS).contiguous()
    halves = (full + 8).reshape(panels, COLUMNS, groups, 2, 4).permute(3, 0, 2, 1, 4)
    laid = halves[0] | (halves[1] << 4)
    return laid.reshape(panels, groups, 4 * COLUMNS).contiguous()


def unpack_panels(packed: Tensor, out: int, width: int, *, quads: bool = False,
                  nibbles: bool | None = None) -> Tensor:  # fmt: skip
    """The int8 codes [out, in] of `pack_panels`; of pairs the size tells whether nibbles."""
    panels, groups, size = packed.shape
    if quads:
        bytes_ = packed.reshape(panels, groups, COLUMNS, 4)
        if nibbles:
            codes = torch.stack((bytes_ & 15, (bytes_ >> 4) & 15), -2) - 8
        else:
            codes = (bytes_ ^ -128)[..., None, :]
        full = codes.permute(0, 2, 1, 3, 4)
    else:
        if size == COLUMNS:
            low = (packed << 4) >> 4  # int8 shifts keep the sign
            packed = torch.cat((low, packed >> 4), -1)
        full = packed.reshape(panels, groups, COLUMNS, 2).permute(0, 2, 1, 3)
    return full.reshape(panels * COLUMNS, -1)[:out, :width].contiguous()


def group_size(*, nibbles: bool, quads: bool) -> int:
    """Inputs that lie side by side in a panel."""
    return (8 if nibbles else 4) if quads else 2


def _check(codes: Tensor, low: int, high: int) -> None:
    if codes.numel():
        smallest, largest = (int(end) for end in torch.aminmax(codes))
        if smallest < low or largest > high:
            raise UserError(
                f"codes reach from {smallest} to {largest}; {low} to {high} fit in the packed form"
            )
