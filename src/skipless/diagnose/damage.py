"""What quantising costs a model: its loss where it has one, else how far its outputs move (S9).

    loss      nats a token, for models whose logits at a position depend on earlier tokens only
    distance  |y_q - y| / |y| of the outputs (logits, similarities or last hidden state) over all
              values but those at padding, for encoders, vision and speech models, which have no
              loss without labels

Read by `sensitivity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError, check_choice
from skipless.evaluate import sequence_losses
from skipless.evaluate.losses import without_padding
from skipless.quant import evaluation_mode, run_batch
from skipless.sites import first_tensor

MEASURES = ("auto", "loss", "distance")
_OUTPUTS = ("logits", "logits_per_image", "last_hidden_state")


class Damage:
    """The yardstick of one model and its batches: `increase()` says how far it is off by now."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], measure: str = "auto") -> None:
        check_choice("measure", measure, MEASURES)
        self.model, self.batches = model, batches
        causal = measure != "distance" and predicts_tokens(model, batches[0])
        if measure == "loss" and not causal:
            raise UserError(
                f"{type(model).__name__} does not predict the next token (an output depends on "
                "later tokens, or there are no logits for every token), so that it has no loss "
                "without labels; use measure 'distance' or 'auto'"
            )
        self.kind = "loss" if causal else "distance"
        self.unit = "nats a token" if causal else "relative distance of the outputs"
        if causal:
            self._full = sequence_losses(model, batches)
            self.baseline: float | None = self._full.nats
        else:
            self._outputs = [output.detach().cpu() for output in self._run()]
            self._energy = sum(float(y.double().square().sum()) for y in self._outputs)
            self.baseline = None

    def increase(self) -> tuple[float, float | None]:
        """(loss minus full precision's, its paired standard error), or (distance, None).

        Raises UserError for outputs that are not finite once quantised, and for a distance from
        outputs that are all 0.
        """
        if self.kind == "loss":
            found = sequence_losses(self.model, self.batches)
            return found.nats - self._full.nats, found.standard_error(self._full)
        if not self._energy:
            raise UserError(
                f"the outputs of {type(self.model).__name__} are all 0, from which no distance is "
                "relative; train it, or give another batch"
            )
        noise = 0.0
        for old, new in zip(self._outputs, self._run(), strict=True):
            noise += float((new.cpu().double() - old.double()).square().sum())
        if not math.isfinite(noise):
            raise UserError(
                f"the outputs of {type(self.model).__name__} are not finite once quantised; use "
                "wider activations"
            )
        return math.sqrt(noise / self._energy), None

    def _run(self) -> list[Tensor]:
        with evaluation_mode(self.model):
            return [
                without_padding(main_output(run_batch(self.model, batch)), batch)
                for batch in self.batches
            ]


def main_output(output: Any) -> Tensor:
    """Logits, similarities or the last hidden state of what a model returned, else its first
    floating tensor. Raises UserError where there is none."""
    for name in _OUTPUTS:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    found = first_tensor(output)
    if found is None or not found.is_floating_point():
        raise UserError(
            f"the model returns {type(output).__name__} without a floating-point tensor, so that "
            "nothing can be compared; wrap it in a module that returns its output tensor"
        )
    return found


@torch.no_grad()
def predicts_tokens(model: nn.Module, batch: Any) -> bool:
    """Whether the model has logits [B, T, V] of which none depends on a later token.

    Tried on the first tokens of the batch: changing the last one must change nothing before it.
    """
    ids = token_ids(batch)
    if ids is None or ids.shape[1] < 2:
        return False
    ids = ids[:1, :16]
    other = ids.clone()
    other[0, -1] = ids[0, 0] if ids[0, 0] != ids[0, -1] else (ids[0, -1] + 1) % (ids.max() + 1)
    if torch.equal(ids, other):
        return False
    pair = []
    with evaluation_mode(model):
        for one in (ids, other):
            try:
                logits = getattr(run_batch(model, one), "logits", None)
            except (TypeError, ValueError, RuntimeError, AttributeError):
                return False  # it needs more than token ids
            if not isinstance(logits, Tensor) or logits.dim() != 3:
                return False
            pair.append(logits[0, :-1].cpu().double())
    if pair[0].shape[0] != ids.shape[1] - 1:
        return False
    size = float(pair[0].abs().max())
    return float((pair[0] - pair[1]).abs().max()) <= 1e-4 * max(size, 1e-30)


def token_ids(batch: Any) -> Tensor | None:
    """The token ids [B, T] that a batch is made of; None where it is made of something else."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if set(batch) - {"input_ids", "attention_mask", "token_type_ids", "labels"}:
            return None
    else:
        ids = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return None
    return ids
