"""Batches as a pure function of (seed, step): nothing to save, nothing to lose on resume.

The shard is cut into windows of `sequence_length` tokens that do not overlap. Every epoch visits
each window once, in an order given by a keyed permutation that is computed, not stored, so a
corpus of any size costs no memory and any step can be asked for directly. With several processes
each takes its slice of the same global batch. Read by `skipless.train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from skipless.data.shards import Shard, beyond_vocabulary
from skipless.errors import UserError

if TYPE_CHECKING:
    import torch

_ROUNDS = 6


class Loader:
    """`loader.batch(step)` -> (input_ids, labels), int64 [batch_size / world_size, T] each.

    labels are the next tokens: labels[b, t] follows input_ids[b, t] in the text. Raises UserError
    if the shard holds less than one window or the batch cannot be shared evenly.
    """

    def __init__(
        self,
        shard: Shard,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.shard = shard
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.num_windows = count_windows(shard, sequence_length)
        if batch_size < 1 or batch_size % world_size:
            raise UserError(
                f"batch_size {batch_size} cannot be shared evenly by {world_size} processes; "
                f"choose a multiple of {world_size}"
            )
        if not 0 <= rank < world_size:
            raise UserError(
                f"rank is {rank}; with {world_size} processes it is 0 to {world_size - 1}"
            )

    def windows(self, step: int) -> np.ndarray:
        """Window numbers of this rank's rows at `step`, int64 [batch_size / world_size]."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        position = np.arange(first, first + share)
        epochs, offsets = position // self.num_windows, position % self.num_windows
        out = np.empty(share, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permute(offsets[here], self.num_windows, seed=self.seed, epoch=int(epoch))
        return out

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) of `step`; see the class."""
        if step < 0:
            raise UserError(f"step is {step}; it counts from 0")
        return read_windows(self.shard, self.sequence_length, self.windows(step))


def evaluation_batches(
    shard: Shard, sequence_length: int, batch_size: int, num_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A fixed list of (input_ids, labels), int64 [<= batch_size, T], about `num_tokens` in all.

    Windows are spread evenly over the shard, so that few tokens still see every document; more
    tokens than there are means all windows. The last batch may be smaller. Raises UserError if
    the shard holds less than one window.
    """
    available = count_windows(shard, sequence_length)
    if num_tokens < 1 or batch_size < 1:
        raise UserError(
            f"evaluation over {num_tokens} tokens in batches of {batch_size}; both must be at "
            "least 1"
        )
    wanted = min(available, -(-num_tokens // sequence_length))
    windows = np.arange(wanted, dtype=np.int64) * available // wanted
    return [
        read_windows(shard, sequence_length, windows[i : i + batch_size])
        for i in range(0, wanted, batch_size)
    ]


def count_windows(shard: Shard, sequence_length: int) -> int:
    """How many windows of `sequence_length` (and one token more) the shard holds; at least 1."""
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}; it must be at least 1")
    num_windows = (shard.num_tokens - 1) // sequence_length
    if num_windows < 1:
        raise UserError(
            f"sequence_length {sequence_length} is longer than the text: {shard.path} holds "
            f"{shard.num_tokens} tokens; choose at most {max(shard.num_tokens - 1, 1)} or add text"
        )
    return num_windows


def read_windows(
    shard: Shard, sequence_length: int, windows: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels) of the given window numbers, int64 [len(windows), sequence_length]."""
    import torch

    rows = [shard.tokens[w * sequence_length : (w + 1) * sequence_length + 1] for w in windows]
    block = np.stack(rows).astype(np.int64)
    if block.max() >= shard.vocab_size:  # a shard changed since it was verified
        raise beyond_vocabulary(shard.path, int(block.max()), shard.vocab_size)
    tokens = torch.from_numpy(block)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def permute(index: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """A pseudorandom permutation of range(size), evaluated at `index`, int64 in and out.

    A Feistel network on the smallest even number of bits that holds `size`; values that fall
    outside are sent through again until they fall inside (cycle walking), which keeps it one to
    one. The same (size, seed, epoch) is the same order everywhere.
    """
    bits = max((size - 1).bit_length(), 2)
    half = np.uint64((bits + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(_ROUNDS, np.uint64)
    value = np.asarray(index).astype(np.uint64)
    pending = np.ones(value.shape, bool)
    while pending.any():
        left, right = value[pending] >> half, value[pending] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value[pending] = (left << half) | right
        pending[pending] = value[pending] >= np.uint64(size)
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
