"""A transformers cache whose keys and values are packed integers (Q1).

    cache = QuantizedCache(bits=8)
    model.generate(**inputs, cache=cache)            # before transformers 5.24: past_key_values=
    cache.num_bytes

Every token is rounded when it comes, those of one forward pass together, and used rounded at once:
the values are those of `fake_quantize`, so what is measured with the simulation is what runs.
Works with any model that takes a DynamicCache; also with beam search, contrastive and assisted
decoding (crop, reorder, repeat, select).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from skipless.errors import UserError, check_choice
from skipless.quant.kvcache import PackedTensor, code_tensor
from skipless.ranges import is_whole

__all__ = ["QuantizedCache", "QuantizedLayer"]


class QuantizedCache(DynamicCache):
    """DynamicCache of packed integers of `bits` (2 to 16) for every layer.

    `granularity` "token": one scale for each token and head; "tensor": one for all tokens and heads
    of a forward pass, as in a scheme without -a:token. Layers with a sliding window keep all
    tokens; their masks hide the old ones. Raises UserError for other values.
    """

    def __init__(self, config: Any = None, *, bits: int = 8, granularity: str = "token") -> None:
        if not is_whole(bits) or not 2 <= bits <= 16:
            raise UserError(f"bits is {bits!r}; a whole number from 2 to 16 was expected")
        check_choice("granularity", granularity, ("token", "tensor"))
        if config is not None and not hasattr(config, "get_text_config"):
            raise UserError(
                f"config is {config!r}; a model's config or none was expected: bits are named, as "
                "in QuantizedCache(bits=8)"
            )
        super().__init__()
        self.bits, self.granularity = bits, granularity
        self.layer_class_to_replicate = partial(QuantizedLayer, bits, granularity)
        if config is not None:
            count = config.get_text_config(decoder=True).num_hidden_layers
            self.layers = [self.layer_class_to_replicate() for _ in range(count)]

    @property
    def num_bytes(self) -> int:
        """What codes and scales take, room to grow included."""
        return sum(layer.num_bytes for layer in self.layers)


class QuantizedLayer(DynamicLayer):
    """Keys and values of one layer."""

    def __init__(self, bits: int = 8, granularity: str = "token", **kwargs: Any) -> None:
        self.bits, self.granularity = bits, granularity
        self._packed = (PackedTensor(bits), PackedTensor(bits))
        self._length, self._dtype = 0, torch.float32
        super().__init__(**kwargs)

    @property
    def num_bytes(self) -> int:
        """What codes and scales take."""
        return sum(packed.num_bytes for packed in self._packed)

    # The base class keeps tensors in these two; here they are made from codes when asked for.
    @property
    def keys(self) -> Tensor | None:
        return self._values_of(0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse(value)

    @property
    def values(self) -> Tensor | None:
        return self._values_of(1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse(value)

    def _values_of(self, index: int) -> Tensor | None:
        if not self._length:
            return None
        return self._packed[index].values(self._length, self._dtype)

    def _refuse(self, value: Tensor | None) -> None:
        if value is not None:
            raise UserError(
                "keys and values of a QuantizedCache are packed integers and cannot be assigned; "
                "call update"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self._dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens [B, G, T, K]; returns all of them, rounded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not key_states.shape[2]:  # no tokens have no range
            keys, values = self.keys, self.values
            return (key_states, value_states) if keys is None or values is None else (keys, values)
        for packed, new in zip(self._packed, (key_states, value_states), strict=True):
            codes, scale, _ = code_tensor(new, self.bits, self.granularity, True, "absmax")
            packed.append(codes, scale, self._length)
        self._length += key_states.shape[2]
        first, second = self._packed
        return first.values(self._length, self._dtype), second.values(self._length, self._dtype)

    def get_seq_length(self) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; a negative number, as in transformers."""
        if tokens_to_remove > 0:
            raise UserError(
                f"crop({tokens_to_remove}): a negative number of tokens to remove was expected"
            )
        self._length = max(self._length + tokens_to_remove, 0)

    def reset(self) -> None:
        self._packed = (PackedTensor(self.bits), PackedTensor(self.bits))
        self._length, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._length:
            rows = torch.arange(self._batch, device=indices.device)[indices]
            self._select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._length:
            self._select(torch.arange(self._batch).repeat_interleave(repeats))

    @property
    def _batch(self) -> int:
        codes = self._packed[0].codes
        return 0 if codes is None else len(codes)

    def _select(self, rows: Tensor) -> None:
        for packed in self._packed:
            packed.select(rows)

    def offload(self) -> None:
        for packed in self._packed:
            packed.to("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            for packed in self._packed:
                packed.to(self.device)
