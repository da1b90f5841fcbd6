"""Distillation: how far a model's distribution is from another's, in training and on held-out text.

Read by `stages.py`, and by whatever measures a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.evaluate.losses import SequenceLosses, sequence_losses, split_batch
from skipless.quant import run_batch
from skipless.surgery.batches import real_tokens
from skipless.train.precision import autocast

__all__ = ["Yardstick", "distillation_loss", "divergence", "logits_of"]

Loss = Callable[[nn.Module, list[Any]], float]


def divergence(
    target: Tensor, found: Tensor, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """KL(p || q) tau^2 in nats, mean over positions; p = softmax(target / tau), q of `found`.

    Logits [..., V] of any float dtype, computed in fp32; `mask` [...] leaves out positions where it
    is 0. A scalar that has the gradient of `found`.
    """
    p = F.log_softmax(target.float() / temperature, dim=-1)
    q = F.log_softmax(found.float() / temperature, dim=-1)
    each = F.kl_div(q, p, reduction="none", log_target=True).sum(-1) * temperature**2
    if mask is None:
        return each.mean()
    return (each * mask).sum() / mask.sum().clamp(min=1)


def distillation_loss(
    model: nn.Module,
    teacher: nn.Module,
    batch: Any,
    *,
    distill: float,
    cross_entropy: float,
    temperature: float,
    precision: str = "fp32",
) -> Tensor:
    """distill KL(teacher || model) + cross_entropy CE(text), a scalar in nats a position."""
    device = next(model.parameters()).device
    with autocast(precision, device):
        found = logits_of(model, run_batch(model, batch))
    loss = torch.zeros((), device=found.device)
    if distill:
        with autocast(precision, device), torch.no_grad():
            target = logits_of(teacher, run_batch(teacher, batch))
        loss = loss + distill * divergence(target, found, temperature, real_tokens(batch, found))
    if cross_entropy:
        labels = split_batch(batch)[1].to(found.device)
        loss = loss + cross_entropy * F.cross_entropy(found.flatten(0, 1).float(), labels.flatten())
    return loss


def logits_of(model: nn.Module, output: Any) -> Tensor:
    """The scores in what `model` returned. Raises UserError if there are none."""
    for name in ("logits", "logits_per_image"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise UserError(
        f"{type(model).__name__} returns no logits, which distillation compares; convert the class "
        "with its head, such as ...ForCausalLM"
    )


class Yardstick:
    """Held-out loss and distance to the original, always on the same batches.

    `loss(model, batches)` measures what is no language model, in whatever unit.
    """

    def __init__(
        self,
        teacher: nn.Module,
        batches: list[Any],
        loss: Loss | None = None,
        precision: str = "fp32",
    ) -> None:
        self.teacher, self.batches, self.loss, self.precision = teacher, batches, loss, precision
        self.baseline: SequenceLosses | float | None = None
        """What the unconverted model had; the first call of `__call__` sets it."""

    def __call__(self, model: nn.Module) -> tuple[float, float, float | None]:
        """(loss, its increase over the first call's, standard error of the increase)."""
        with autocast(self.precision, next(model.parameters()).device):
            if self.loss is not None:
                found: SequenceLosses | float = float(self.loss(model, self.batches))
            else:
                found = sequence_losses(model, self.batches)
        if self.baseline is None:
            self.baseline = found
        if isinstance(found, SequenceLosses) and isinstance(self.baseline, SequenceLosses):
            error = found.standard_error(self.baseline)
            return found.nats, found.nats - self.baseline.nats, error
        assert isinstance(found, float) and isinstance(self.baseline, float)
        return found, found - self.baseline, None

    @property
    def standard_error(self) -> float | None:
        """Of the unconverted model's loss, over sequences."""
        found = self.baseline
        return found.standard_error() if isinstance(found, SequenceLosses) else None

    @property
    def num_tokens(self) -> int | None:
        """Held-out tokens predicted; None with `loss=`."""
        found = self.baseline
        return int(found.counts.sum()) if isinstance(found, SequenceLosses) else None

    def with_divergence(self, model: nn.Module) -> tuple[float, float, float | None, float]:
        """The same and KL(original || model), from the same forward passes."""
        with self._watching(model) as seen:
            loss, increase, error = self(model)
        if not seen:
            raise UserError("the function given as loss= never called the model")
        total = sum(count for _, count in seen)
        return loss, increase, error, sum(kl * count for kl, count in seen) / total

    @contextmanager
    def _watching(self, model: nn.Module) -> Iterator[list[tuple[float, int]]]:
        seen: list[tuple[float, int]] = []

        def watch(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            with torch.no_grad():
                target = logits_of(self.teacher, self.teacher(*args, **kwargs))
            found = logits_of(module, output)
            real = real_tokens(kwargs, found)
            count = found.shape[:-1].numel() if real is None else int(real.sum())
            seen.append((float(divergence(target, found, 1.0, real)), count))

        handle = model.register_forward_hook(watch, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()
