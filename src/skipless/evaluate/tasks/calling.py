"""Calling a causal model with and without a cache, ours or one of Hugging Face's.

Read by `scoring.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant import quantization


class Caller:
    """`logits(ids)` and, where the model keeps a cache, `begin(ids)` and `go_on(ids, cache)`.

    Raises UserError for a model that gives no logits a token, or that sees later tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        forward = getattr(model, "forward", model)
        names = inspect.signature(forward).parameters
        self.is_ours = hasattr(model, "new_cache") and "cache" in names
        self._cache_name = next((n for n in ("cache", "past_key_values") if n in names), None)
        self._keeps = "logits_to_keep" in names
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise UserError(
                f"{type(model).__name__} reads one text and writes another; a causal language "
                "model was expected"
            )

    @property
    def has_cache(self) -> bool:
        """Whether a prefix can be computed once for several continuations."""
        return self._cache_name is not None

    def check_ids(self, largest: int) -> None:
        """Raise UserError for a token id beyond the model's vocabulary."""
        if hasattr(self.model, "get_input_embeddings"):
            size = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        else:
            size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        if size is not None and largest >= size:
            raise UserError(
                f"token {largest} is beyond the model's vocabulary of {size}; is it this model's "
                "tokenizer?"
            )

    def check_causal(self) -> None:
        """Raise UserError if the prediction for a token depends on those after it."""
        ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
        first, second = self.logits(ids)[:, :2].float()
        if float((first - second).abs().max()) > 1e-2 * (1 + float(first.abs().max())):
            raise UserError(
                f"{type(self.model).__name__} sees the tokens that it is asked for; a causal "
                "language model was expected"
            )

    def logits(self, ids: Tensor, keep: int = 0) -> Tensor:
        """[B, T, V], or [B, keep, V] of the last `keep` places."""
        return self._call(ids, keep, self._no_cache())[0]

    def begin(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Logits [B, V] after the last token of ids [B, T], and the cache with all of them."""
        if self.is_ours:
            cache = self.model.new_cache()
            return self._call(ids, 1, {"cache": cache})[0][:, -1], cache
        logits, out = self._call(ids, 1, {"use_cache": True})
        # transformers 5.24 renamed the argument and the result together
        return logits[:, -1], getattr(out, self._cache_name or "cache", None)

    def go_on(self, ids: Tensor, cache: Any, rows: Tensor) -> Tensor:
        """Logits [R, T, V] of ids [R, T] that follow rows [R] of `cache`, which is used up."""
        rows = rows.to(self.device)
        if self.is_ours:
            cache.reorder(rows)
            return self._call(ids, 0, {"cache": cache})[0]
        cache.batch_select_indices(rows)
        return self._call(ids, 0, {self._cache_name or "cache": cache, "use_cache": True})[0]

    def _no_cache(self) -> dict[str, Any]:
        return {} if self.is_ours or not self.has_cache else {"use_cache": False}

    def _call(self, ids: Tensor, keep: int, options: dict[str, Any]) -> tuple[Tensor, Any]:
        if keep and self._keeps:
            options = options | {"logits_to_keep": keep}
        out = self.model(ids.to(self.device), **options)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise UserError(
                f"{type(self.model).__name__} gives no logits [batch, time, vocabulary]; a causal "
                "language model was expected"
            )
        return (logits[:, -keep:] if keep else logits), out


def depends_on_batch(model: nn.Module) -> bool:
    """Whether other sequences in a batch change a sequence's numbers.

    They do where a range is taken from a whole tensor of activations as it comes: then padding, and
    what is left out as already computed, would move the rounding steps.
    """
    record = quantization(model)
    if record is None:
        return False
    return any(
        part.dynamic and part.activation_granularity == "tensor"
        and not (part.activation_bits is None and part.kv_bits is None
                 and part.probability_bits is None)
        for part in record.scheme.parts()
    )  # fmt: skip
