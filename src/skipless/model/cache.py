"""Keys and values of past tokens, so that decoding computes only the new one.

Storage grows by doubling and is written in place; what `update` returns are views. Read by
`attention.py` and `generation.py`.
"""

from __future__ import annotations

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

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a finished forward pass."""
        self.length += num_tokens

    def crop(self, length: int) -> None:
        """Forget every token from position `length` on."""
        if not 0 <= length <= self.length:
            raise UserError(f"cannot crop a cache of {self.length} tokens to {length}")
        self.length = length

    def reorder(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'] in that order: beam search, or repetition."""
        self._keys = [k.index_select(0, rows) for k in self._keys]
        self._values = [v.index_select(0, rows) for v in self._values]


def _grown(stored: Tensor, used: int, needed: int) -> Tensor:
    if stored.shape[2] >= needed:
        return stored
    size = max(needed, 2 * stored.shape[2], 16)
    grown = torch.empty(
        (*stored.shape[:2], size, stored.shape[3]), dtype=stored.dtype, device=stored.device
    )
    grown[:, :, :used] = stored[:, :, :used]
    return grown
