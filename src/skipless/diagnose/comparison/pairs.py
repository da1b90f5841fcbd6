"""The same inputs for two models from the command line: text, images or sound read alike by both.

A subject without a tokenizer or processor of its own takes what the other's make. Read by the
command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from skipless.diagnose.loading import Subject
from skipless.diagnose.media import has_processor, read_media
from skipless.diagnose.texts import Text, read_batches
from skipless.errors import UserError

_WRITTEN = ("input_ids", "decoder_input_ids")


def read_same(
    subjects: Sequence[Subject],
    text: str | None,
    data: str | None,
    num_tokens: int,
    length: int | None,
) -> Text:
    """Batches that every subject takes, as `read_batches` makes them.

    Raises UserError as `read_batches` does, and for tokenizers that cut the text differently, runs
    whose held-out texts differ, and ids beyond a vocabulary.
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


def read_same_media(
    subjects: Sequence[Subject], images: Sequence[str], audio: Sequence[str], text: str | None
) -> Text:
    """Batches that every subject takes, as `read_media` makes them; without a transcript all are
    given what the first one hears.

    Raises UserError as `read_media` does, and for models whose processors or tokenizers make
    different inputs of the same files, and token ids beyond a vocabulary.
    """
    known = [s for s in subjects if has_processor(s) and (text is None or s.tokenizer is not None)]
    one, *others = known or subjects[:1]
    found = read_media(one, images, audio, text)
    for other in others:
        theirs = read_media(other, images, audio, text, heard=found.batches)
        for mine, yours in zip(found.batches, theirs.batches, strict=True):
            _check_alike(one, other, mine, yours)
    for subject in subjects:
        taken = set(inspect.signature(subject.model.forward).parameters)
        if missing := set(found.batches[0]) - taken:
            raise UserError(
                f"{subject.name} takes no {', '.join(sorted(missing))}, which {one.name} is given; "
                "compare models of one kind"
            )
        _check_written(subject, found.batches)
    return found


def _check_alike(a: Subject, b: Subject, of_a: dict[str, Tensor], of_b: dict[str, Tensor]) -> None:
    """Raise UserError where two models would be given other numbers."""
    if of_a.keys() != of_b.keys():
        said = f"{', '.join(of_a)} for one and {', '.join(of_b)} for the other"
    else:
        apart = [k for k, v in of_a.items() if v.shape != of_b[k].shape or not _equal(v, of_b[k])]
        if not apart:
            return
        x, y = of_a[apart[0]], of_b[apart[0]]
        said = (
            f"{apart[0]} differs by up to {float((y.double() - x.double()).abs().max()):.3g}"
            if (x.shape == y.shape)
            else f"{apart[0]} is {tuple(x.shape)} for one and {tuple(y.shape)} for the other"
        )
    raise UserError(
        f"{a.name} and {b.name} read the same files differently ({said}), so that they cannot be "
        "compared value by value; diagnose each alone, then compare the two folders: `skipless "
        "diagnose DIR_A --against DIR_B --out DIR`"
    )


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


def _check_written(subject: Subject, batches: Sequence[dict[str, Tensor]]) -> None:
    """Raise UserError for captions or transcripts with ids that the model does not have."""
    config = getattr(subject.model, "config", None)
    size = getattr(config and config.get_text_config(decoder=True), "vocab_size", None)
    ids = [batch[key] for batch in batches for key in _WRITTEN if key in batch]
    if size is not None and ids and (largest := max(int(each.max()) for each in ids)) >= size:
        raise UserError(
            f"{subject.name} knows token ids below {size:,} and is given id {largest:,}: its "
            "tokenizer is another one; compare models of one tokenizer"
        )


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
