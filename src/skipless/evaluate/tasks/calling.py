"""Calling a causal model with and without a cache, ours or one of Hugging Face's.

Read by `scoring.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.evaluate.tasks.trees import Tree
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
        self._names = set(names)
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

    @property
    def has_trees(self) -> bool:
        """Whether a token can be told what it sees, so that a row holds several texts.

        In full precision only: a range would be one of all of them. A window that slides would be
        lost, since such a mask replaces the model's own.
        """
        config: Any = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        return (
            {"attention_mask", "position_ids", "logits_to_keep"} <= self._names
            and getattr(config, "_attn_implementation", None) in ("sdpa", "eager")
            and kinds == {"full_attention"}
            and not getattr(config, "sliding_window", None)
            and quantization(self.model) is None
        )

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

    def tree(self, tree: Tree, keep: Tensor, trunk: tuple[Any, int] | None = None) -> Tensor:
        """Logits [K, V] at the places `keep` [K] of a row in which each token sees its own.

        `trunk` is a cache with so many tokens, which all of the row see; it is left as it was.
        """
        cache, length = trunk or (None, 0)
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        mask = torch.zeros(len(tree.ids), length + len(tree.ids), dtype=dtype)
        mask[:, length:].masked_fill_(~tree.sees, torch.finfo(dtype).min)
        options = {
            "attention_mask": mask[None, None].to(self.device),
            "position_ids": (length + tree.positions)[None].to(self.device),
            "logits_to_keep": keep.to(self.device),
        }  # fmt: skip
        if cache is None:
            return self._call(tree.ids[None], 0, options | self._no_cache())[0][0]
        held = {self._cache_name or "cache": cache, "use_cache": True}
        logits = self._call(tree.ids[None], 0, options | held)[0][0]
        cache.crop(-len(tree.ids))  # of older versions, too, a negative number is what to drop
        return logits

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
