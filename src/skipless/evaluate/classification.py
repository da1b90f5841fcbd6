"""Accuracy of a classifier on held-out passages, with its uncertainty.

For models that return `.logits` [B, num_labels]. Read by `skipless.measure` for `eval.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.jsonable import Config
from skipless.quant import evaluation_mode, run_batch


@dataclass(frozen=True, kw_only=True)
class AccuracyReport(Config):
    """How often the label with the largest logit is the right one."""

    accuracy: float
    """Share of passages, in [0, 1]."""
    standard_error: float
    """Of the accuracy, as if passages were independent; those of one work are not quite."""
    nats: float
    """Mean cross-entropy a passage."""
    recall: tuple[float, ...]
    """Share of the passages of each label that were found; NaN where there were none."""
    num_passages: int


def accuracy(model: nn.Module, batches: Iterable[Any]) -> AccuracyReport:
    """Accuracy and loss over batches (input_ids [B, T], labels int64 [B]).

    Runs in eval mode without gradients and leaves the model's mode as it was. Raises UserError for
    no batches, and for logits that are not [B, num_labels] or not finite.
    """
    nats, right, seen = 0.0, [], []
    with evaluation_mode(model):
        for number, (inputs, labels) in enumerate(as_list(batches)):
            logits = run_batch(model, inputs).logits.float().cpu()
            if logits.ndim != 2 or len(logits) != len(labels):
                raise UserError(
                    f"batch {number} has labels {tuple(labels.shape)} and logits "
                    f"{tuple(logits.shape)}; logits [batch, num_labels] were expected: is "
                    "model.num_labels set?"
                )
            if not bool(logits.isfinite().all()):
                raise UserError(f"the logits of batch {number} are not finite")
            labels = labels.cpu()
            nats += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += (logits.argmax(1) == labels).tolist()
            seen += labels.tolist()
    if not seen:
        raise UserError("there is no passage in these batches; give longer or more text")
    share = sum(right) / len(right)
    hits = [[r for r, s in zip(right, seen, strict=True) if s == k] for k in range(max(seen) + 1)]
    return AccuracyReport(
        accuracy=share,
        standard_error=math.sqrt(share * (1 - share) / len(right)),
        nats=nats / len(seen),
        recall=tuple(sum(h) / len(h) if h else math.nan for h in hits),
        num_passages=len(seen),
    )
