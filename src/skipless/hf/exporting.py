"""Our own models as folders that transformers reads: `skipless export RUN --format hf`.

    done = export_model("runs/mine", "mine-hf")
    AutoModelForCausalLM.from_pretrained("mine-hf")     # after `import skipless.hf`

What was written is loaded again and compared with the run: every weight, the logits, and greedy
tokens with and without a cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from skipless.card import write_card
from skipless.errors import UserError
from skipless.hf.converting import from_transformer
from skipless.hf.remote import write_remote_code
from skipless.model import Transformer
from skipless.outputs import free_folder, written_folder
from skipless.surgery.checking import check_finite
from skipless.surgery.slimming.opening import holds_run
from skipless.surgery.sources import find_folder
from skipless.train import LoadedRun, load_run

__all__ = ["ExportedModel", "export_model", "save_run"]

COMPARED = 24
"""Tokens of the two texts that are compared, and as many are generated."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """What `export_model` wrote, read back."""

    path: Path
    model: str
    """The class in transformers."""
    difference: float
    """Largest difference of a logit, as a share of the largest logit; weights are equal."""
    num_tokens: int
    """Greedy tokens that are those of the own decoder, with and without a cache; 0 where the model
    does not generate."""
    num_bytes: int
    """Of the weights."""

    def describe(self) -> str:
        """One line."""
        share = f"{self.difference:.2g} of the largest one"
        text = f"{self.model}, read back: largest difference of a logit to the run's {share}"
        if self.num_tokens:
            text += f", {self.num_tokens} greedy tokens equal, with and without cache"
        return text


def export_model(
    run: str | Path, out: str | os.PathLike, *, remote_code: bool = False
) -> ExportedModel:
    """Write the model of a run with its tokenizer and card to the new folder `out`, and compare.

    `remote_code` adds our modules, so that the folder loads without the package (`remote.py`).
    Raises UserError for what is no run, an `out` that holds something, and where what was read
    back is another model.
    """
    path, folder = free_folder(out), find_folder(str(run))
    if not holds_run(folder):
        raise UserError(
            f"{folder} is a Hugging Face folder already; --format hf writes the model of a run"
        )
    return save_run(load_run(folder), path, remote_code=remote_code)


def save_run(run: LoadedRun, path: Path, *, remote_code: bool = False) -> ExportedModel:
    """Write a run that is open; as `export_model`."""
    check_finite(run.model, str(run.path))
    more: dict[str, Any] = {}
    if run.config.model.num_labels is not None:
        names = [Path(source).stem for source in run.config.data.sources]
        if len(names) == run.config.model.num_labels == len(set(names)):
            more["id2label"] = dict(enumerate(names))
            more["label2id"] = {name: label for label, name in enumerate(names)}
    model = from_transformer(run.model, tokenizer=run.tokenizer, **more)
    tokenizer = run.tokenizer.for_transformers(run.config.model.max_position_embeddings)
    _check_tokenizer(tokenizer, run.tokenizer)
    with written_folder(path) as staging, _quiet():
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        difference, num_tokens = _compare(staging, run.model, type(model).__name__)
        size = sum(file.stat().st_size for file in staging.glob("*.safetensors"))
        if remote_code:
            write_remote_code(staging)
        write_card(run.path, staging)
    return ExportedModel(
        path=path, model=type(model).__name__, difference=difference, num_tokens=num_tokens,
        num_bytes=size,
    )  # fmt: skip


def _check_tokenizer(made: PreTrainedTokenizerFast, own: Any) -> None:
    for text in ("The king said: “no more”, and went.\n\n  42", "a<|endoftext|>b"):
        # as `encode` does
        options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
        found, expected = made(text, **options)["input_ids"], own.encode(text)
        if found != expected or made.decode(found) != own.decode(expected):
            raise UserError(
                f"transformers' tokenizer cuts {text!r} otherwise than {own.path} in training; "
                "transformers of another version may agree"
            )


@torch.no_grad()
def _compare(folder: Path, model: Transformer, name: str) -> tuple[float, int]:
    """Largest relative difference of a logit, and how many greedy tokens were compared."""
    writes = model.config.num_labels is None
    auto: Any = AutoModelForCausalLM if writes else AutoModelForSequenceClassification
    again = auto.from_pretrained(folder, dtype="auto")
    found = again.state_dict()
    for key, value in model.state_dict().items():
        key = key if key in found else f"model.{key}"
        if not torch.equal(found[key], value.cpu()):
            raise UserError(f"{name} reads {key} back as other numbers; export it again")
    own = model.cpu()
    length = max(min(COMPARED, own.config.max_position_embeddings // 2), 1)
    ids = torch.randint(
        own.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)
    )
    expected = own(ids).logits
    difference = _largest(again(ids).logits, expected)
    if not (writes and own.config.causal):
        return difference, 0
    wanted = min(COMPARED, own.config.max_position_embeddings - length)
    own_tokens = own.generate(ids, wanted)
    again.generation_config.eos_token_id = None  # the own decoder goes on after the end of a text
    for cached in (True, False) if _has_attention(own) else (False,):
        tokens = again.generate(ids, max_new_tokens=wanted, do_sample=False, use_cache=cached)
        if not torch.equal(tokens, own_tokens):
            raise UserError(
                f"{name} read back writes another text than the run's own decoder "
                f"(use_cache={cached}), though every weight is equal; its logits differ by "
                f"{difference:.2g} of the largest: a near tie may turn, a bug would differ by more"
            )
    return difference, 2 * wanted


def _has_attention(model: Transformer) -> bool:
    return any(block.self_attn is not None for block in model.blocks)


def _largest(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers while the block runs."""
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()
