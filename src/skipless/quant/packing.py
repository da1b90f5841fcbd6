"""Integer codes as bytes: two 4-bit codes in one, and the panels that the C++ kernel reads.

A panel holds 16 output columns. For each pair of inputs k, k+1 its 32 codes lie side by side:

    bytes     [panel][pair][column 0..15][k, k+1]             32 bytes a pair, codes of 2-8 bits
    nibbles   [panel][pair][column 0..7][k, k+1]              16 bytes a pair, codes of 2-4 bits;
              low half of a byte columns 0-7, high half 8-15, two's complement

Rows and columns that fill up the last pair and panel are zero. Read by `quant.engines`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from skipless.errors import UserError

COLUMNS = 16


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes in -8..7, any shape -> uint8 [ceil(numel / 2)]; even places are the low halves.

    Raises UserError for a code that needs more than 4 bits.
    """
    flat = codes.reshape(-1)
    _check(flat, -8, 7)
    if flat.numel() % 2:
        flat = F.pad(flat, (0, 1))
    halves = flat.to(torch.int16) & 15
    return (halves[0::2] | (halves[1::2] << 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The int8 codes of `pack_nibbles` in their shape."""
    size = torch.Size(shape)
    if packed.numel() != (size.numel() + 1) // 2:
        raise UserError(
            f"{packed.numel()} bytes hold {2 * packed.numel()} codes; {tuple(size)} has "
            f"{size.numel()}, so pass the shape that was packed"
        )
    both = torch.stack((packed & 15, packed >> 4), -1).reshape(-1)[: size.numel()]
    return ((both.to(torch.int16) ^ 8) - 8).to(torch.int8).reshape(size)


def pack_panels(codes: Tensor, *, nibbles: bool) -> Tensor:
    """Weight codes [out, in] -> int8 [panels, pairs, 32 or 16] on the CPU."""
    limit = 7 if nibbles else 127
    _check(codes, -limit - 1, limit)
    out, width = codes.shape
    panels, pairs = -(-out // COLUMNS), max(1, -(-width // 2))
    full = codes.new_zeros(panels * COLUMNS, 2 * pairs, dtype=torch.int8, device="cpu")
    full[:out, :width] = codes.cpu()
    laid = full.reshape(panels, COLUMNS, pairs, 2).permute(0, 2, 1, 3)
    laid = laid.reshape(panels, pairs, 2 * COLUMNS)
    if nibbles:
        laid = (laid[..., :COLUMNS] & 15) | (laid[..., COLUMNS:] << 4)
    return laid.contiguous()


def unpack_panels(packed: Tensor, out: int, width: int) -> Tensor:
    """The int8 codes [out, in] of `pack_panels`."""
    panels, pairs, size = packed.shape
    if size == COLUMNS:
        low = (packed << 4) >> 4  # int8 shifts keep the sign
        packed = torch.cat((low, packed >> 4), -1)
    full = packed.reshape(panels, pairs, COLUMNS, 2).permute(0, 2, 1, 3)
    return full.reshape(panels * COLUMNS, 2 * pairs)[:out, :width].contiguous()


def _check(codes: Tensor, low: int, high: int) -> None:
    if codes.numel():
        smallest, largest = (int(end) for end in torch.aminmax(codes))
        if smallest < low or largest > high:
            raise UserError(
                f"codes reach from {smallest} to {largest}; {low} to {high} fit in the packed form"
            )
