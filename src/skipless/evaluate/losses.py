"""Held-out loss of a language model, with its uncertainty.

Works on our decoder and on Hugging Face causal language models: whatever returns `.logits`
[B, T, V]. Read by `evaluate.precision`, `evaluate.sensitivity`, the training loop and the CLI.

A batch is a pair (input_ids, labels) [B, T], labels already being the next tokens as in the data
loader; or token ids alone [B, T], or a dict with "input_ids" (and "attention_mask", "labels"), for
which position t predicts token t + 1 as in Hugging Face. Label -100 is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.jsonable import Config
from skipless.quant import evaluation_mode, run_batch

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class LossReport(Config):
    """Mean cross-entropy over all predicted tokens."""

    nats: float
    """Nats a token, every token weighing the same."""
    perplexity: float
    bits_per_byte: float | None
    """None when the number of bytes a token is not known."""
    num_tokens: int
    num_sequences: int
    standard_error: float | None
    """Of `nats`, over sequences (tokens of one text are not independent); None for one sequence."""


@dataclass(frozen=True, kw_only=True)
class SequenceLosses:
    """Loss of every sequence, for paired comparisons: `sums` nats over `counts` tokens."""

    sums: Tensor
    """float64 [sequences]."""
    counts: Tensor
    """float64 [sequences], positive."""

    @property
    def nats(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    def standard_error(self, baseline: SequenceLosses | None = None) -> float | None:
        """Of the token-weighted mean, or of its increase over `baseline` on the same sequences.

        Ratio estimator: the residual of sequence i is sum_i - mean * count_i.
        """
        sums = self.sums if baseline is None else self.sums - baseline.sums
        n = len(sums)
        if n < 2:
            return None
        residual = sums - sums.sum() / self.counts.sum() * self.counts
        return float((residual.square().sum() * n / (n - 1)).sqrt() / self.counts.sum())


def loss(
    model: nn.Module, batches: Iterable[Any], bytes_per_token: float | None = None
) -> LossReport:
    """Held-out loss in nats, perplexity, and bits per byte when `bytes_per_token` is given.

    Runs in eval mode without gradients and leaves the model's mode as it was. Raises UserError
    for no tokens, a batch of another form, or a loss that is not finite.
    """
    found = sequence_losses(model, batches)
    bits_per_byte = None
    if bytes_per_token is not None:
        if not bytes_per_token > 0:
            raise UserError(f"bytes_per_token is {bytes_per_token}; it must be positive")
        bits_per_byte = found.nats / math.log(2) / bytes_per_token
    return LossReport(
        nats=found.nats,
        perplexity=math.exp(found.nats) if found.nats < 700 else math.inf,
        bits_per_byte=bits_per_byte,
        num_tokens=int(found.counts.sum()),
        num_sequences=len(found.counts),
        standard_error=found.standard_error(),
    )


def sequence_losses(model: nn.Module, batches: Iterable[Any]) -> SequenceLosses:
    """Loss of every sequence that has at least one label. Raises UserError as `loss` does."""
    sums, counts = [], []
    with evaluation_mode(model):
        for number, batch in enumerate(as_list(batches)):
            inputs, labels = split_batch(batch)
            if labels.numel() == 0:
                continue
            logits = _logits(model, inputs)
            if logits.dim() != 3 or logits.shape[:2] != labels.shape:
                raise UserError(
                    f"batch {number} has labels {tuple(labels.shape)} and logits "
                    f"{tuple(logits.shape)}; logits [batch, time, vocabulary] were expected"
                )
            _check_labels(labels, logits.shape[-1], number)
            labels = labels.to(logits.device, torch.long)
            # Float64 sums are taken on the CPU: MPS has no float64.
            each = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE,
                reduction="none",
            ).view(labels.shape)  # fmt: skip
            sums.append(each.cpu().double().sum(1))
            counts.append((labels != IGNORE).sum(1).cpu().double())
            if not bool(torch.isfinite(sums[-1]).all()):
                raise UserError(
                    f"the loss of batch {number} is not finite: NaN or infinity in the logits; "
                    "check the model's weights, or a wider activation width if it is quantised"
                )
    count = torch.cat(counts) if counts else torch.zeros(0)
    if not count.sum() > 0:
        raise UserError("there is no token to predict in these batches; give longer or more text")
    kept = count > 0
    return SequenceLosses(sums=torch.cat(sums)[kept], counts=count[kept])


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """(what the model is called with, labels [B, T] aligned with its logits)."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    if isinstance(batch, Tensor):
        return batch, _shift(batch)
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if labels is not None:
            labels = _shift(labels)
        elif mask is None:
            labels = _shift(batch["input_ids"])
        else:  # padding is neither predicted nor predicted from, on whichever side it is
            padding = mask == 0
            labels = _shift(batch["input_ids"].masked_fill(padding, IGNORE))
            labels = labels.masked_fill(padding, IGNORE)
        return {k: v for k, v in batch.items() if k != "labels"}, labels
    raise UserError(
        f"a batch is {type(batch).__name__}; (input_ids, labels), token ids [batch, time] or a "
        "dict with input_ids was expected"
    )


def _shift(tokens: Tensor) -> Tensor:
    """Labels of position t: token t + 1; none at the end."""
    if tokens.dim() != 2:
        raise UserError(f"token ids have shape {tuple(tokens.shape)}; [batch, time] was expected")
    labels = torch.full_like(tokens, IGNORE, dtype=torch.long)
    labels[:, :-1] = tokens[:, 1:]
    return labels


def _check_labels(labels: Tensor, vocab_size: int, number: int) -> None:
    if labels.is_floating_point():
        raise UserError(f"batch {number} has labels of {labels.dtype}; token ids were expected")
    wrong = labels[(labels >= vocab_size) | ((labels < 0) & (labels != IGNORE))]
    if wrong.numel():
        raise UserError(
            f"batch {number} has the label {int(wrong[0])}; token ids 0 to {vocab_size - 1}, or "
            "-100 to leave a position out, were expected: is it this model's tokenizer?"
        )


def _logits(model: nn.Module, inputs: Any) -> Tensor:
    output = run_batch(model, inputs)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise UserError(
            f"{type(model).__name__} returns {type(output).__name__} without logits; a causal "
            "language model was expected"
        )
    return logits


def as_list(batches: Iterable[Any]) -> Iterable[Any]:
    """One batch given bare counts as a list of one. Raises UserError for what holds no batches."""
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise UserError(
            f"batches is {type(batches).__name__}; a list of batches was expected, each "
            "(input_ids, labels), token ids [batch, time] or a dict; those of a trained run come "
            "from skipless.measure.held_out_batches(run)"
        )
    return batches


def without_padding(y: Tensor, batch: Any) -> Tensor:
    """A tensor [B, T, ...] as its real tokens [n, ...], where the batch has a mask that fits.

    Two dimensions are similarities of images and captions, or classes: no tokens.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.dim() == 2 < y.dim() and y.shape[:2] == mask.shape:
        return y[mask.to(y.device) != 0]
    return y
