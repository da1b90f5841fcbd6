"""Keys and values of past tokens, so that decoding computes only the new one.

Storage grows by doubling and is written in place; what `update` returns are views. A model whose
keys and values are quantised hands in stores that hold packed integers instead. Read by
`attention.py` and `generation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

from skipless.errors import UserError


class Store(Protocol):
    """Where the keys, or the values, of one layer are kept."""

    @property
    def num_bytes(self) -> int:
        """What it takes, room to grow included."""
        ...

    def append(self, new: Tensor, start: int) -> Tensor:
        """Put new tokens [B, G, T, K] at `start`; return all of them [B, G, start + T, K]."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'], in that order."""
        ...


class FloatStore:
    """Keys or values as they come."""

    def __init__(self) -> None:
        self.stored: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes, room to grow included."""
        return 0 if self.stored is None else self.stored.numel() * self.stored.element_size()

    def append(self, new: Tensor, start: int) -> Tensor:
        """Put new tokens [B, G, T, K] at `start`; return all of them, a view."""
        if self.stored is None:
            self.stored = new.new_empty((*new.shape[:2], 0, new.shape[3]))
        if self.stored.shape[0] != new.shape[0]:
            raise UserError(
                f"the cache holds a batch of {self.stored.shape[0]} and the input has "
                f"{new.shape[0]}; start a new cache"
            )
        stop = start + new.shape[2]
        stored = self.reserve(start, stop)
        stored[:, :, start:stop] = new
        return stored[:, :, :stop]

    def reserve(self, used: int, needed: int) -> Tensor:
        """All that is stored, with room for `needed` tokens; the first `used` are kept."""
        assert self.stored is not None, "nothing was appended yet"
        self.stored = _grown(self.stored, used, needed)
        return self.stored

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows`, in that order."""
        if self.stored is not None:
            self.stored = self.stored.index_select(0, rows)


class KeyValueCache:
    """Keys and values per layer, each [B, G, S, K] after RoPE.

    `length` counts the tokens that all layers have seen; it advances once per forward pass.
    `new_store(layer, "key" or "value")` makes what holds them; floating point by default.
    """

    def __init__(self, new_store: Callable[[int, str], Store] | None = None) -> None:
        self.length = 0
        self.arrangement = 0
        """Counts how often the rows were rearranged, which moves what the stores hold."""
        self._new_store = new_store
        self.stores: dict[tuple[int, str], Store] = {}
        self._histories: dict[Hashable, Tensor] = {}
        self._sums: dict[Hashable, tuple[int, tuple[Tensor, ...]]] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' key and value [B, G, T, K]; return all of them [B, G, S, K]."""
        return (
            self._store(layer, "key").append(key, self.length),
            self._store(layer, "value").append(value, self.length),
        )

    def _store(self, layer: int, kind: str) -> Store:
        store = self.stores.get((layer, kind))
        if store is None:
            store = FloatStore() if self._new_store is None else self._new_store(layer, kind)
            self.stores[layer, kind] = store
        return store

    @property
    def num_bytes(self) -> int:
        """What all keys and values take, room to grow included."""
        return sum(store.num_bytes for store in self.stores.values())

    def extend(self, key: Hashable, new: Tensor) -> Tensor:
        """Append one site's new rows [B, T, C] under `key`; return all of them [B, S, C].

        For what connections carry beside keys and values (C8); detached from any graph.
        """
        start, stop = self.length, self.length + new.shape[1]
        stored = self._histories.get(key)
        if stored is None:
            stored = new.new_empty((new.shape[0], 1, 0, new.shape[2]))
        stored = _grown(stored, start, stop)
        stored[:, 0, start:stop] = new.detach()
        self._histories[key] = stored
        return stored[:, 0, :stop]

    def remember(self, key: Hashable, length: int, sums: tuple[Tensor, ...]) -> None:
        """Keep sums [B, ...] over the first `length` tokens of one site, for `recall`."""
        self._sums[key] = (length, tuple(s.detach() for s in sums))

    def recall(self, key: Hashable, length: int) -> tuple[Tensor, ...] | None:
        """The sums over exactly `length` tokens, or None when they must be summed anew."""
        known, sums = self._sums.get(key, (-1, ()))
        return sums if known == length else None

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a finished forward pass."""
        self.length += num_tokens

    def crop(self, length: int) -> None:
        """Forget every token from position `length` on."""
        if not 0 <= length <= self.length:
            raise UserError(f"cannot crop a cache of {self.length} tokens to {length}")
        self.length = length
        # sums cannot be taken back: who needs them adds the kept rows up again
        self._sums = {key: kept for key, kept in self._sums.items() if kept[0] <= length}

    def reorder(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'] in that order: beam search, or repetition."""
        self.arrangement += 1
        for store in self.stores.values():
            store.select(rows)
        self._histories = {k: h.index_select(0, rows) for k, h in self._histories.items()}
        self._sums = {
            key: (length, tuple(s.index_select(0, rows) for s in sums))
            for key, (length, sums) in self._sums.items()
        }


def _grown(stored: Tensor, used: int, needed: int) -> Tensor:
    if stored.shape[2] >= needed:
        return stored
    size = max(needed, 2 * stored.shape[2], 16)
    grown = torch.empty(
        (*stored.shape[:2], size, stored.shape[3]), dtype=stored.dtype, device=stored.device
    )
    grown[:, :, :used] = stored[:, :, :used]
    return grown
