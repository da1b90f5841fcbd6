"""What a probe knows during one forward pass: the padding mask, and what it measured already.

Read by probe.py.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.sites import first_tensor


class ForwardPass:
    """State between the start and the end of one call of the model."""

    def __init__(self, mask: Tensor | None = None, num_new: int | None = None):
        self.mask = mask
        """Bool [B, S], True at real tokens (S past plus new tokens); None means all are."""
        self.num_new = num_new
        """Tokens that this call adds; S unless a cache holds the past."""
        self.mask_used = False
        self._results: dict[int, tuple[weakref.ref, int, dict[str, Any]]] = {}
        self._shown: dict[int, weakref.ref] = {}

    @classmethod
    def start(
        cls, model: nn.Module, args: tuple, kwargs: dict, mask: Tensor | None = None
    ) -> ForwardPass:
        """Read the mask from the call's `attention_mask` unless one is given."""
        given = first_tensor([args, kwargs])
        num_new = given.shape[1] if given is not None and given.dim() > 1 else None
        return cls(_find_mask(model, args, kwargs) if mask is None else mask != 0, num_new)

    def mask_for(self, x: Tensor) -> Tensor | None:
        """The mask of the tokens of x [B, T, ...], [B, H, T, K] or [B*T, D]; None if all count.

        None also for a tensor without a token dimension, such as a pooled one.
        """
        mask = self.mask
        if mask is None or x.dim() < 2:
            return None
        batch, length = mask.shape
        lengths = {length, self.num_new or length} if (self.num_new or 0) <= length else {length}
        found = None
        if x.shape[0] == batch and x.dim() > 2 and x.shape[1] in lengths:
            recent = mask[:, length - x.shape[1] :]
            found = recent.reshape(*recent.shape, *[1] * (x.dim() - 3)).expand(x.shape[:-1])
        elif x.shape[0] == batch and x.dim() == 4 and x.shape[2] in lengths:
            found = mask[:, None, length - x.shape[2] :].expand(x.shape[:-1])
        elif x.dim() == 2 and x.shape[0] == batch * length:
            found = mask.reshape(-1)
        self.mask_used |= found is not None
        return found

    def remember(self, x: Tensor, what: str, compute: Callable[[], Any]) -> Any:
        """Compute once for each tensor, told by identity and version (in-place changes)."""
        with torch.no_grad():
            if x.is_inference():  # has no version, so a change would go unnoticed
                return compute()
            entry = self._results.get(id(x))
            if entry is None or entry[0]() is not x or entry[1] != x._version:
                entry = self._results[id(x)] = (weakref.ref(x), x._version, {})
            results = entry[2]
            if what not in results:
                results[what] = compute()
            return results[what]

    def first_time(self, x: Tensor) -> bool:
        """Whether this very tensor comes here for the first time in this pass."""
        known = self._shown.get(id(x))
        self._shown[id(x)] = weakref.ref(x)
        return known is None or known() is not x


def in_backward() -> bool:
    """Whether a backward pass is running: activation checkpointing repeats the forward in it."""
    return torch._C._current_graph_task_id() != -1


def _find_mask(model: nn.Module, args: tuple, kwargs: dict) -> Tensor | None:
    mask = kwargs.get("attention_mask")
    if mask is None and len(args) > 1:
        with contextlib.suppress(TypeError, ValueError):
            bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
            mask = bound.arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return None
    return mask != 0
