"""What `prune` and `fold` get on the command line, opened: a run or a Hugging Face folder, with
text to choose on and text to check on.

A run brings its own text; other models are measured on TEXT where none is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skipless.data import evaluation_batches, open_batches
from skipless.errors import UserError
from skipless.evaluate import accuracy
from skipless.rundir import CONFIG
from skipless.surgery.loading import load
from skipless.surgery.reading import no_next_token, read_language_model, read_model
from skipless.surgery.saving import MODEL_TYPE
from skipless.surgery.slimming.trials import LossFunction, next_token_loss
from skipless.surgery.sources import copy_tokenizer, is_run, model_type, prepare_text
from skipless.train import LoadedRun, load_run
from skipless.train.measure import num_labels

__all__ = ["Source", "holds_run", "open_calibrated", "open_folded", "open_run", "open_source"]

TEXT = "sotu"
"""What a Hugging Face model is measured on where no text is named."""
BATCH_SIZE = 8
LONGEST = 256
"""Tokens a sequence of a Hugging Face model, if it sees as many."""


def label_loss(model: Any, batches: list[Any]) -> float:
    """Nats a label, of a classifier."""
    return accuracy(model, batches).nats


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model that was read, and what to measure it on."""

    model: Any
    folder: Path
    chosen_on: list[Any] = field(default_factory=list)
    """Batches of the training part of the text."""
    held_out: list[Any] = field(default_factory=list)
    loss: LossFunction = next_token_loss
    run: LoadedRun | None = None
    """Set for a run."""
    unmeasured: str = ""
    """Why there are no batches: a model that predicts no next token, or one without tokenizer."""

    @property
    def num_held_out(self) -> int:
        """Tokens, or passages, that a held-out loss is the mean over."""
        return num_labels(self.held_out)

    def copy_tokenizer(self, target: Path) -> None:
        """Everything beside weights and config that transformers reads: the tokenizer."""
        if self.run is None:
            copy_tokenizer(self.folder, target)
            return
        length = self.run.config.model.max_position_embeddings
        self.run.tokenizer.for_transformers(length).save_pretrained(target)


def open_source(folder: Path, text: Sequence[str], num_tokens: int) -> Source:
    """A run, a patched model or a causal language model, with text to measure it on.

    Raises UserError for a run that is not finished, and for models whose loss of the next token
    says nothing.
    """
    if holds_run(folder):
        return open_run(folder, text, num_tokens)
    if model_type(folder) != MODEL_TYPE:
        return _with_text(folder, read_language_model(folder), text, num_tokens)
    model = load(folder)
    reason = no_next_token(model)
    if reason:
        raise UserError(f"{folder}: {reason}, so no loss tells what it needs; in Python, prune "
                        "takes loss=")  # fmt: skip
    return _with_text(folder, model, text, num_tokens)


def open_calibrated(folder: Path, text: Sequence[str], num_tokens: int) -> Source:
    """`open_source`, and models that read text without predicting the next token: to see their
    activations they only have to run.

    Raises UserError for models of images, sound or two texts.
    """
    if holds_run(folder) or model_type(folder) == MODEL_TYPE:
        return open_source(folder, text, num_tokens)
    model = read_model(folder, dtype=torch.float32)
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids" or getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"{folder} holds a {type(model).__name__}, which takes more than one text; in Python, "
            "call quantize(model, scheme, calibration=batches) and save_quantized(model, folder)"
        )
    return _with_text(folder, model, text, num_tokens)


def open_run(folder: Path, text: Sequence[str], num_tokens: int) -> Source:
    """A finished run with its own text, or `text` cut with its tokenizer."""
    run = load_run(folder)
    if not run.is_finished:
        raise UserError(f"{folder} is not finished; continue it with `skipless train {folder}`")
    config, data = run.config, run.data
    classifies = config.model.num_labels is not None
    if text and classifies:
        raise UserError("a classifier is measured on the texts that it was trained on; leave --text"
                        " out")  # fmt: skip
    if text:
        data = prepare_text(run.tokenizer_path, text, config.model.vocab_size)
    chosen, held_out = (
        open_batches(config, data, split, BATCH_SIZE, num_tokens) for split in ("train", "held_out")
    )
    return Source(
        model=run.model, chosen_on=chosen, held_out=held_out, run=run, folder=folder,
        loss=label_loss if classifies else next_token_loss,
    )  # fmt: skip


def open_folded(folder: Path, model: Any, text: Sequence[str], num_tokens: int) -> Source:
    """A patched model of `folder` that can be folded, with text if it predicts the next token.

    Raises UserError where text is named and the model has no use for it.
    """
    reason = no_next_token(model)
    if reason and text:
        raise UserError(
            f"--text measures the loss of the next token, and {reason}; leave it out"
        )  # fmt: skip
    if not reason and not text and not (folder / "tokenizer.json").is_file():
        reason = f"{folder} holds no tokenizer.json"
    if reason:
        return Source(model=model, folder=folder, unmeasured=reason)
    return _with_text(folder, model, text, num_tokens)


def holds_run(folder: Path) -> bool:
    """Whether the folder is a run. Raises UserError where no config.json tells."""
    try:
        return is_run(json.loads((folder / CONFIG).read_text()))
    except (OSError, ValueError):
        raise UserError(
            f"{folder} holds no {CONFIG} that can be read; name a run directory or the folder of a "
            "Hugging Face model"
        ) from None


def _with_text(folder: Path, model: Any, text: Sequence[str], num_tokens: int) -> Source:
    data = prepare_text(folder / "tokenizer.json", text or (TEXT,), model.config.vocab_size)
    length = min(getattr(model.config, "max_position_embeddings", None) or LONGEST, LONGEST)
    chosen, held_out = (
        evaluation_batches(shard, min(length, shard.num_tokens - 1), BATCH_SIZE, num_tokens)
        for shard in (data.train, data.held_out)
    )
    return Source(model=model, chosen_on=chosen, held_out=held_out, folder=folder)
