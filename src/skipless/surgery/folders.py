"""Patching a model on disk: folder or catalog name in, patched folder out. Read by the CLI.

The model is loaded in the class its config names, patched, run before and after on the same
sample (random tokens, image or sound, seed 0), and written with its tokenizer beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.outputs import free_folder, written_folder
from skipless.surgery.patching import patch, read_connection
from skipless.surgery.reading import read_model
from skipless.surgery.records import connections
from skipless.surgery.saving import MODEL_TYPE, save_pretrained
from skipless.surgery.sources import copy_tokenizer, find_folder, model_type

__all__ = ["PatchedFolder", "patch_folder", "sample_batch"]

_NUM_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class PatchedFolder:
    """What `patch_folder` wrote."""

    path: Path
    model: str
    """Class of the model."""
    places: tuple[tuple[str, str, str], ...]
    """(layer, sublayer, kind) of every connection put in."""
    num_parameters: int
    """Learned numbers that came in."""
    difference: float
    """Largest change of an output number on the sample."""
    largest: float
    """Largest output number before, to compare with."""


def patch_folder(
    model: str,
    out: str | Path,
    connection: str = "rezero",
    *,
    sites: Sequence[str] = (),
    layers: Sequence[int] = (),
    stacks: Sequence[str] = (),
) -> PatchedFolder:
    """Patch a Hugging Face folder (or a name of the catalog) and save it as the folder `out`.

    Empty `sites`, `layers`, `stacks` mean all. Raises UserError as `patch` does, for an `out` that
    exists, for a folder that is no model or patched already.
    """
    target = free_folder(out)
    read_connection(connection)  # before anything large is read
    source = find_folder(model)
    loaded = _load(source)
    batch = sample_batch(loaded)
    before = _output(loaded, batch)
    if not bool(before.isfinite().all()):
        raise UserError(
            f"{source} computes no numbers but NaN or infinity on a random sample; get its weights "
            "anew"
        )
    chosen = {"sites": sites, "layers": layers, "stacks": stacks}
    patch(loaded, connection, **{name: value for name, value in chosen.items() if value})
    after = _output(loaded, batch)
    with written_folder(target) as temporary:
        save_pretrained(loaded, temporary)
        copy_tokenizer(source, temporary)
    found = connections(loaded)
    names = (name.rpartition(".") for name in found)
    return PatchedFolder(
        path=target, model=type(loaded).__name__,
        places=tuple(
            (layer, attribute.removesuffix("_connection"), connection)
            for layer, _, attribute in names
        ),
        num_parameters=sum(p.numel() for m in found.values() for p in m.parameters()),
        difference=float((after.double() - before.double()).abs().max()),
        largest=float(before.double().abs().max()),
    )  # fmt: skip


def _load(path: Path) -> Any:
    if model_type(path) == MODEL_TYPE:
        raise UserError(
            f"{path} is patched already; load it with skipless.surgery.load to change the patch"
        )
    return read_model(path)


def sample_batch(model: Any) -> dict[str, Tensor]:
    """Random inputs of the kinds that the model's forward takes, batch of 1, seed 0."""
    generator = torch.Generator().manual_seed(0)
    config, kind = model.config, model.main_input_name
    batch = {}
    vision = getattr(config, "vision_config", config)
    if hasattr(vision, "image_size"):
        shape = (1, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
        batch["pixel_values"] = torch.randn(shape, generator=generator)
    if kind == "input_features":
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        batch[kind] = torch.randn(shape, generator=generator)
    if kind != "pixel_values":
        text = config.get_text_config()
        least = min(5, text.vocab_size - 1)  # special tokens mostly come first
        ids = torch.randint(least, text.vocab_size, (1, _NUM_TOKENS), generator=generator)
        end = getattr(text, "eos_token_id", None)
        if isinstance(end, int) and 0 <= end < text.vocab_size:
            ids[:, -1] = end  # CLIP pools there
        ids = ids[:, -getattr(text, "max_position_embeddings", _NUM_TOKENS) :]
        ids = ids[:, -getattr(text, "max_target_positions", _NUM_TOKENS) :]
        batch["decoder_input_ids" if kind == "input_features" else "input_ids"] = ids
        if kind == "input_ids" and getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids
    return batch


@torch.no_grad()
def _output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    floating = next(p.dtype for p in model.parameters() if p.is_floating_point())
    out: Any = model(
        **{k: v.to(floating) if v.is_floating_point() else v for k, v in batch.items()}
    )
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return out[name]
    return out[0]
