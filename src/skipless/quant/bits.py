"""Weight codes as tensors for a file: bits side by side without gaps, scales, zero points (Q1).

    NAME.weight              int32 [out, ceil(in * bits / 32)]: code + 2^(bits-1) in `bits` bits,
                             the lowest first; int16 [out, in, 1] above 8 bits
    NAME.weight_scale        [1], [out, 1] or [out, groups]
    NAME.weight_zero_point   int32, shaped as the scale, if asymmetric: value = (code - zero) scale
    NAME.weight_shape        int64 [2]

Software that does not know the format finds a weight of another shape and stops, where under
another name it might leave the weight out. compressed-tensors has the same bits, as
NAME.weight_packed in its form `pack-quantized`, and int8 [out, in] as NAME.weight in
`int-quantized`; both are read too. Read by `quant.saved`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.quant.fake import Codes

SUFFIXES = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape")


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes [out, in] in -2^(bits-1) .. 2^(bits-1)-1 -> int32 [out, ceil(in * bits / 32)]."""
    unsigned = (codes.cpu().to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).numpy()
    rows, width = unsigned.shape
    padded = -(-width * bits // 32) * 4  # bytes
    if bits == 8:
        packed = unsigned
    else:
        shifts = np.arange(bits, dtype=np.uint8)
        # some rows at a time: a bit takes a byte meanwhile
        parts = [
            np.packbits(
                ((part[..., None] >> shifts) & 1).reshape(len(part), -1), axis=1, bitorder="little"
            )
            for part in np.array_split(unsigned, max(1, rows // 256))
        ]
        packed = np.concatenate(parts)
    packed = np.pad(packed, ((0, 0), (0, padded - packed.shape[1])))
    return torch.from_numpy(np.ascontiguousarray(packed).view("<i4").astype(np.int32))


def unpack_bits(packed: Tensor, bits: int, width: int) -> Tensor:
    """The int8 codes [out, in] of `pack_bits`."""
    stored = np.ascontiguousarray(packed.cpu().numpy().astype("<i4")).view(np.uint8)
    if bits == 8:
        unsigned = stored[:, :width]
    else:
        weights = (1 << np.arange(bits)).astype(np.uint8)
        parts = []
        for part in np.array_split(stored, max(1, len(stored) // 256)):
            flat = np.unpackbits(part, axis=1, count=width * bits, bitorder="little")
            parts.append(flat.reshape(len(part), width, bits) @ weights)
        unsigned = np.concatenate(parts)
    return torch.from_numpy((unsigned.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8))


FORMS = ("skipless", "pack-quantized", "int-quantized")


def pack_weight(
    codes: Codes, bits: int, symmetric: bool, form: str = "skipless"
) -> dict[str, Tensor]:
    """{suffix of the name: tensor} of a matrix' codes, [out, in] or in groups [out, groups, n]."""
    matrix = codes.codes.flatten(1).cpu()
    scale = codes.scale.cpu()
    scale = scale.reshape(1) if scale.dim() == 0 else scale.reshape(len(matrix), -1)
    tensors = {"weight_scale": scale.contiguous()}
    if not symmetric:
        # Codes come with the zero point taken off; the smallest of a group is at the range's end.
        groups = scale.shape[1] if scale.dim() > 1 else 1
        by_group = matrix.reshape(-1 if scale.dim() > 1 else 1, matrix.numel() // scale.numel())
        lowest = by_group.amin(1).clamp(max=0)
        zero = -(2 ** (bits - 1)) - lowest
        matrix = (by_group + zero[:, None]).reshape(matrix.shape)
        tensors["weight_zero_point"] = zero.reshape(-1, groups).reshape(scale.shape).to(torch.int32)
    if form == "int-quantized":
        tensors["weight"] = matrix.to(torch.int8)
        return tensors
    packed = pack_bits(matrix, bits) if bits <= 8 else matrix.to(torch.int16)[..., None]
    tensors["weight_packed" if form == "pack-quantized" else "weight"] = packed
    tensors["weight_shape"] = torch.tensor(matrix.shape, device="cpu")
    return tensors


def unpack_weight(name: str, tensors: dict[str, Tensor], bits: int, group: int | None) -> Codes:
    """The codes (int8 or int16) and scale that `pack_weight` was given.

    Raises UserError, naming the weight, for tensors that do not belong together.
    """
    try:
        scale = tensors["weight_scale"].cpu()
        stored = tensors.get("weight_packed", tensors.get("weight"))
        if stored is None or stored.is_floating_point():
            raise ValueError("weight")
        if stored.dtype == torch.int8:
            matrix = stored.cpu()
            rows, width = matrix.shape
        else:
            rows, width = (int(n) for n in tensors["weight_shape"])
            packed = stored.dtype == torch.int32
            matrix = unpack_bits(stored, bits, width) if packed else stored.cpu()[..., 0]
            if matrix.shape != (rows, width):
                raise ValueError("weight_shape")
        zero = tensors.get("weight_zero_point")
        if zero is not None:
            expanded = zero.cpu().reshape(scale.shape[0], -1) if scale.dim() > 1 else zero.cpu()
            count = expanded.shape[-1]
            matrix = matrix.to(torch.int32).reshape(rows, count, -1)
            matrix = (matrix - expanded[..., None]).reshape(rows, width)
        if group is not None:
            matrix = matrix.reshape(rows, -1, group)
            scale = scale.reshape(rows, -1, 1)
            if scale.shape[1] != matrix.shape[1]:
                raise ValueError("weight_scale")
        elif scale.dim() == 1:
            scale = scale.reshape(())
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the packed tensors of {name} do not belong together ({error}); the folder is "
            "damaged, save it again"
        ) from None
    return Codes(matrix, scale)
