"""What every engine of integer products shares: sizes, packed weights, the last step (Q4).

`Problem` is the size of a product and its widths, `Prepared` the weights as one engine wants them,
`Engine` what `quant.integers` calls, `dequantize` how each ends. Read by `integers.engines`, which
lists the engines, and `integers.native`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError

FLOAT32_EXACT, INT32_EXACT, FLOAT64_EXACT = 2**24, 2**31, 2**53


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The size of one product, y [tokens, out] = x [tokens, in] w^T, and its widths in bits."""

    weight_bits: int
    activation_bits: int
    in_features: int
    out_features: int
    device: str = "cpu"

    @property
    def largest_weight(self) -> int:
        return 2 ** (self.weight_bits - 1) - 1

    @property
    def largest_activation(self) -> int:
        return 2 ** (self.activation_bits - 1) - 1

    @property
    def bound(self) -> int:
        """No sum of products exceeds it: K qw qa."""
        return self.in_features * self.largest_weight * self.largest_activation


@dataclass(kw_only=True)
class Prepared:
    """Weights as one engine wants them."""

    problem: Problem
    data: Any
    column_scale: Tensor
    """float32 [out]; C++ engines: filled up to whole panels."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight codes in this form."""
        if not isinstance(self.data, (tuple, Tensor)):
            return self.data.num_bytes
        tensors = self.data if isinstance(self.data, tuple) else (self.data,)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Engine:
    """What `quant.integers` calls. `linear` and `sums` take int16 codes [tokens, in]."""

    name = ""

    def unavailable(self, device: str) -> str:
        """Why it cannot run on this kind of device at all; "" if it can."""
        return ""

    def refuses(self, problem: Problem) -> str:
        """Why it does not compute this product exactly; "" if it does."""
        return self.unavailable(problem.device)

    def prepare(self, codes: Tensor, column_scale: Tensor, problem: Problem) -> Prepared:
        """Weight codes [out, in] and their scales [out] in the engine's own form."""
        if reason := self.refuses(problem):
            raise UserError(f"engine {self.name!r} cannot run this layer: {reason}")
        scale = column_scale.float().contiguous()
        return Prepared(problem=problem, data=self.pack(codes, problem), column_scale=scale)

    def pack(self, codes: Tensor, problem: Problem) -> Any:
        raise UserError(f"engine {self.name!r} has no packed form; use an engine of ENGINES")

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        """Exact sums [tokens, out] in a dtype that holds them."""
        raise UserError(f"engine {self.name!r} computes nothing; use an engine of ENGINES")

    def linear(
        self, prepared: Prepared, codes: Tensor, row_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """float32 [tokens, out]; `row_scale` is float32 [1] or [tokens], `bias` float32 [out]."""
        sums = self.sums(prepared, codes)
        return dequantize(sums, row_scale, prepared.column_scale, bias)


def dequantize(
    sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """(s_a s_w) sum + b in float32 (Q4): the one definition that every engine equals."""
    out = sums.to(torch.float32) * (row_scale[:, None] * column_scale[None, :])
    return out if bias is None else out.add_(bias)
