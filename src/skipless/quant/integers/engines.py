"""Engines: ways to compute one product of integer codes, all with the same integers (Q4).

    name     how                                              range
    float    codes in floating-point matrix products          everything; any device
    vnni     C++, 512-bit vpdpwssd                            W <= 8, A <= 16; such a CPU
    avx2     C++, vpmaddwd                                    W <= 8, A <= 16; such a CPU
    plain    C++ without intrinsics                           W <= 8, A <= 16; any CPU
    int_mm   torch._int_mm, int8 x int8                       W <= 8, A <= 15; CPU, CUDA
    onnxruntime  its MatMulInteger, where installed           W <= 8, A <= 8; CPU

`float` is the evaluation-mode simulation of Q4, and what the others are compared with. It picks
the cheapest product that is exact:

    1. float32 while K qw qa < 2^24: every partial sum is an integer that float32 holds
    2. x = h 2^p + l, l in [-2^(p-1), 2^(p-1)): two float32 products, if each part stays below 2^24
    3. float64, exact below 2^53; a device without it (MPS) splits both operands into 8-bit digits
       and K into blocks instead

TF32 and bfloat16 shortcuts for float32 products are not exact, so where they are switched on rule
3 is used. Whatever the engine, `dequantize` ends it: y = (s_a s_w) sum + b in float32, each step
rounded by itself. Which engine is right and fast on this machine is measured in `hardware`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from skipless.quant.integers import building
from skipless.quant.integers.native import KernelEngine
from skipless.quant.integers.onnx_engine import OnnxRuntimeEngine
from skipless.quant.integers.products import (
    FLOAT32_EXACT,
    FLOAT64_EXACT,
    INT32_EXACT,
    Engine,
    Prepared,
    Problem,
    dequantize,
)

__all__ = [
    "ENGINES",
    "FLOAT32_EXACT",
    "FLOAT64_EXACT",
    "INT32_EXACT",
    "Engine",
    "FloatEngine",
    "IntMmEngine",
    "KernelEngine",
    "Prepared",
    "Problem",
    "dequantize",
    "has_float64",
    "is_float32_exact",
    "split",
    "split_shift",
    "sums_by_digits",
]


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
    for engine in (
        *map(KernelEngine, building.LEVELS),
        IntMmEngine(),
        OnnxRuntimeEngine(),
        FloatEngine(),
    )  # fmt: skip
}
