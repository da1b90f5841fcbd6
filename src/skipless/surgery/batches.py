"""What a batch says of itself: how many tokens it holds, and which of them are padding.

A batch is what `skipless.evaluate.loss` takes: token ids, (ids, labels), or keyword arguments. Read
by `convert` and `prune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from skipless.sites import first_tensor

__all__ = ["count", "real_tokens"]


def count(batch: Any) -> int:
    """Tokens of a batch; examples where it holds none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    ids = ids[0] if isinstance(ids, (tuple, list)) else ids
    if isinstance(ids, Tensor) and not ids.is_floating_point():
        return ids.numel()
    tensor = first_tensor(batch)
    return 0 if tensor is None else len(tensor)


def real_tokens(batch: Any, like: Tensor) -> Tensor | None:
    """Which tokens of `like` [B, T, C] are no padding, bool [B, T]; None where the batch does not
    tell, or has another number of them (an encoder's, seen from the decoder)."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == like.shape[:-1]:
        return mask.to(like.device, torch.bool)
    return None
