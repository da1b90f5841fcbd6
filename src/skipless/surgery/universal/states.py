"""What interpolators carry from one call to the next, kept on transformers' own cache object.

A cache that a patched layer meets gets one `LayerState` a layer and the class `following_class`
makes: its `crop`, `reorder_cache`, `batch_repeat_interleave`, `batch_select_indices` and `reset` do
to the states what they do to keys and values. So the state lives and dies with the cache, and a
copy of the cache carries a copy of it. Read by `contexts.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.model.cache import KeyValueCache
from skipless.surgery.rewriting import namesake, reducer

__all__ = ["LayerState", "state_of"]

_STATES = "_skipless_states"


class LayerState(KeyValueCache):
    """Histories and running sums of one layer's connections, and which past tokens were real.

    `index` is the layer's number in the transformers cache. Nothing here has a graph: gradients
    reach the tokens of the running call, not those of earlier ones.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.tokens: Tensor | None = None
        """Bool [B, S], False on padding; None while every token was real."""

    @property
    def batch_size(self) -> int | None:
        """Rows of what is kept; None when nothing is."""
        return next((history.shape[0] for history in self._histories.values()), None)

    def extend(self, key: Hashable, new: Tensor) -> Tensor:
        """As the base class does; the part that is `new` keeps its graph."""
        known = super().extend(key, new)
        return torch.cat((known[:, : self.length], new), 1) if torch.is_grad_enabled() else known

    def real(self, new: Tensor | None, shape: tuple[int, int], device: torch.device):
        """Bool [B, S] of past and `new` tokens [B, T], or None when all are real; `shape` is
        (B, T)."""
        if self.tokens is None and new is None:
            return None
        rows, num_new = shape
        past = self.tokens
        if past is None:
            past = torch.ones(rows, self.length, dtype=torch.bool, device=device)
        if new is None:
            new = torch.ones(rows, num_new, dtype=torch.bool, device=device)
        return torch.cat((past, new), dim=1)

    def crop(self, length: int) -> None:
        super().crop(length)
        if self.tokens is not None:
            self.tokens = self.tokens[:, :length]

    def reorder(self, rows: Tensor) -> None:
        held = next(iter(self._histories.values()), None)
        rows = rows if held is None else rows.to(held.device)
        super().reorder(rows)
        if self.tokens is not None:
            self.tokens = self.tokens.index_select(0, rows.to(self.tokens.device))


def state_of(kept_in: Any, key: Hashable, index: int, num_rows: int) -> LayerState:
    """The state of layer `key` in a transformers cache, made when the cache is empty.

    `index` is the layer's number in the cache, `num_rows` the batch of the running call. Raises
    UserError for a cache whose tokens the connections did not see, or whose batch is another.
    """
    held = getattr(kept_in, "self_attention_cache", kept_in)  # of an EncoderDecoderCache
    if _STATES not in vars(held):
        setattr(held, _STATES, {})
        held.__class__ = following_class(type(held))
    states: dict[Hashable, LayerState] = getattr(held, _STATES)
    try:
        past = int(held.get_seq_length(index))
    except ValueError as error:
        raise UserError(f"the cache keeps no length for layer {index} ({error})") from None
    if past == 0:
        states.pop(key, None)
    state = states.get(key)
    if state is None and past == 0:
        state = states[key] = LayerState(index)
    known = state.length if state is not None else 0
    if state is None or known != past:
        raise UserError(
            f"the cache holds {past} tokens and the universal connections of this layer have seen "
            f"{known} of them (it was filled before patch, by another model, or a call failed half "
            "way); start with a new cache"
        )
    if state.batch_size not in (None, num_rows):
        raise UserError(
            f"the cache holds a batch of {state.batch_size} and the input has {num_rows}; start "
            "with a new cache"
        )
    return state


@cache
def following_class(cls: type) -> type:
    """A subclass of a transformers cache class whose operations reach the states too."""

    def crop(self, *args, **kwargs):
        cls.crop(self, *args, **kwargs)
        for state in getattr(self, _STATES).values():
            # the new length and not the argument: its meaning differs between versions and layers
            state.crop(min(int(self.get_seq_length(state.index)), state.length))

    def reorder_cache(self, beam_idx):
        cls.reorder_cache(self, beam_idx)
        _reorder(self, lambda rows: beam_idx)

    def batch_repeat_interleave(self, repeats):
        cls.batch_repeat_interleave(self, repeats)
        _reorder(self, lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        cls.batch_select_indices(self, indices)
        _reorder(self, lambda rows: rows[torch.as_tensor(indices).to(rows.device)])

    def reset(self):
        cls.reset(self)
        getattr(self, _STATES).clear()

    body = {
        "crop": crop, "reorder_cache": reorder_cache, "reset": reset,
        "batch_repeat_interleave": batch_repeat_interleave,
        "batch_select_indices": batch_select_indices,
    }  # fmt: skip
    body = {name: method for name, method in body.items() if hasattr(cls, name)}
    return namesake(cls, {**body, "__reduce_ex__": reducer(following_class, cls)})


def _reorder(held: Any, choose: Any) -> None:
    for state in getattr(held, _STATES).values():
        if state.batch_size is not None:
            state.reorder(choose(torch.arange(state.batch_size)))
