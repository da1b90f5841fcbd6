"""`fold`: gains and temperatures multiplied into the weights next to them, so that they are gone.

Linear y = x W + bias; `out` is the linear that ends a sublayer. With y = a x + b f(norm(x)), and
the tags of docs/equations.md in front:

    F1, F2   out <- b out                                     rezero, layerscale
    F3       c <- a c, out <- (b / c) out                     interpolate, fixed, learned
             (the stream is carried as x / c, which a norm in front does not see, as long as the
             stream is large against the norm's eps; the comparison tells)
    F4       W <- diag(g) W, bias <- bias + beta W            norm gain g, norm bias beta
    F6       W_Q <- tau_l W_Q                                 temperature

Works on a copy, then compares: the largest difference of the logits, as a share of the largest
logit, is printed and must be below 1e-5. A patched Hugging Face model becomes a plain one that
stock transformers saves and loads; our Transformer becomes one with plain connections. Which
linear ends a sublayer and which ones read a norm is traced in a forward pass (`tracing.py`), never
taken from names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import unwrapped
from skipless.errors import UserError
from skipless.log import console
from skipless.model import Transformer
from skipless.quant import evaluation_mode, run_batch
from skipless.sites import first_tensor
from skipless.surgery.checking import check_finite
from skipless.surgery.dropping import revive
from skipless.surgery.slimming.own_folding import fold_own
from skipless.surgery.slimming.patched_folding import fold_patched
from skipless.surgery.slimming.scaling import Tally

__all__ = ["LIMIT", "Folded", "difference", "fold", "sample_inputs"]

LIMIT = 1e-5
"""Largest allowed difference of logits, as a share of the largest logit (section 7)."""
WORDS = {
    "F1": "gains", "F2": "gains by channel", "F3": "stream weights", "F4": "norm gains",
    "F6": "temperatures",
}  # fmt: skip
"""What a tag of `Folded.folded` counts, for readers."""


@dataclass(frozen=True, kw_only=True)
class Folded:
    """What `fold` returns."""

    model: nn.Module
    """The folded copy, in the mode of the original."""
    difference: float
    """Largest |difference of a logit| / largest |logit|."""
    folded: dict[str, int]
    """How many gains of each kind are gone: {"F1": 24, "F4": 49}."""
    kept: tuple[str, ...]
    """Norm gains and temperatures that stay, each with its reason."""
    zeroed: tuple[str, ...] = ()
    """Connections of dropped sublayers that a plain class must have: there with weights of 0."""

    def describe(self) -> str:
        """One line of counts and the difference; one more each for what is kept and zeroed."""
        counts = ", ".join(
            f"{tag} x {n} ({WORDS[tag]})" for tag, n in sorted(self.folded.items())
        ) or "nothing"  # fmt: skip
        kept = f"\nnorm gains that stay: {'; '.join(self.kept)}" if self.kept else ""
        zeroed = f"\nweights of 0 for: {', '.join(self.zeroed)}" if self.zeroed else ""
        difference = f"{self.difference:.2g} of the largest one"
        return (
            f"folded {counts}: largest difference of a logit to the model before {difference}"
            f"{kept}{zeroed}"
        )


def fold(
    model: nn.Module, inputs: Tensor | Mapping[str, Any] | None = None, *, norm_gains: bool = True
) -> Folded:
    """Fold gains and temperatures into the weights of a copy of `model`, compare, print, return it.

    `model`: our Transformer, or a patched Hugging Face model in float32 or float64. `inputs`: a
    batch to trace and compare with, token ids or keyword arguments; random ids by default, for
    models that take ids. `norm_gains=False` leaves the norms as they are. Sublayers that `prune`
    dropped stay away from our Transformer; a plain Hugging Face class must have them, so there
    they come back with weights of 0. Raises UserError for weights that are not finite, and where
    the result would not be exact: a sublayer without a skip in a Hugging Face model, a stream
    weight per channel, a branch that no linear layer ends, annealing half done, or a difference of
    1e-5 and more.
    """
    model = unwrapped(model)
    wide = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not wide <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in wide))
        raise UserError(f"the weights are {names}; fold in float32 (model.float()), cast later")
    check_finite(model)
    batch = sample_inputs(model, inputs)
    work, tally = copy.deepcopy(model), Tally()
    zeroed = revive(work)
    with evaluation_mode(work):
        if isinstance(work, Transformer):
            result = fold_own(work, tally, norm_gains)
        else:
            result = fold_patched(work, batch, tally, norm_gains)
    result.train(model.training)
    distance = difference(model, result, batch)
    found = Folded(
        model=result, difference=distance, folded=dict(tally.counts), kept=tuple(tally.kept),
        zeroed=zeroed,
    )  # fmt: skip
    console.print(found.describe(), highlight=False, markup=False, soft_wrap=True)
    if not distance < LIMIT:
        shared = _shared(work)
        hint = f"; {shared} are one tensor, which cannot hold two gains" if shared else ""
        hint += "; try norm_gains=False" if tally.counts["F4"] else ""
        if tally.counts["F3"]:
            hint += "; F3 changes what the norms' eps does where the stream is small"
        raise UserError(
            f"the folded model's logits differ by {distance:.2g} of the largest, and {LIMIT:g} "
            f"is the limit; nothing was changed{hint}"
        )
    return found


def _shared(model: nn.Module) -> str:
    """The names of one weight that several layers share; "" where none is."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    embeddings = ("embed", "lm_head", "wte", "predictions.decoder")  # tied on purpose
    found = [
        several for several in names.values()
        if several[1:] and not any(word in name for name in several for word in embeddings)
    ]  # fmt: skip
    return " and ".join(found[0]) if found else ""


def sample_inputs(model: nn.Module, given: Any) -> Any:
    """`given`, or random token ids [2, T] for a model that takes ids alone."""
    if given is not None:
        return given
    size = getattr(model.config, "vocab_size", None) if hasattr(model, "config") else None
    if size is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UserError(
            f"{type(model).__name__} does not take token ids alone; pass inputs=, a dict of what "
            "its forward takes"
        )
    longest = getattr(model.config, "max_position_embeddings", None) or 32
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, size, (2, min(32, longest)), generator=generator)


def difference(model: nn.Module, other: nn.Module, batch: Any) -> float:
    """Largest difference of a logit as a share of the largest logit of `model`.

    Raises UserError where `model` computes no finite logits to compare with.
    """
    found = []
    for one in (model, other):
        with evaluation_mode(one):
            out = run_batch(one, batch)
        logits: Tensor | None = getattr(out, "logits", None)
        logits = first_tensor(out) if logits is None else logits
        if logits is None:
            raise UserError(f"{type(one).__name__} returns no tensor, so nothing can be compared")
        found.append(logits.cpu().double())
    if not bool(found[0].isfinite().all()):
        raise UserError(
            f"the logits of {type(model).__name__} are not finite on the batch it is compared on, "
            "though its weights are; pass other inputs, or load the model in float64"
        )
    return float((found[0] - found[1]).abs().max() / found[0].abs().max().clamp(min=1e-300))
