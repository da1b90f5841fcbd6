"""What `convert` is given, checked before work begins: model, folder, batches by number.

Read by `converting.py` and `converting_text.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.rundir import RunDir
from skipless.sites import first_tensor
from skipless.surgery.conversion import RECORD_FILE, Conversion, ConversionConfig
from skipless.surgery.distilling import Loss

__all__ = ["Batches", "by_step", "check_folder", "check_model", "count"]


@runtime_checkable
class Batches(Protocol):
    """Where training batches come from: `skipless.data.Loader` is one."""

    def batch(self, step: int) -> Any:
        """The batch of `step`, always the same one."""
        ...


def check_folder(path: Path, config: ConversionConfig, source: dict[str, Any]) -> None:
    """Raise UserError unless `path` is free, or holds an unfinished conversion of these settings.

    Nothing is changed.
    """
    if not path.exists() or (path.is_dir() and not {p.name for p in path.iterdir()} - {".lock"}):
        return
    found = RunDir(path).read_json(RECORD_FILE) if path.is_dir() else None
    if found is None:
        raise UserError(f"{path} exists already; name a folder that does not")
    old = Conversion.from_dict(found, where=f"{path / RECORD_FILE}: ")
    if old.finished:
        raise UserError(
            f"{path} holds a finished conversion ({old.describe()}); name another folder"
        )
    before = {**old.settings.to_dict(), **old.source}
    after = {**config.to_dict(), **source}
    for key in after:
        if before.get(key) != after[key]:
            raise UserError(
                f"{path} holds a conversion with other settings ({key} is {before.get(key)!r} "
                f"there and {after[key]!r} here); continue it with its own, or name another folder"
            )


def check_model(model: nn.Module, loss: Loss | None, folder: str | Path | None) -> None:
    """Raise UserError for a model that cannot be trained, measured or saved."""
    name = type(model).__name__
    learnable = [p for p in model.parameters() if p.requires_grad]
    if not learnable:
        raise UserError(f"every weight of {name} is frozen; call model.requires_grad_(True)")
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in learnable):
        raise UserError(
            f"{name} has weights in 16 bits, too coarse to train; load it with dtype=torch.float32 "
            "(precision 'bf16' makes the products faster)"
        )
    if folder is not None and not hasattr(model, "save_pretrained"):
        raise UserError(
            f"{name} is no transformers model and cannot be saved; leave out the folder"
        )
    if loss is None and not _predicts_next_tokens(name):
        raise UserError(
            f"{name} is no causal language model; pass loss=, a function of model and held-out "
            "batches that measures it"
        )


def _predicts_next_tokens(name: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def by_step(batches: Batches | Sequence[Any]) -> Callable[[int], Any]:
    """Batch number -> batch; a list is gone through round and round."""
    if isinstance(batches, Batches):
        return batches.batch
    listed = list(as_list(batches))
    if not listed:
        raise UserError("there is no batch to train on; pass at least one")
    return lambda step: listed[step % len(listed)]


def count(batch: Any) -> int:
    """Tokens of a batch; examples where it holds none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    ids = ids[0] if isinstance(ids, (tuple, list)) else ids
    if isinstance(ids, Tensor) and not ids.is_floating_point():
        return ids.numel()
    tensor = first_tensor(batch)
    return 0 if tensor is None else len(tensor)
