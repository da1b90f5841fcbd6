"""The batches of a run: windows of the next token (loader.py) or, where `model.num_labels` is set,
passages with a label (labelled.py). Read by training and whatever measures a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skipless.config import RunConfig
from skipless.data.labelled import PassageLoader, Passages, Split
from skipless.data.loader import Loader, evaluation_batches
from skipless.data.preparing import PreparedData
from skipless.errors import UserError

if TYPE_CHECKING:
    import torch


def open_loader(
    config: RunConfig, data: PreparedData, rank: int = 0, world_size: int = 1
) -> Loader | PassageLoader:
    """The training batches of a run: `.batch(step)` -> (input_ids [B, T], labels).

    labels are [B, T], the next tokens, or [B] where the model classifies. Raises UserError as the
    two loaders do, and for text whose vocabulary the model does not have.
    """
    train = config.train
    data.train.check_vocabulary(config.model.vocab_size)
    sizes = (train.sequence_length, train.batch_size, train.seed, rank, world_size)
    if config.model.num_labels is None:
        return Loader(data.train, *sizes)
    _check_labels(config, data)
    return PassageLoader(Passages(data, "train", train.sequence_length), *sizes[1:])


def open_batches(
    config: RunConfig, data: PreparedData, split: Split, batch_size: int, num_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A fixed list of (input_ids, labels) of a split, about `num_tokens` in all.

    Raises UserError for text whose vocabulary the model does not have.
    """
    length = config.train.sequence_length
    shard = data.train if split == "train" else data.held_out
    shard.check_vocabulary(config.model.vocab_size)
    if config.model.num_labels is None:
        return evaluation_batches(shard, length, batch_size, num_tokens)
    _check_labels(config, data)
    return Passages(data, split, length).spread(batch_size, num_tokens)


def _check_labels(config: RunConfig, data: PreparedData) -> None:
    if config.model.num_labels != len(data.sources):
        raise UserError(
            f"model.num_labels is {config.model.num_labels} and there are {len(data.sources)} "
            f"sources ({', '.join(data.sources)}); a passage's label is its source, so the two "
            "must be equal"
        )
