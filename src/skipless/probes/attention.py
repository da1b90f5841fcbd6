"""What attention looks at: entropy, largest probability, sink, saturation (S10).

`AttentionStatistics` sees probabilities [B, H, T, S] batch by batch. Fused attention never forms
them, so `eager_attention(model)` switches to a path that does:

- attention modules that show their probabilities through a submodule `probabilities` when their
  `implementation` is "eager": ours;
- a model (or a part of one) with a method `eager_attention()` that is a context manager;
- a model with `set_attn_implementation`, as in transformers: set to "eager" and back again.

Row 0 of a causal layer sees one key, so it is always saturated: 1/T of the rows is the floor.
Read by probe.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.probes.rows import F64
from skipless.sites import chooses_implementation

SATURATED = 0.99
_FIELDS = ("entropy", "max_probability", "first_token_mass", "saturated", "self_mass")


class AttentionStatistics:
    """Means over all rows (queries) of one layer, per head; empty at first."""

    def __init__(self) -> None:
        self.totals: Tensor | None = None
        """Sums over rows, float64 [5, H], in the order of _FIELDS."""
        self.count = 0
        """Rows a head."""
        self.nonfinite = 0
        """Rows with a NaN or infinity, left out; over all heads."""

    def update(self, probabilities: Tensor, mask: Tensor | None = None) -> AttentionStatistics:
        """Add [B, H, T, S]; `mask` [B, S] is True at real tokens. Returns self.

        Padded queries are left out and the first token is each sequence's first real one.
        """
        if probabilities.dim() != 4:
            raise UserError(
                f"attention probabilities have shape {tuple(probabilities.shape)}; "
                "expected [batch, heads, queries, keys]"
            )
        p = probabilities.detach()
        p = (p.cpu() if p.device.type == "mps" else p).to(F64)
        batch, heads, queries, keys = p.shape
        if p.numel() == 0:
            return self
        first = p[..., 0]
        keep = p.new_ones(batch, 1, queries, dtype=torch.bool)
        if mask is not None and mask.shape == (batch, keys):
            mask = mask.to(device=p.device, dtype=torch.bool)
            keep = mask[:, None, keys - queries :].clone()
            start = mask.int().argmax(1)[:, None, None, None].expand(-1, heads, queries, 1)
            first = p.gather(-1, start).squeeze(-1)
        entropy = torch.special.entr(p).sum(-1)
        largest = p.amax(-1)
        itself = p.diagonal(dim1=-2, dim2=-1) if queries == keys else torch.zeros_like(first)
        values = torch.stack([entropy, largest, first, (largest > SATURATED).to(F64), itself])
        broken = ~entropy.isfinite() & keep
        if broken.any():
            self.nonfinite += int(broken.sum())
            # A row is dropped in all heads, so that heads keep one count.
            keep = keep & ~broken.any(1, keepdim=True)
        values = torch.where(keep, values, 0.0).sum((1, 3))
        self.totals = values if self.totals is None else self.totals + values.to(self.totals.device)
        self.count += int(keep.sum())
        return self

    def merge(self, other: AttentionStatistics) -> AttentionStatistics:
        """Add what `other` has seen (left as it is). Returns self."""
        self.count += other.count
        self.nonfinite += other.nonfinite
        if other.totals is not None:
            device = other.totals.device if self.totals is None else self.totals.device
            new = other.totals.to(device)
            self.totals = new if self.totals is None else self.totals + new
        return self

    def summary(self) -> dict[str, Any]:
        """Means over rows and heads: `entropy` in nats, `max_probability`, `first_token_mass`,
        `saturated` (share of rows whose largest p > .99), `self_mass` (diagonal), and
        `entropy_per_head`; None where no row was seen."""
        if not self.count or self.totals is None:
            empty = dict.fromkeys((*_FIELDS, "entropy_per_head"))
            return {"count": 0, "nonfinite": self.nonfinite, **empty}
        means = self.totals / self.count
        averages = dict(zip(_FIELDS, means.mean(1).tolist(), strict=True))
        return {
            "count": self.count,
            "nonfinite": self.nonfinite,
            **averages,
            "entropy_per_head": means[0].tolist(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, as CPU tensors and numbers."""
        return {**vars(self), "totals": None if self.totals is None else self.totals.cpu()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> AttentionStatistics:
        """The inverse of `state_dict`."""
        statistics = cls()
        vars(statistics).update(state)
        return statistics


def attention_statistics(probabilities: Tensor) -> dict[str, Any]:
    """S10 of probabilities [B, H, T, S], one-shot: see `AttentionStatistics.summary`."""
    return AttentionStatistics().update(probabilities).summary()


@contextlib.contextmanager
def eager_attention(model: nn.Module) -> Iterator[bool]:
    """Let `model` form its attention probabilities inside the context; yields whether it can.

    Raises UserError if a model refuses the eager implementation.
    """
    layers = [
        module for module in model.modules()
        if chooses_implementation(module)
        and isinstance(getattr(module, "probabilities", None), nn.Module)
    ]  # fmt: skip
    if layers:
        implementations = [layer.implementation for layer in layers]
        try:
            for layer in layers:
                layer.implementation = "eager"
            yield True
        finally:
            for layer, implementation in zip(layers, implementations, strict=True):
                layer.implementation = implementation
        return
    own: list[Any] = [m.eager_attention for m in model.modules() if hasattr(m, "eager_attention")]
    if own:
        with own[0]():
            yield True
        return
    switch = getattr(model, "set_attn_implementation", None)
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not callable(switch) or before == "eager":
        yield before == "eager"
        return
    try:
        switch("eager")
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{type(model).__name__} has no eager attention ({error}); leave 'attention' out of "
            "the stats"
        ) from error
    try:
        yield True
    finally:
        switch(before)


def find_probabilities(result: Any) -> Tensor | None:
    """Attention probabilities [B, H, T, S] in what a module returned, told by rows of sum 1."""
    items = [result] if isinstance(result, Tensor) else result
    for item in items if isinstance(items, (tuple, list)) else ():
        if isinstance(item, Tensor) and item.dim() == 4 and item.is_floating_point():
            sums = item.detach().sum(-1, dtype=torch.float32)
            # Broken rows are counted by the statistics, so they do not speak against the tensor.
            fits = ((sums - 1).abs() < 0.02) | ~sums.isfinite()
            if item.numel() and bool(fits.all()) and not bool((item < 0).any()):
                return item
    return None
