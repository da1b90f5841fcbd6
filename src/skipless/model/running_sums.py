"""Sums over the tokens up to each one, and over the tokens from each one on.

torch's cumsum walks along the tokens of one channel at a time, which on the CPU is a cache line a
number: at [512, 1024] in float64 it takes 12 ms on one thread, these 1 (AMD EPYC). Read by
`aligned_join.py` and `token_statistics.py`. Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from torch import Tensor

ROWS = 8
"""Rows of a block; few blocks and few rows are few calls."""


def running_sums_(x: Tensor, start: Tensor | None = None) -> Tensor:
    """In place: x_t <- start + x_0 + ... + x_t, for x [B, T, D] and `start` [B, D]. Returns x.

    The sum at t is a function of tokens up to t alone, bit for bit and also where later ones are
    not finite.
    """
    if start is not None:
        x[:, 0] += start
    if x.device.type != "cpu":
        return x.cumsum_(1)
    length = x.shape[1]
    whole = length // ROWS * ROWS
    blocks = x[:, :whole].unflatten(1, (whole // ROWS, ROWS))
    for row in range(1, ROWS):
        blocks[:, :, row] += blocks[:, :, row - 1]
    for block in range(1, blocks.shape[1]):
        blocks[:, block] += blocks[:, block - 1, -1:]
    for row in range(max(whole, 1), length):
        x[:, row] += x[:, row - 1]
    return x


def suffix_sums_(x: Tensor, start: Tensor | None = None) -> Tensor:
    """In place: x_t <- x_t + ... + x_{T-1} + start, for x [B, T, D] and `start` [B, D]. Returns
    x."""
    if start is not None:
        x[:, -1] += start
    if x.device.type != "cpu":
        return x.copy_(x.flip(1).cumsum_(1).flip(1))
    length = x.shape[1]
    first = length % ROWS
    blocks = x[:, first:].unflatten(1, ((length - first) // ROWS, ROWS))
    for row in range(ROWS - 2, -1, -1):
        blocks[:, :, row] += blocks[:, :, row + 1]
    for block in range(blocks.shape[1] - 2, -1, -1):
        blocks[:, block] += blocks[:, block + 1, :1]
    for row in range(min(first, length - 1) - 1, -1, -1):
        x[:, row] += x[:, row + 1]
    return x
