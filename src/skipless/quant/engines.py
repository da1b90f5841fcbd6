"""Engines: ways to compute one product of integer codes, all with the same integers (Q4).

    name     how                                              range
    float    codes in floating-point matrix products          everything; any device
    vnni     C++, 512-bit vpdpwssd                            W <= 8, A <= 16; such a CPU
    avx2     C++, vpmaddwd                                    W <= 8, A <= 16; such a CPU
    plain    C++ without intrinsics                           W <= 8, A <= 16; any CPU
    int_mm   torch._int_mm, int8 x int8                       W <= 8, A <= 15; CPU, CUDA

`float` is the evaluation-mode simulation of Q4, and what the others are compared with. It picks
the cheapest product that is exact:

    1. float32 while K qw qa < 2^24: every partial sum is an integer that float32 holds
    2. x = h 2^p + l, l in [-2^(p-1), 2^(p-1)): two float32 products, if each part stays below 2^24
    3. float64, exact below 2^53; a device without it (MPS) splits both operands into 8-bit digits
       and K into blocks instead

TF32 and bfloat16 shortcuts for float32 products are not exact, so where they are switched on rule
3 is used. Whatever the engine, `dequantize` ends it: y = (s_a s_w) sum + b in float32, each step
rounded by itself. Which engine is right and fast on this machine is measured in `quant.hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skipless.errors import UserError
from skipless.quant import building
from skipless.quant.packing import COLUMNS, pack_panels

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
        tensors = self.data if isinstance(self.data, tuple) else (self.data,)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Engine:
    """What `quant.integer` calls. `linear` and `sums` take int16 codes [tokens, in]."""

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
        raise UserError(f"engine {self.name!r} has no packed form; use one of {', '.join(ENGINES)}")

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        """Exact sums [tokens, out] in a dtype that holds them."""
        raise UserError(f"engine {self.name!r} computes nothing; use one of {', '.join(ENGINES)}")

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


class FloatEngine(Engine):
    """Codes in floating-point products."""

    name = "float"

    def refuses(self, problem: Problem) -> str:
        too_long = problem.bound >= FLOAT64_EXACT
        return f"{problem.in_features} inputs leave the range of float64" if too_long else ""

    def pack(self, codes: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        # int8 or int16 at rest; a floating-point copy would take the place of the one saved.
        small = torch.int8 if problem.weight_bits <= 8 else torch.int16
        return (codes.to(small).contiguous(),)

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        problem, (weights,) = prepared.problem, prepared.data
        with torch.autocast(codes.device.type, enabled=False):
            if not has_float64(codes.device):
                return sums_by_digits(codes, weights)
            if is_float32_exact(codes.device):
                if problem.bound < FLOAT32_EXACT:
                    # + 0: a product of zero and a negative code must not come out as -0.
                    return (codes.float() @ weights.float().t()).add_(0.0)
                if shift := split_shift(problem):
                    high, low = split(codes, shift)
                    transposed = weights.float().t()
                    high = (high.float() @ transposed).to(torch.int64) << shift
                    return high.add_((low.float() @ transposed).to(torch.int64))
            return (codes.double() @ weights.double().t()).add_(0.0)


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64 (MPS does not)."""
    return device.type != "mps"


def is_float32_exact(device: torch.device) -> bool:
    """Whether float32 matrix products use all 24 bits here, whatever settings the user made."""
    if device.type == "cuda":
        settings = [torch.backends.cuda.matmul]
    elif device.type == "cpu":
        # made when torch.backends.mkldnn is imported, where no checker sees it
        settings = [torch.backends.mkldnn.matmul]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        settings = []
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return False
        return all(s.fp32_precision in ("none", "ieee") for s in [torch.backends, *settings])
    except (RuntimeError, AttributeError):  # old and new settings contradict each other
        return False


def split(codes: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """x = high 2^shift + low with low in [-2^(shift-1), 2^(shift-1)) (Q4)."""
    wide, half = codes.to(torch.int32), 1 << (shift - 1)
    low = ((wide + half) & ((1 << shift) - 1)) - half
    return (wide - low) >> shift, low


def split_shift(problem: Problem) -> int:
    """The p of rule 2, or 0 when no split of the activations alone stays below 2^24."""
    unit = problem.in_features * problem.largest_weight
    for shift in range(problem.activation_bits - 1, 0, -1):
        half = 1 << (shift - 1)
        if unit * half < FLOAT32_EXACT:
            high = (problem.largest_activation + half) >> shift
            return shift if unit * high < FLOAT32_EXACT else 0
    return 0


def sums_by_digits(codes: Tensor, weights: Tensor) -> Tensor:
    """Exact int64 sums with float32 products only: 8-bit digits of both, blocks of K."""
    total = torch.zeros(codes.shape[0], weights.shape[0], dtype=torch.int64, device=codes.device)
    # A high digit reaches 128, so that 2^24 / 128^2 terms are one too many.
    block = FLOAT32_EXACT // (128 * 128) - 1
    for start in range(0, codes.shape[1], block):
        left = split(codes[:, start : start + block], 8)
        right = split(weights[:, start : start + block], 8)
        for i, x in enumerate(left):
            for j, w in enumerate(right):
                part = (x.float() @ w.float().t()).to(torch.int64)
                total += part << (8 * (2 - i - j))
    return total


class KernelEngine(Engine):
    """The C++ kernel at one level."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unavailable(self, device: str) -> str:
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        return building.load(self.name)[1]

    def refuses(self, problem: Problem) -> str:
        if problem.weight_bits > 8:
            return f"its weights have at most 8 bits, not {problem.weight_bits}"
        return self.unavailable(problem.device)

    def prepare(self, codes: Tensor, column_scale: Tensor, problem: Problem) -> Prepared:
        prepared = super().prepare(codes, column_scale, problem)
        missing = -problem.out_features % COLUMNS
        prepared.column_scale = F.pad(prepared.column_scale, (0, missing))
        return prepared

    def pack(self, codes: Tensor, problem: Problem) -> Tensor:
        return pack_panels(codes, nibbles=problem.weight_bits <= 4)

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        out = codes.new_empty(len(codes), prepared.problem.out_features, dtype=torch.int64)
        self._run(prepared, codes, None, None, None, out)
        return out

    def linear(
        self, prepared: Prepared, codes: Tensor, row_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = codes.new_empty(len(codes), prepared.problem.out_features, dtype=torch.float32)
        row_scale = row_scale.contiguous()
        bias = bias if bias is None else bias.float().contiguous()
        self._run(prepared, codes, row_scale, bias, out, None)
        return out

    def _run(self, prepared: Prepared, codes: Tensor, row_scale, bias, out, sums) -> None:
        library, reason = building.load(self.name)
        if library is None:
            raise UserError(f"engine {self.name!r} cannot run: {reason}")
        problem, (_, pairs, _) = prepared.problem, prepared.data.shape
        codes = _aligned(codes, 2 * pairs)
        pair_bound = 2 * problem.largest_weight * problem.largest_activation
        block = (INT32_EXACT - 1) // pair_bound
        library.skipless_multiply(
            codes.data_ptr(), prepared.data.data_ptr(), len(codes), pairs, problem.out_features,
            block, int(problem.weight_bits <= 4), _address(row_scale),
            0 if row_scale is None or len(row_scale) == 1 else 1,
            prepared.column_scale.data_ptr(), _address(bias), _address(out), _address(sums),
            torch.get_num_threads(),
        )  # fmt: skip

    def quantize(
        self, rows: Tensor, bits: int, per_token: bool, step: float
    ) -> tuple[Tensor, Tensor]:
        """int16 codes of float32 `rows` [tokens, in] and scales; `step` < 0: from their absmax."""
        library, reason = building.load(self.name)
        if library is None:
            raise UserError(f"engine {self.name!r} cannot run: {reason}")
        count, width = rows.shape
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        padded = width + width % 2
        codes = torch.empty(count, padded, dtype=torch.int16)
        scales = torch.empty(count if per_token or step > 0 else 1)
        library.skipless_quantize(
            rows.data_ptr(), count, width, rows.stride(0), padded, 2 ** (bits - 1) - 1,
            int(per_token), step, codes.data_ptr(), scales.data_ptr(),
        )  # fmt: skip
        return codes[:, :width], scales


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(codes: Tensor, width: int) -> Tensor:
    """int16 rows `width` apart, as the kernel reads them. The place past an odd row's end may hold
    anything (its weight is zero), but it has to be there."""
    if codes.dtype == torch.int16 and codes.stride() == (width, 1):
        end = codes.storage_offset() + len(codes) * width
        if 2 * end <= codes.untyped_storage().nbytes():
            return codes
    return F.pad(codes.to(torch.int16), (0, width - codes.shape[1])).contiguous()


class IntMmEngine(Engine):
    """torch._int_mm: int8 x int8 -> int32. Wider activations are two int8 digits."""

    name = "int_mm"

    def unavailable(self, device: str) -> str:
        if device not in ("cpu", "cuda"):
            return f"torch._int_mm does not run on {device}"
        try:
            ones = torch.ones(32, 32, dtype=torch.int8, device=device)
            torch._int_mm(ones, ones)
        except (RuntimeError, AttributeError, AssertionError) as error:
            return f"torch._int_mm does not run: {str(error).splitlines()[0]}"
        return ""

    def refuses(self, problem: Problem) -> str:
        if problem.weight_bits > 8 or problem.activation_bits > 15:
            return "two int8 digits hold activations of 15 bits, and weights have to fit in one"
        if problem.in_features * problem.largest_weight * 128 >= INT32_EXACT:
            return f"{problem.in_features} inputs leave the range of int32"
        return self.unavailable(problem.device)

    def pack(self, codes: Tensor, problem: Problem) -> Tensor:
        # cuBLAS wants multiples of 8 and the weight column by column.
        return _padded(codes.to(torch.int8), 8, 8)

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        out = prepared.problem.out_features
        if prepared.problem.activation_bits <= 8:
            return self._product(prepared, codes)[: len(codes), :out]
        high, low = split(codes, 8)
        high = self._product(prepared, high)[: len(codes), :out].to(torch.int64) << 8
        return high.add_(self._product(prepared, low)[: len(codes), :out])

    def _product(self, prepared: Prepared, codes: Tensor) -> Tensor:
        cuda = codes.device.type == "cuda"
        rows = _padded(codes.to(torch.int8), 32 if cuda else 1, 8)
        return torch._int_mm(rows, prepared.data.t())


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    missing = (-matrix.shape[0] % rows, -matrix.shape[1] % columns)
    return F.pad(matrix, (0, missing[1], 0, missing[0])).contiguous()


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (*map(KernelEngine, building.LEVELS), IntMmEngine(), FloatEngine())
}
