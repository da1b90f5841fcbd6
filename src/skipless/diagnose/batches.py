"""What a model may be given: batches that no forward pass can take are refused before it, and cut.

Read by `skipless.diagnose.site_rows`, `running` and `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from skipless.errors import UserError


def check_module(model: Any) -> None:
    """Raise UserError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the model is {type(model).__name__}; an nn.Module was expected, such as "
            "`from_pretrained` of a transformers class returns"
        )


def check_batch(model: nn.Module, batch: Any, number: int) -> None:
    """Raise UserError for an empty tensor and for token ids that the embedding does not have.

    What the model itself refuses stays its own exception.
    """
    for tensor in _tensors(batch):
        if tensor.numel() == 0:
            raise UserError(
                f"batch {number} has a tensor of shape {tuple(tensor.shape)} and so no token; "
                "leave that batch out"
            )
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, (tuple, list)):
        ids = ids[0] if ids else None
    size = _vocabulary(model)
    if size is None or not isinstance(ids, Tensor):
        return
    if ids.is_floating_point():
        raise UserError(
            f"batch {number} has token ids of {ids.dtype}; whole numbers were expected, as "
            "ids.long() gives"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise UserError(
            f"batch {number} has the token id {low if low < 0 else high} and the model knows 0 to "
            f"{size - 1}; the tokenizer is that of another model"
        )


def _vocabulary(model: nn.Module) -> int | None:
    """The number of token ids of a transformers model of text; None for any other."""
    find: Any = getattr(model, "get_input_embeddings", None)
    if find is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    try:
        embedding = find()
    except NotImplementedError:
        return None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    items = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(items, (tuple, list)):
        return []
    return [tensor for item in items for tensor in _tensors(item)]


def first_sequences(batch: Any, number: int) -> Any:
    """The first rows of every tensor of a batch that has the batch's number of them."""
    if isinstance(batch, Tensor):
        return batch[:number]
    if isinstance(batch, Mapping):
        tensors = [v for v in batch.values() if isinstance(v, Tensor) and v.dim()]
        size = tensors[0].shape[0] if tensors else 0
        return {
            k: v[:number] if isinstance(v, Tensor) and v.dim() and v.shape[0] == size else v
            for k, v in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        return type(batch)(first_sequences(item, number) for item in batch)
    return batch
