"""Keys and values of past tokens, so that decoding computes only the new one.

Storage grows by doubling and is written in place; what `update` returns are views. Read by
`attention.py` and `generation.py`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from skipless.errors import UserError


class KeyValueCache:
    """Keys and values per layer, each [B, G, S, K] after RoPE.

    `length` counts the tokens that all layers have seen; it advances once per forward pass.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._histories: dict[Hashable, Tensor] = {}
        self._sums: dict[Hashable, tuple[int, tuple[Tensor, ...]]] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' key and value [B, G, T, K]; return all of them [B, G, S, K]."""
        start, stop = self.length, self.length + key.shape[2]
        while len(self._keys) <= layer:
            self._keys.append(key.new_empty((*key.shape[:2], 0, key.shape[3])))
            self._values.append(value.new_empty((*value.shape[:2], 0, value.shape[3])))
        if self._keys[layer].shape[0] != key.shape[0]:
            raise UserError(
                f"the cache holds a batch of {self._keys[layer].shape[0]} and the input has "
                f"{key.shape[0]}; start a new cache"
            )
        self._keys[layer] = _grown(self._keys[layer], start, stop)
        self._values[layer] = _grown(self._values[layer], start, stop)
        self._keys[layer][:, :, start:stop] = key
        self._values[layer][:, :, start:stop] = value
        return self._keys[layer][:, :, :stop], self._values[layer][:, :, :stop]

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
        self._keys = [k.index_select(0, rows) for k in self._keys]
        self._values = [v.index_select(0, rows) for v in self._values]
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
