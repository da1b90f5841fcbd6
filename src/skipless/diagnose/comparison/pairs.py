"""The same tokens for two models from the command line: one text, cut alike by both tokenizers.

Read by the command line.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from skipless.diagnose.loading import Subject
from skipless.diagnose.texts import Text, read_batches
from skipless.errors import UserError


def read_same(
    subjects: list[Subject],
    text: str | None,
    data: str | None,
    num_tokens: int,
    length: int | None,
) -> Text:
    """Batches that every subject takes, as `read_batches` makes them.

    A subject without a tokenizer gets the ids of the others, if its vocabulary holds them. Raises
    UserError as `read_batches` does, and for tokenizers that cut the text differently, runs whose
    held-out texts differ, and ids beyond a vocabulary.
    """
    known = [subject for subject in subjects if subject.tokenizer is not None] or subjects[:1]
    limits = [subject.limit for subject in subjects if subject.limit is not None]
    if text is None and data is None and any(subject.run is None for subject in subjects):
        raise UserError(
            "there is no text that all these models were held out from; give --text FILE, or "
            "--data NAME (`skipless data list` shows names)"
        )
    limit = min(limits, default=None)
    found = [
        read_batches(replace(subject, limit=limit), text, data, num_tokens, length)
        for subject in known
    ]
    for (one, other), (first, second) in zip(pairwise(known), pairwise(found), strict=True):
        _check_equal(one, other, first.batches, second.batches, text or data)
    for subject in subjects:
        _check_vocabulary(subject, found[0].batches)
    return found[0]


def _ids(batch: Any) -> Tensor:
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _check_equal(a: Subject, b: Subject, of_a: list, of_b: list, text: str | None) -> None:
    one, two = ([_ids(batch) for batch in batches] for batches in (of_a, of_b))
    if len(one) == len(two) and all(map(torch.equal, one, two)):
        return
    if text is None:
        raise UserError(
            f"{a.name} and {b.name} hold out other texts, or cut them differently; give --text "
            "FILE or --data NAME"
        )
    places = [(row, other) for x, y in zip(one, two, strict=False)
              for row, other in zip(x.tolist(), y.tolist(), strict=False)]  # fmt: skip
    first = next(
        ((i, p, q) for row, other in places
         for i, (p, q) in enumerate(zip(row, other, strict=False)) if p != q), None,
    )  # fmt: skip
    where = "" if first is None else (
        f", first at position {first[0]} ({a.tokenizer.decode([first[1]])!r}, id {first[1]}, and "
        f"{b.tokenizer.decode([first[2]])!r}, id {first[2]})"
    )  # fmt: skip
    raise UserError(
        f"{a.name} and {b.name} cut {text} into different tokens{where}, so that they cannot be "
        "compared token by token; diagnose each alone, then compare the two folders: `skipless "
        "diagnose DIR_A --against DIR_B --out DIR`"
    )


def _check_vocabulary(subject: Subject, batches: list) -> None:
    table = next((m for m in subject.model.modules() if isinstance(m, torch.nn.Embedding)), None)
    largest = max(int(_ids(batch).max()) for batch in batches)
    if table is not None and largest >= table.num_embeddings:
        raise UserError(
            f"{subject.name} knows token ids below {table.num_embeddings:,} and the text has id "
            f"{largest:,}: its tokenizer is another one; compare models of one tokenizer"
        )
