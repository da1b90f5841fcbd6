"""Cut matrices into uniform blocks, so that blocks of many matrices share one batched matmul.

A parameter becomes `stack` matrices of m x n (experts, split QKV, kernels flattened behind the
output channel), each cut into kr x kc blocks of bm x bn. Sides that do not divide are padded with
zeros; `rows` and `cols` keep the true counts, so padding never enters an average.
Legend: m rows (out), n columns (in), bm x bn one block, K blocks in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from skipless.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one parameter is cut. `shape` is the parameter's own shape."""

    shape: tuple[int, ...]
    stack: int
    m: int
    n: int
    bm: int
    bn: int

    @property
    def kr(self) -> int:
        return -(-self.m // self.bm)

    @property
    def kc(self) -> int:
        return -(-self.n // self.bn)

    @property
    def num_blocks(self) -> int:
        return self.stack * self.kr * self.kc

    @property
    def padded(self) -> bool:
        return self.kr * self.bm != self.m or self.kc * self.bn != self.n

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.bm, self.bn

    @cached_property
    def rows(self) -> list[int]:
        """True rows of each block, in block order."""
        each = [min(self.bm, self.m - i * self.bm) for i in range(self.kr)]
        return [r for _ in range(self.stack) for r in each for _ in range(self.kc)]

    @cached_property
    def cols(self) -> list[int]:
        """True columns of each block, in block order."""
        each = [min(self.bn, self.n - j * self.bn) for j in range(self.kc)]
        return each * (self.stack * self.kr)

    def to_blocks(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[*shape] -> [K, bm, bn] in `dtype`; a view where one block needs no copy."""
        x = x.reshape(self.stack, self.m, self.n).to(dtype)
        if self.padded:
            x = F.pad(x, (0, self.kc * self.bn - self.n, 0, self.kr * self.bm - self.m))
        x = x.view(self.stack, self.kr, self.bm, self.kc, self.bn).transpose(2, 3)
        return x.reshape(self.num_blocks, self.bm, self.bn)

    def from_blocks(self, blocks: Tensor) -> Tensor:
        """[K, bm, bn] -> [*shape]."""
        x = blocks.view(self.stack, self.kr, self.kc, self.bm, self.bn).transpose(2, 3)
        x = x.reshape(self.stack, self.kr * self.bm, self.kc * self.bn)
        return x[:, : self.m, : self.n].reshape(self.shape)


def side(length: int, block_size: int | None) -> int:
    """Block side for a matrix side: the fewest blocks of at most `block_size`, equally long.

    A side of no length has no block, of side 1, so that the count of blocks is still defined.
    """
    length = max(length, 1)
    if block_size is None or length <= block_size:
        return length
    return math.ceil(length / math.ceil(length / block_size))


def make_layout(
    shape: tuple[int, ...], *, block_size: int | None, convolution: bool = False, split: int = 1
) -> Layout:
    """Layout of a parameter of `shape`.

    Two dimensions are one matrix; three are a stack of matrices (experts); a convolution kernel
    [out, in, *k] is out x (in * k). `split` cuts the rows into that many independent matrices
    first (fused QKV: 3, or one per head). Raises UserError when rows do not divide by `split`.
    """
    if block_size is not None and block_size < 1:
        raise UserError(f"block_size is {block_size}; it must be positive, or None for no blocks")
    shape = tuple(shape)
    if convolution or len(shape) == 2:
        stack, m, n = 1, shape[0], math.prod(shape[1:])
    elif len(shape) < 2:
        stack, m, n = 1, 1, math.prod(shape)
    else:
        stack, m, n = math.prod(shape[:-2]), shape[-2], shape[-1]
    if m % split:
        raise UserError(f"a matrix of {m} rows cannot be split into {split} equal parts")
    stack, m = stack * split, m // split
    return Layout(
        shape=shape, stack=stack, m=m, n=n, bm=side(m, block_size), bn=side(n, block_size)
    )
