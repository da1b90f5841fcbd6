"""The C++ engines: products of integer codes by the kernel at one level (Q4).

Weights are packed in one of two forms (`packing`): pairs for 16-bit products, quads for the 8-bit
ones of a processor with AVX512-VNNI and activations of at most 8 bits. `linear` starts from codes,
`from_floats` from a float32 activation, whose codes are made in the same call. Read by
`integers.engines`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from skipless.errors import UserError
from skipless.quant.integers import building
from skipless.quant.integers.packing import COLUMNS, group_size, pack_panels
from skipless.quant.integers.products import INT32_EXACT, Engine, Prepared, Problem


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
        return pack_panels(codes, nibbles=problem.weight_bits <= 4, quads=self.has_quads(problem))

    def has_quads(self, problem: Problem) -> bool:
        """Whether the weights of this product are packed in quads."""
        fits = problem.activation_bits <= 8 and problem.bound < INT32_EXACT
        return fits and bool(self._library().skipless_has_quads())

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        out = codes.new_empty(len(codes), prepared.problem.out_features, dtype=torch.int64)
        self._run(prepared, codes, None, None, None, out)
        return out

    def linear(
        self, prepared: Prepared, codes: Tensor, row_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = codes.new_empty(len(codes), prepared.problem.out_features, dtype=torch.float32)
        row_scale = row_scale.contiguous()
        self._run(prepared, codes, row_scale, _contiguous(bias), out, None)
        return out

    def from_floats(
        self, prepared: Prepared, rows: Tensor, per_token: bool, step: float, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(float32 [tokens, out], scales) of float32 `rows` [tokens, in]; see `quantize`."""
        problem, data = prepared.problem, prepared.data
        _check_width(rows, problem)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        bias = _contiguous(bias)
        count, width = rows.shape
        out = _empty(torch.float32, count, problem.out_features)
        scales = _empty(torch.float32, count if per_token or step > 0 else 1)
        form, block = self.form(prepared)
        self._library().skipless_linear(
            rows.data_ptr(), count, width, rows.stride(0), problem.largest_activation,
            int(per_token), step, data.data_ptr(), form, data.shape[1], problem.out_features, block,
            prepared.column_scale.data_ptr(), _address(bias), scales.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out, scales

    def quantize(
        self, rows: Tensor, bits: int, per_token: bool, step: float
    ) -> tuple[Tensor, Tensor]:
        """int16 codes of float32 `rows` [tokens, in] and scales; `step` < 0: from their absmax."""
        _check_place(rows)
        count, width = rows.shape
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        padded = width + -width % 8
        codes = _empty(torch.int16, count, padded)
        scales = _empty(torch.float32, count if per_token or step > 0 else 1)
        self._library().skipless_quantize(
            rows.data_ptr(), count, width, rows.stride(0), padded, 2 ** (bits - 1) - 1,
            int(per_token), step, codes.data_ptr(), scales.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return codes[:, :width], scales

    def _run(self, prepared: Prepared, codes: Tensor, row_scale, bias, out, sums) -> None:
        problem, data = prepared.problem, prepared.data
        _check_width(codes, problem)
        form, block = self.form(prepared)
        codes = _aligned(codes, data.shape[1] * _group(form))
        self._library().skipless_multiply(
            codes.data_ptr(), data.data_ptr(), form, len(codes), data.shape[1],
            problem.out_features, block, _address(row_scale),
            0 if row_scale is None or len(row_scale) == 1 else 1,
            prepared.column_scale.data_ptr(), _address(bias), _address(out), _address(sums),
            torch.get_num_threads(),
        )  # fmt: skip

    def form(self, prepared: Prepared) -> tuple[int, int]:
        """(the kernel's number for the packed form, groups whose sum fits in 32 bits)."""
        problem = prepared.problem
        form = 2 * self.has_quads(problem) + (problem.weight_bits <= 4)
        if form >= 2:  # only where the whole sum fits: parts of it, which wrapped, do not add up
            return form, prepared.data.shape[1]
        bound = _group(form) * problem.largest_weight * problem.largest_activation
        return form, (INT32_EXACT - 1) // bound

    def _library(self):
        return building.loaded(self.name)


def _group(form: int) -> int:
    return group_size(nibbles=form % 2 == 1, quads=form >= 2)


def _check_width(rows: Tensor, problem: Problem) -> None:
    """UserError for rows elsewhere or of another width: the kernel takes addresses and cannot
    look."""
    _check_place(rows)
    if rows.dim() != 2 or rows.shape[1] != problem.in_features:
        raise UserError(
            f"the product takes rows of {problem.in_features} inputs, not {list(rows.shape)}; give "
            f"[tokens, {problem.in_features}]"
        )


def _check_place(rows: Tensor) -> None:
    if rows.device.type != "cpu":
        raise UserError(
            f"the C++ kernel reads memory of the CPU and the rows are on {rows.device}; move them "
            "with .cpu(), or use the engine 'float'"
        )


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """Memory for the kernel to write to, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(codes: Tensor, width: int) -> Tensor:
    """int16 rows `width` apart, zeros past the last input, as the kernel reads them."""
    if codes.dtype == torch.int16 and codes.shape[1] == width and codes.is_contiguous():
        return codes
    return F.pad(codes.to(torch.int16), (0, width - codes.shape[1])).contiguous()
