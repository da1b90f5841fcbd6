"""A Hadamard rotation of any width: as a matrix, and applied in few operations (Q5).

H/sqrt(n) with entries +-1 spreads every outlier channel over all channels. Orders 2^k times 1, 12,
20, 28 or 36 are built from Paley's two constructions; another width gets blocks of the largest
power of two that divides it, or, where that is below 16, a random orthogonal matrix. Signs of the
channels are drawn first (seed: the width), so that a channel-wise constant does not become an
outlier itself. Read by the methods `hadamard` and `stream`, and by `skipless.diagnose`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from skipless.quant.replacing import moved

P = ParamSpec("P")
T = TypeVar("T")
_SEEDS = {12: ("one", 11), 20: ("one", 19), 28: ("two", 13), 36: ("two", 17)}


def _kept(number: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator of what is computed once in a process, the last `number` results: on the CPU and
    outside of inference mode, since who asks next may be elsewhere, or want gradients."""

    def kept(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(maxsize=number)
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.inference_mode(False), torch.device("cpu"):
                return function(*args, **kwargs)

        return cast(Callable[P, T], called)

    return kept


@_kept(8)
def rotation(width: int) -> Tensor:
    """An orthogonal matrix [width, width], float32; the same one each time."""
    generator = torch.Generator().manual_seed(width)
    signs = torch.randint(2, (width, 1), generator=generator).float() * 2 - 1
    core = hadamard(width)
    if core is None:
        block = width & -width
        if block < 16:
            drawn = torch.randn(width, width, dtype=torch.float64, generator=generator)
            return torch.linalg.qr(drawn).Q.float()
        core = torch.block_diag(*[hadamard(block)] * (width // block))  # type: ignore[list-item]
        return signs * core / block**0.5
    return signs * core / width**0.5


class Rotate:
    """x -> x R with R = `rotation(width)`, or R^T; [..., width] of any dtype.

    R = diag(signs) (S kron C) with S Sylvester's matrix of order P and C of order m, P m = width:
    P + m multiplications a channel instead of P m.
    """

    def __init__(self, width: int, *, inverse: bool = False) -> None:
        self.width, self.inverse = width, inverse
        self._held: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        held = self._held
        if held is None or (held[0].device, held[0].dtype) != (x.device, x.dtype):
            signs, outer, inner = _factors(self.width, x.dtype)
            self._held = held = moved(signs, x), moved(outer, x), moved(inner, x)
        signs, outer, inner = held
        if self.inverse:
            turned = (outer @ (x.unflatten(-1, (outer.shape[0], -1)) @ inner.T)).flatten(-2)
            return turned * signs
        x = (x * signs).unflatten(-1, (outer.shape[0], -1))
        return (outer.T @ (x @ inner)).flatten(-2)


@_kept(32)
def _factors(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Signs [width], outer [P, P] and inner [m, m] with R = diag(signs) (outer kron inner)."""
    if hadamard(width) is None and width & -width < 16:  # one random orthogonal matrix
        found = torch.ones(width), torch.ones(1, 1), nearest_orthogonal(rotation(width))
        return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)
    generator = torch.Generator().manual_seed(width)
    signs = (torch.randint(2, (width,), generator=generator).double() * 2 - 1).to(dtype)
    if hadamard(width) is None:  # blocks of the largest power of two
        block = width & -width
        sylvester = hadamard(block)
        assert sylvester is not None
        outer, inner = torch.eye(width // block), sylvester.double() / block**0.5
        return signs, outer.to(dtype), inner.to(dtype)
    size = next(n for n in (1, *_SEEDS) if _is_power(width, n))
    inner, outer = hadamard(size), hadamard(width // size)
    assert inner is not None and outer is not None
    if size == 1:  # a power of two splits in two itself
        half = 2 ** ((width.bit_length() - 1) // 2)
        inner, outer = hadamard(half), hadamard(width // half)
        assert inner is not None and outer is not None
    return signs, outer.to(dtype), (inner.double() / width**0.5).to(dtype)


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix next to one that is orthogonal up to float32's rounding, float64.

    Newton-Schulz: an error e becomes 3/8 e^2 in a step; two of them reach float64's rounding.
    """
    wide = matrix.double()
    for _ in range(2):
        wide = 1.5 * wide - 0.5 * wide @ (wide.mT @ wide)
    return wide


def _is_power(width: int, size: int) -> bool:
    power, rest = divmod(width, size)
    return rest == 0 and power > 0 and power & (power - 1) == 0


def hadamard(order: int) -> Tensor | None:
    """A matrix of +-1 with orthogonal rows [order, order], float32; None where none is built."""
    for size in (1, *_SEEDS):
        if _is_power(order, size):
            power = order // size
            found = torch.ones(1, 1) if size == 1 else _paley(*_SEEDS[size])
            found = found.float()  # whatever torch's default is; the numbers are whole
            while power > 1:
                found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
                power //= 2
            return found
    return None


def _paley(kind: str, q: int) -> Tensor:
    """Paley's matrix of order q + 1 (kind one, q = 3 mod 4) or 2 (q + 1) (two, q = 1 mod 4)."""
    squares = {x * x % q for x in range(1, q)}
    values = torch.tensor([0.0] + [1.0 if x in squares else -1.0 for x in range(1, q)])
    index = torch.arange(q)
    jacobsthal = values[(index[:, None] - index[None, :]) % q]
    border = torch.zeros(q + 1, q + 1)
    border[1:, 1:] = jacobsthal
    border[0, 1:] = 1.0
    border[1:, 0] = -1.0 if kind == "one" else 1.0
    if kind == "one":
        return border + torch.eye(q + 1)
    a, b = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(border, a) + torch.kron(torch.eye(q + 1), b)
