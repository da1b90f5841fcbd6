"""One quantised parameter: what it was, what it is, and its integer codes (Q1).

Read by `quant.apply`, the methods that choose codes (`gptq`, `codebook`) and `quant.integers`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant.fake import Codes, fake_quantize, integer_codes
from skipless.quant.targets import WeightTarget
from skipless.scheme import Scheme


@dataclass(kw_only=True)
class QuantizedWeight:
    """A parameter with the tensor that is not in use: full precision while quantised."""

    name: str
    parameter: nn.Parameter
    stored: Tensor
    scheme: Scheme
    transposed: bool = False
    layer: int | None = None
    version: int = 0
    in_use: bool = False
    """Whether the quantised values are in the parameter."""
    columns: Tensor | None = None
    """int64: input channels that stay in full precision."""
    reconstructed: Codes | None = None
    """Codes chosen otherwise than by rounding to the nearest, of the matrix [out, in]."""
    is_uniform: bool = True
    """False for a codebook, whose values are no multiples of a step."""

    @property
    def is_changed(self) -> bool:
        """Whether something wrote into the parameter since it was rounded: training, loading."""
        return self.parameter._version != self.version

    def check_unchanged(self) -> None:
        """Raise UserError when the codes are no longer those of the values in use."""
        if self.is_changed:
            raise UserError(
                f"{self.name} changed after quantize(), so its codes are not those of the values "
                "in use; restore(model, discard_changes=True) and quantise it again"
            )

    def swap(self) -> None:
        """Exchange the tensor in use and the stored one."""
        current = self.parameter.data
        self.parameter.data = self.stored.to(current.device, current.dtype)
        self.stored = current
        self.version = self.parameter._version
        self.in_use = not self.in_use

    def matrix(self) -> Tensor:
        """The tensor in use as [out, in], a kernel as [out, in * k]."""
        return as_matrix(self.parameter.data, self.transposed)

    def replace(self, matrix: Tensor, codes: Codes | None) -> None:
        """Quantised values [out, in] other than the nearest; only while full precision is in use.

        `codes` is None for values that are no multiples of a step. Channels in `columns` keep
        their values.
        """
        exact = self.matrix()
        matrix = matrix.to(exact.dtype)
        if self.columns is not None:
            matrix = matrix.clone()
            matrix[:, self.columns] = exact[:, self.columns]
        shaped = matrix.t().contiguous() if self.transposed else matrix
        self.stored = shaped.reshape(self.parameter.shape)
        self.reconstructed, self.is_uniform = codes, codes is not None

    def codes(self) -> Codes:
        """int32 codes and scale of the matrix [out, in] while quantised; by groups, if any.

        Raises UserError for a codebook and where columns stay in full precision.
        """
        if not self.is_uniform:
            raise UserError(f"{self.name} has a codebook; its values are no integers times a step")
        if self.columns is not None and self.columns.numel():
            raise UserError(
                f"{self.name} keeps {self.columns.numel()} input channels in full precision, which "
                "integers do not hold; quantise without the method outliers"
            )
        device = self.parameter.device
        if self.reconstructed is not None:
            codes, scale = self.reconstructed
            return Codes(codes.to(device, torch.int32), scale.to(device))
        matrix = as_matrix(self.stored, self.transposed).to(device)
        return integer_codes(
            matrix, self.scheme.weight_bits, granularity=self.scheme.weight_granularity,
            symmetric=self.scheme.symmetric, clip=self.scheme.clip,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict) -> QuantizedWeight:
        parameter = copy.deepcopy(self.parameter, memo)
        twin = QuantizedWeight(
            name=self.name, parameter=parameter, stored=self.stored.clone(), scheme=self.scheme,
            transposed=self.transposed, layer=self.layer, in_use=self.in_use, columns=self.columns,
            reconstructed=self.reconstructed, is_uniform=self.is_uniform,
        )  # fmt: skip
        memo[id(self)] = twin
        twin._count_from(self.is_changed)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"version": self.is_changed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._count_from(bool(self.version))

    def _count_from(self, is_changed: bool) -> None:
        """Copied and unpickled parameters count their changes from the start."""
        self.version = self.parameter._version - is_changed


def as_matrix(weight: Tensor, transposed: bool) -> Tensor:
    """A weight [out, in], or [in, out] when `transposed`, as [out, in]; a kernel [out, in, *k] as
    [out, in * k]. A view where it can be one."""
    if transposed:
        return weight.t()
    return weight.flatten(1) if weight.dim() > 2 else weight


def quantize_weight(weight: Tensor, scheme: Scheme, *, transposed: bool = False) -> Tensor:
    """A weight [out, in, ...] (or [in, out] when `transposed`) after rounding to the grid (Q1).

    A kernel [out, in, *k] is rounded as the matrix [out, in * k].
    """
    with torch.no_grad():
        matrix = as_matrix(weight.detach(), transposed)
        rounded = fake_quantize(
            matrix, scheme.weight_bits, granularity=scheme.weight_granularity,
            symmetric=scheme.symmetric, clip=scheme.clip,
        )  # fmt: skip
        return rounded.t().contiguous() if transposed else rounded.reshape(weight.shape)


def round_weight(target: WeightTarget, columns: Tensor | None = None) -> QuantizedWeight:
    """A target rounded to the nearest codes, `columns` left as they are; not yet in use.

    Raises UserError, naming it, for a weight that is not finite, on the meta device, or made under
    torch.inference_mode().
    """
    parameter, scheme = target.parameter, target.scheme
    if torch.is_inference(parameter):
        raise UserError(
            f"{target.name} was made under torch.inference_mode(), where torch does not tell "
            "changes; make or load the model outside of it"
        )
    if parameter.is_meta:
        raise UserError(f"{target.name} is on the meta device; load or initialise the model first")
    if not bool(torch.isfinite(parameter).all()):
        raise UserError(
            f"{target.name} holds NaN or infinity; train or load the model again before "
            "quantising it"
        )
    source = parameter.detach()
    if columns is not None:
        columns = columns.to(source.device)
        source = source.clone()
        (source.t() if target.transposed else source)[:, columns] = 0
    try:
        rounded = quantize_weight(source, scheme, transposed=target.transposed)
    except UserError as error:
        raise UserError(f"{target.name}: {error}") from None
    if columns is not None:
        if target.transposed:
            rounded[columns] = parameter.detach()[columns]
        else:
            rounded[:, columns] = parameter.detach()[:, columns]
    return QuantizedWeight(
        name=target.name, parameter=parameter, stored=rounded, scheme=scheme,
        transposed=target.transposed, layer=target.layer, columns=columns,
    )  # fmt: skip
