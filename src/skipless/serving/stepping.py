"""Logits of the next token, a forward pass a token, with whatever cache the model keeps.

Our models slide when a text grows beyond their context, by the rule of `model.generation`; others
end there. A model without a cache computes everything anew. Read by `writing.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.model import Transformer
from skipless.model.cache import KeyValueCache
from skipless.model.generation import window_start
from skipless.quant.kvcache import PackedTensor, code_tensor


class RoundedStore:
    """One layer's keys or values, rounded to packed integers as they come (Q1).

    For a cache of few bits under a model in full precision; a scheme with -KV has its own.
    `granularity` is token (a scale for each token and head) or tensor, as in a scheme.
    """

    def __init__(self, bits: int, granularity: str = "token") -> None:
        self.bits, self.granularity = bits, granularity
        self.packed = PackedTensor(bits)

    @property
    def num_bytes(self) -> int:
        """What codes and scales take, room to grow included."""
        return self.packed.num_bytes

    def append(self, new: Tensor, start: int) -> Tensor:
        """Put new tokens [B, G, T, K] at `start`; return all of them, rounded."""
        codes, scale, _ = code_tensor(new, self.bits, self.granularity, True, "absmax")
        self.packed.append(codes, scale, start)
        return self.packed.values(start + new.shape[2], new.dtype)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows`, in that order."""
        self.packed.select(rows)


class OwnSteps:
    """Next-token logits of a `Transformer`."""

    slides = True

    def __init__(self, model: Transformer, kv_bits: int | None, granularity: str) -> None:
        self.model, self.kv_bits, self.granularity = model, kv_bits, granularity
        self.limit = model.config.max_position_embeddings
        self._cache: KeyValueCache | None = None
        self.start = 0
        """Tokens of the beginning that the last logits did not see."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [1, V] after all of `ids`, of which the ones before were given already."""
        wanted = window_start(len(ids), self.limit)
        if self._cache is None or wanted != self.start:
            self._cache, self.start = self._new_cache(), wanted
        new = torch.tensor([ids[self.start + self._cache.length :]], device=_device(self.model))
        return self.model(new, cache=self._cache, logits_to_keep=1).logits[:, -1]

    def _new_cache(self) -> KeyValueCache:
        bits = self.kv_bits
        if bits is None:
            return self.model.new_cache()
        return KeyValueCache(lambda layer, kind: RoundedStore(bits, self.granularity))

    @property
    def num_bytes(self) -> int | None:
        """What the cache takes, room to grow included; None where nothing is kept."""
        return None if self._cache is None else self._cache.num_bytes or None


class ForeignSteps:
    """Next-token logits of a causal language model of Hugging Face's."""

    slides = False
    start = 0

    def __init__(
        self, model: Any, limit: int | None, new_cache: Callable[[], Any] | None = None
    ) -> None:
        self.model, self.limit = model, limit
        names = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument and the result together
        self._name = next((n for n in ("cache", "past_key_values") if n in names), None)
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        if self._name is None and new_cache is not None:
            raise UserError(
                f"{type(model).__name__} keeps no cache of keys and values that could be rounded; "
                "leave out --kv-bits"
            )
        self._cache = None if new_cache is None else new_cache()
        self._seen = 0

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [1, V] after all of `ids`, of which the ones before were given already."""
        new = torch.tensor([ids[self._seen :]], device=_device(self.model))
        if self._name is None:
            return self.model(new, **self._options).logits[:, -1]
        out = self.model(new, use_cache=True, **{self._name: self._cache}, **self._options)
        self._cache = getattr(out, self._name, None)
        self._seen = 0 if self._cache is None else len(ids)
        return out.logits[:, -1]

    @property
    def num_bytes(self) -> int | None:
        """What keys and values take; None without a cache, or one of another kind."""
        own = getattr(self._cache, "num_bytes", None)
        if own is not None or self._cache is None:
            return own
        held = [
            tensor
            for layer in getattr(self._cache, "layers", ())
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if isinstance(tensor, Tensor)
        ]
        return sum(t.numel() * t.element_size() for t in held) if held else None


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device
