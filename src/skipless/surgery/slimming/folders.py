"""Pruning and folding on disk: a run, a Hugging Face folder or a name of the catalog in, a new
folder out. Read by the CLI.

What to drop is chosen on the training part of a text and checked on held-out documents. A run stays
a run; a Hugging Face model comes out patched where single sublayers are gone, plain where only
whole layers are. A folded model is always one that stock transformers loads; it is loaded again
and compared before it gets its name. See docs/surgery.md.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from skipless.config import to_json
from skipless.errors import UserError
from skipless.evaluate import precision_table
from skipless.log import quiet
from skipless.model import Transformer
from skipless.outputs import free_folder, written_folder
from skipless.rundir import CONFIG, DATA, ENVIRONMENT, RESULT, TOKENIZER, WEIGHTS, RunDir
from skipless.surgery.dropping import has_absent
from skipless.surgery.folders import sample_batch
from skipless.surgery.loading import load
from skipless.surgery.patching import patch, unpatch
from skipless.surgery.records import connections
from skipless.surgery.saving import MODEL_TYPE, save_pretrained
from skipless.surgery.slimming.folding import LIMIT, Folded, difference, fold, sample_inputs
from skipless.surgery.slimming.opening import (
    Source,
    holds_run,
    open_folded,
    open_run,
    open_source,
)
from skipless.surgery.slimming.pruning import Pruned, prune
from skipless.surgery.slimming.stock import fold_to_stock
from skipless.surgery.slimming.trials import next_token_loss
from skipless.surgery.sources import find_folder, model_type
from skipless.train import LoadedRun
from skipless.train.distributed import World
from skipless.train.load import save_weights
from skipless.train.measure import num_labels

__all__ = ["FoldedFolder", "PrunedFolder", "fold_folder", "prune_folder"]

SCHEMES = ("W8A8", "W4A4")


@dataclass(frozen=True, kw_only=True)
class PrunedFolder:
    """What `prune_folder` wrote."""

    path: Path
    kind: Literal["run", "patched", "plain"]
    """A run directory, a folder for `skipless.surgery.load`, or one for stock transformers."""
    pruned: Pruned
    held_out_before: float
    """Nats on documents that had no part in choosing (a label, of a classifier)."""
    held_out_after: float
    num_held_out: int
    """How many tokens, or passages of a classifier, these are the means over."""
    num_chosen: int
    """The same of what was chosen on, whose losses are in `pruned`."""
    counted: Literal["tokens", "passages"]


@dataclass(frozen=True, kw_only=True)
class FoldedFolder:
    """What `fold_folder` wrote."""

    path: Path
    folded: Folded
    """`difference` is that of the model loaded again from `path`."""
    model: str
    """Class of the model."""
    losses: dict[str, tuple[float, float]]
    """Held-out nats before and after folding: of "full precision" and of every scheme; none where
    nothing was measured."""
    num_held_out: int
    """Tokens that these are the means over."""
    unmeasured: str = ""
    """Why not: a model that predicts no next token, or one without a tokenizer."""


def prune_folder(
    model: str,
    out: str | Path,
    *,
    text: Sequence[str] = (),
    tolerance: float | None = None,
    loss_budget: float | None = None,
    unit: Literal["sublayer", "layer"] = "sublayer",
    num_tokens: int = 4096,
) -> PrunedFolder:
    """Prune a model of the disk and write the folder `out`.

    `text`: named sources, files or folders; the run's own text by default. `num_tokens` are looked
    at for choosing, and as many held-out ones for the check. Raises UserError as `prune` does, for
    an `out` that holds something, a run that is not finished, and a model without a text.
    """
    target = free_folder(out)
    source = open_source(_find(model, num_tokens), text, num_tokens)
    plain_before = not isinstance(source.model, Transformer) and not connections(source.model)
    if plain_before:
        patch(source.model, "residual")
    before = source.loss(source.model, source.held_out)
    with quiet():
        pruned = prune(
            source.model, source.chosen_on, tolerance, loss_budget=loss_budget, unit=unit,
            loss=None if source.loss is next_token_loss else source.loss,
        )  # fmt: skip
    after = source.loss(source.model, source.held_out)
    with written_folder(target) as temporary:
        kind = _write(source, temporary, pruned, after, plain_before)
    return PrunedFolder(
        path=target, kind=kind, pruned=pruned, held_out_before=before, held_out_after=after,
        num_held_out=source.num_held_out, num_chosen=num_labels(source.chosen_on),
        counted="tokens" if source.loss is next_token_loss else "passages",
    )  # fmt: skip


def fold_folder(
    model: str,
    out: str | Path,
    *,
    text: Sequence[str] = (),
    norm_gains: bool = False,
    num_tokens: int = 4096,
) -> FoldedFolder:
    """Fold a run or a patched model of the disk into the folder `out`, for stock transformers.

    Weight ranges widen, so the loss under W8A8 and W4A4 (scope linear) is measured before and
    after. Raises UserError as `fold` and `to_stock` do, for a model that is not patched, and for an
    `out` that holds something.
    """
    target = free_folder(out)
    folder = _find(model, num_tokens)
    inputs = None
    if holds_run(folder):
        source = open_run(folder, text, num_tokens)
        with quiet():
            folded = fold_to_stock(source.model, norm_gains=norm_gains)
    else:
        loaded = _load_patched(folder)
        one = sample_batch(loaded)  # and reversed, since a single similarity of CLIP may be near 0
        inputs = {name: torch.cat([value, value.flip(-1)]) for name, value in one.items()}
        with quiet():
            folded = fold(loaded, inputs, norm_gains=norm_gains)  # refused before a text is read
        source = open_folded(folder, loaded, text, num_tokens)
    plain: Any = folded.model
    losses = {} if source.unmeasured else _losses(source, plain)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if source.run is not None and source.run.tokenizer.eos_id is not None:
        for settings in (plain.config, plain.generation_config):  # as the tokenizer that is copied
            settings.eos_token_id = settings.pad_token_id = source.run.tokenizer.eos_id
    with written_folder(target) as temporary:
        plain.save_pretrained(temporary)
        source.copy_tokenizer(temporary)
        again = type(plain).from_pretrained(temporary).eval()
        found = difference(source.model, again, sample_inputs(source.model, inputs))
        if not found < LIMIT:
            raise UserError(
                f"the model read back from {target} differs by {found:.2g} of the largest logit, "
                f"and {LIMIT:g} is the limit; nothing was written"
            )
    return FoldedFolder(
        path=target, model=type(plain).__name__, losses=losses,
        num_held_out=source.num_held_out, unmeasured=source.unmeasured,
        folded=dataclasses.replace(folded, model=again, difference=found),
    )  # fmt: skip


def _find(model: str, num_tokens: int) -> Path:
    if num_tokens < 1:
        raise UserError(f"num_tokens is {num_tokens}; at least 1 was expected")
    return find_folder(model)


def _load_patched(folder: Path) -> Any:
    if model_type(folder) != MODEL_TYPE:
        raise UserError(
            f"{folder} is not patched, so there is no gain to fold; fold takes runs and what "
            "`skipless patch` wrote"
        )
    return load(folder)


def _losses(source: Source, folded: Any) -> dict[str, tuple[float, float]]:
    """Held-out loss before and after folding, by scheme."""
    found = []
    for model in (source.model, folded):
        rows = precision_table(model, source.held_out, SCHEMES, ("linear",))
        by_scheme = {row["scheme"]: row["loss"] for row in rows}
        found.append({"full precision": rows[0]["full_precision"], **by_scheme})
    return {name: (found[0][name], found[1][name]) for name in found[0]}


def _write(
    source: Source, folder: Path, pruned: Pruned, held_out: float, plain_before: bool
) -> Literal["run", "patched", "plain"]:
    if source.run is not None:
        _write_run(source, source.run, folder, pruned, held_out)
        return "run"
    if plain_before and not has_absent(source.model) and not pruned.still_computed:
        unpatch(source.model)
        source.model.save_pretrained(folder)
        source.copy_tokenizer(folder)
        return "plain"
    save_pretrained(source.model, folder)
    source.copy_tokenizer(folder)
    return "patched"


def _write_run(
    source: Source, old: LoadedRun, folder: Path, pruned: Pruned, held_out: float
) -> None:
    """A finished run of the smaller model: settings, environment, text, result and weights."""
    before, after = RunDir(old.path), RunDir(folder)
    config = old.config.replace(
        model=old.model.config, label=f"{old.config.label or old.config.name}, pruned",
        note=f"{old.path} without {', '.join(pruned.dropped)}",
    )  # fmt: skip
    (after / CONFIG).write_text(to_json(config))
    for name in (ENVIRONMENT, DATA, TOKENIZER):
        if (before / name).is_file():
            shutil.copy2(before / name, after / name)
    after.write_json(RESULT, {
        **before.read_json(RESULT), "held_out_loss": held_out,
        "held_out_tokens": source.num_held_out,
    })  # fmt: skip
    after.write_json("prune.json", {
        "source": str(old.path), "loss_before": pruned.loss_before,
        "loss_after": pruned.loss_after, "removed_layers": list(pruned.removed_layers),
        "rows": [vars(row) for row in pruned.rows],
    })  # fmt: skip
    save_weights(after / WEIGHTS, old.model, World())
