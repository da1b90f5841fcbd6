"""A transformers cache as our attention and connections see it during one forward pass.

Keys and values go into whatever cache transformers hands over (dynamic, static, offloaded,
quantised); what the universal connection carries from call to call hangs on the same object and
follows when rows are reordered, repeated or cropped (`skipless.surgery.universal.states`).

Layers without attention keep nothing, so the cache's layers are numbered by attention sublayers.
Read by `modeling.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from skipless.errors import UserError
from skipless.model.cache import KeyValueCache
from skipless.surgery.universal.states import LayerState, state_of

__all__ = ["CACHE_NAME", "Past", "the_cache"]

CACHE_NAME = (
    "cache"
    if any(f.name == "cache" for f in dataclasses.fields(CausalLMOutputWithPast))
    else "past_key_values"
)
"""What transformers calls the cache in outputs: the latter before 5.24."""


class Past(KeyValueCache):
    """`held`, a transformers cache, for one forward pass over a batch of `num_rows`.

    `numbers` gives each layer with attention its number in `held`; `keeps_state` says whether
    connections carry anything beside keys and values. Raises UserError for a cache whose tokens
    the connections did not see.
    """

    def __init__(
        self, held: Any, numbers: dict[int, int], num_rows: int, keeps_state: bool
    ) -> None:
        super().__init__()
        _check_rows(held, num_rows)
        self.held, self.numbers = held, numbers
        self.length = int(held.get_seq_length())  # a static cache returns a tensor that moves
        self.state: LayerState | None = (
            state_of(held, "skipless", 0, num_rows) if keeps_state else None
        )

    def check_room(self, num_new: int) -> None:
        """Raise UserError where a cache of fixed size cannot take `num_new` more tokens."""
        layers = getattr(self.held, "layers", ())
        rooms = [found for layer in layers if (found := getattr(layer, "max_cache_len", None))]
        if rooms and min(rooms) < self.length + num_new:
            raise UserError(
                f"the static cache has room for {min(rooms)} tokens and {self.length + num_new} "
                "would be in it; make it larger (max_cache_len)"
            )

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' key and value [B, G, T, K]; return all of them [B, G, S, K]."""
        keys, values = self.held.update(key, value, self.numbers[layer])
        stop = self.length + key.shape[2]  # a static cache returns its empty places too
        return keys[:, :, :stop], values[:, :, :stop]

    def extend(self, key: Hashable, new: Tensor) -> Tensor:
        """As `KeyValueCache.extend`, kept on the transformers cache."""
        return self._carried.extend(key, new)

    def remember(self, key: Hashable, length: int, sums: tuple[Tensor, ...]) -> None:
        """As `KeyValueCache.remember`."""
        self._carried.remember(key, length, sums)

    def recall(self, key: Hashable, length: int) -> tuple[Tensor, ...] | None:
        """As `KeyValueCache.recall`."""
        return self._carried.recall(key, length)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a finished forward pass."""
        super().advance(num_tokens)
        if self.state is not None:
            self.state.advance(num_tokens)

    @property
    def _carried(self) -> LayerState:
        assert self.state is not None, "made for a model whose connections carry nothing"
        return self.state


def _check_rows(held: Any, num_rows: int) -> None:
    """UserError for a cache of another batch; one that makes its keys when asked is not asked."""
    for layer in getattr(held, "layers", ())[:1]:
        keys = vars(layer).get("keys")
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[0] != num_rows:
            raise UserError(
                f"the cache holds {keys.shape[0]} rows and the batch has {num_rows}; make a new "
                "cache, or take rows by cache.batch_select_indices"
            )


def the_cache(cache: Any, past_key_values: Any) -> Any:
    """The one of the two that is given: transformers renamed the argument in 5.24."""
    if cache is not None and past_key_values is not None:
        raise UserError(
            "cache and past_key_values are two names of one argument; pass the one or the other"
        )
    return past_key_values if cache is None else cache
