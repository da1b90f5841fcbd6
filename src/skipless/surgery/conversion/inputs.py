"""What `convert` is given, checked before work begins: the model, and batches by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.surgery.checking import check_batch, check_finite
from skipless.surgery.conversion.distilling import Loss

__all__ = ["Batches", "by_step", "check_convertible", "check_teacher"]


@runtime_checkable
class Batches(Protocol):
    """Where training batches come from: `skipless.data.Loader` is one."""

    def batch(self, step: int) -> Any:
        """The batch of `step`, always the same one."""
        ...


def check_convertible(model: nn.Module, loss: Loss | None, folder: str | Path | None) -> None:
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
    check_finite(model)
    if loss is None and not _predicts_next_tokens(name):
        raise UserError(
            f"{name} is no causal language model; pass loss=, a function of model and held-out "
            "batches that measures it"
        )


def _predicts_next_tokens(name: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def check_teacher(model: Any, teacher: Any) -> None:
    """Raise UserError for a teacher whose logits are of other tokens than those of `model`."""
    sizes = [_num_logits(one) for one in (model, teacher)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise UserError(
            f"the teacher has logits of {sizes[1]} tokens and the model of {sizes[0]}; give the "
            "original of this very model"
        )


def _num_logits(model: Any) -> int | None:
    try:
        return len(model.get_output_embeddings().weight)
    except (AttributeError, NotImplementedError):
        return None


def by_step(model: nn.Module, batches: Batches | Sequence[Any]) -> Callable[[int], Any]:
    """Batch number -> batch for `model`; a list is gone through round and round."""
    if isinstance(batches, Batches):
        pick = batches.batch
    else:
        listed = list(as_list(batches))
        if not listed:
            raise UserError("there is no batch to train on; pass at least one")

        def pick(step: int) -> Any:
            return listed[step % len(listed)]

    def batch(step: int) -> Any:
        found = pick(step)
        check_batch(model, found, f"training batch {step}")
        return found

    return batch
