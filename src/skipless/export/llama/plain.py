"""A model of the disk as a plain decoder of transformers, its gains folded into its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.export.graphs.joins import SUPPORTED
from skipless.log import quiet
from skipless.rundir import RunDir
from skipless.surgery.folders import sample_batch
from skipless.surgery.loading import load
from skipless.surgery.reading import read_language_model
from skipless.surgery.saving import MODEL_TYPE
from skipless.surgery.slimming.folders import FoldedFolder, fold_folder
from skipless.surgery.slimming.folding import Folded, fold
from skipless.surgery.slimming.opening import holds_run
from skipless.surgery.slimming.stock import fold_to_stock
from skipless.surgery.sources import find_folder, model_type
from skipless.train import load_run


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A decoder that stock transformers has a class for."""

    model: Any
    """In float32 and eval mode."""
    tokenizer: Path | None
    """Its tokenizer.json, where there is one."""
    folded: Folded | None = None
    """What was multiplied into the weights; None for a model that had nothing to fold."""


def open_plain(model: str, *, norm_gains: bool = False) -> Plain:
    """Read a run, a patched folder, a Llama folder or a name of the catalog, and fold it.

    Raises UserError for what no class of transformers computes, with the reason and the format that
    keeps it.
    """
    folder = find_folder(model)
    if holds_run(folder):
        run = load_run(folder)
        if not run.is_finished:
            raise UserError(f"{folder} is not finished; continue it with `skipless train {folder}`")
        with quiet(), alternative(folder):
            folded = fold_to_stock(run.model, norm_gains=norm_gains)
        return Plain(model=folded.model, tokenizer=run.tokenizer_path, folded=folded)
    file = folder / "tokenizer.json"
    tokenizer = file if file.is_file() else None
    if model_type(folder) != MODEL_TYPE:
        return Plain(model=read_language_model(folder), tokenizer=tokenizer)
    patched = load(folder)
    with quiet(), alternative(folder):
        folded = fold(patched, sample_batch(patched), norm_gains=norm_gains)
    return Plain(model=folded.model, tokenizer=tokenizer, folded=folded)


def export_llama(
    model: str,
    out: str | Path,
    *,
    text: Sequence[str] = (),
    norm_gains: bool = False,
    num_tokens: int = 4096,
) -> FoldedFolder:
    """`fold_folder`, whose refusals name the format that keeps the model as it is."""
    with alternative(find_folder(model)):
        return fold_folder(model, out, text=text, norm_gains=norm_gains, num_tokens=num_tokens)


@contextmanager
def alternative(folder: Path) -> Iterator[None]:
    """A refusal to fold what is in `folder` ends with what keeps it as it is."""
    try:
        yield
    except UserError as error:
        if not holds_run(folder) or "exists already" in str(error):
            raise
        config = RunDir(folder).config().model
        kinds = {
            config.connection_at(layer, sublayer).kind
            for layer in range(config.num_hidden_layers)
            for sublayer in ("attention", "mlp")
        }
        keeps = "--format onnx or hf" if kinds <= set(SUPPORTED) else "--format hf"
        raise UserError(f"{error}; {keeps} keeps it as it is") from error
