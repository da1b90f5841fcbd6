"""Passages with a label, for classification: which of the sources a passage is from.

A passage is a window of `sequence_length` tokens inside one document, and its label the place of
the document's source in `data.sources`. Held-out passages come from held-out documents, so whole
works are unseen. Every source gives equally many passages, in training and in evaluation: guessing
scores 1 / num_labels. Read by batches.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import numpy as np

from skipless.data.loader import permute
from skipless.data.preparing import PreparedData
from skipless.data.shards import Shard, rebuild
from skipless.errors import UserError

if TYPE_CHECKING:
    import torch

Split = Literal["train", "held_out"]


class Passages:
    """Where the passages of every label start in a shard; int64, one array a label."""

    def __init__(self, data: PreparedData, split: Split, sequence_length: int) -> None:
        self.shard = data.train if split == "train" else data.held_out
        self.sequence_length = sequence_length
        found: list[list[np.ndarray]] = [[] for _ in data.sources]
        for source, begin, end in _documents(data, split, self.shard):
            num_passages = (end - begin) // sequence_length
            starts = begin + np.arange(num_passages, dtype=np.int64) * sequence_length
            found[data.sources.index(source)].append(starts)
        self.starts = [np.concatenate(parts or [np.empty(0, np.int64)]) for parts in found]
        for source, starts in zip(data.sources, self.starts, strict=True):
            if not len(starts):
                raise UserError(
                    f"source {source} has no {split.replace('_', '-')} document of "
                    f"{sequence_length} tokens; shorten train.sequence_length or raise "
                    "data.held_out_fraction"
                )

    @property
    def num_labels(self) -> int:
        return len(self.starts)

    def read(self, labels: np.ndarray, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids int64 [n, T], labels int64 [n]) of the passages `numbers` of `labels`."""
        import torch

        at = [self.starts[c][i] for c, i in zip(labels, numbers, strict=True)]
        rows = [self.shard.tokens[a : a + self.sequence_length] for a in at]
        return torch.from_numpy(np.stack(rows).astype(np.int64)), torch.from_numpy(labels)

    def spread(self, batch_size: int, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """About `num_tokens` in batches, as many passages of each label, spread over the text."""
        wanted = max(1, num_tokens // self.sequence_length // self.num_labels)
        each = min(wanted, *(len(starts) for starts in self.starts))
        sizes = np.array([len(starts) for starts in self.starts])
        labels = np.tile(np.arange(self.num_labels, dtype=np.int64), each)
        numbers = np.repeat(np.arange(each, dtype=np.int64), self.num_labels) * sizes[labels]
        numbers //= each
        return [
            self.read(labels[i : i + batch_size], numbers[i : i + batch_size])
            for i in range(0, len(labels), batch_size)
        ]


class PassageLoader:
    """`batch(step)` -> (input_ids [B / world_size, T], labels [B / world_size]), both int64.

    A pure function of (seed, step), like `Loader`. Labels take turns; each goes through its
    passages in an order of its own and begins anew when it has had all.
    """

    def __init__(
        self, passages: Passages, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if batch_size < 1 or batch_size % world_size:
            raise UserError(
                f"batch_size {batch_size} cannot be shared evenly by {world_size} processes; "
                f"choose a multiple of {world_size}"
            )
        self.passages, self.batch_size, self.seed = passages, batch_size, seed
        self.rank, self.world_size = rank, world_size

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) of `step`; see the class."""
        if step < 0:
            raise UserError(f"step is {step}; it counts from 0")
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        turns, labels = np.divmod(np.arange(first, first + share), self.passages.num_labels)
        numbers = np.empty(share, np.int64)
        for label, starts in enumerate(self.passages.starts):
            epochs = turns // len(starts)
            for epoch in np.unique(epochs[labels == label]):
                here = (labels == label) & (epochs == epoch)
                numbers[here] = permute(
                    turns[here] % len(starts), len(starts), seed=self.seed, epoch=int(epoch)
                )
        return self.passages.read(labels, numbers)


def _documents(data: PreparedData, split: Split, shard: Shard) -> list[tuple[str, int, int]]:
    """(source, first token, one past the last) of every document; each ends with a separator."""
    eos, path = shard.header.eos_id, data.directory / "documents.jsonl"
    if eos is None:
        raise UserError(
            "the tokenizer has no separator, so it is unknown where documents end; use "
            "data.tokenizer bpe for classification"
        )
    try:
        with open(path, encoding="utf-8") as lines:  # splitlines would cut at U+2028 in a name
            rows = [json.loads(line) for line in lines]
        sources = [str(source) for source, _, where, _ in rows if where == split]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); {rebuild(data.directory)}") from None
    ends = np.flatnonzero(shard.tokens == eos)
    if len(ends) != len(sources):
        raise UserError(
            f"{shard.path} has {len(ends)} separators and {path.name} names {len(sources)} "
            f"documents; {rebuild(data.directory)}"
        )
    begins = np.concatenate([[0], ends[:-1] + 1])
    return [(s, int(b), int(e)) for s, b, e in zip(sources, begins, ends, strict=True)]
