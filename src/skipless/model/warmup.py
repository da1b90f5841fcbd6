"""Warm-up of universal interpolation: fit interpolators to a frozen model before joint training.

A pretrained residual model computes y = x + F at every site. An interpolator at rho = 0, kappa = 2
does so too, exactly, but then its aligner does nothing. At rho = 1 it aligns, and the model is
another one. The warm-up turns rho up while gate and encoder learn to keep the site's output:

    record   one pass over some batches; every site's (x, F) is kept
    fit      each interpolator alone, on its own pairs, minimises
             mean |y(x, F) - (x + F)|^2 / mean |F|^2
             with rho moved to its goal in the first half of the steps

No gradient passes through the model, so that a step costs a few joins. What the objective leaves
is what alignment changes and the interpolator cannot undo; 0 is the residual model itself.

Read by users. Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.model.context import ForwardContext
from skipless.model.interpolation import Universal, universal_connections

__all__ = ["Fit", "Pair", "record_pairs", "warm_up"]


@dataclass(frozen=True)
class Pair:
    """What one site saw in one batch."""

    stream: Tensor
    """x [B, T, D], detached."""
    branch: Tensor
    """F [B, T, D], detached."""
    context: ForwardContext
    """Masks and entropy of that pass; no cache."""


@dataclass(frozen=True)
class Fit:
    """Objective of one interpolator, at the goal of rho."""

    before: float
    after: float


@torch.no_grad()
def record_pairs(model: nn.Module, batches: Iterable[Any]) -> dict[str, list[Pair]]:
    """(x, F) of every universal connection of `model`, a Transformer or a patched Hugging Face one.

    A batch is what the model is called with: token ids int64 [B, T], or a mapping of keyword
    arguments. The model runs in evaluation mode, without gradients, and is left as it was. Pairs
    stay on the model's device, 2 B T D numbers a site and batch. Raises UserError without universal
    connections, without batches, and for a connection that no batch reaches.
    """
    found: dict[str, list[Pair]] = {}

    def watching(name: str, module: Universal):
        def join(stream: Tensor, branch: Tensor, context: ForwardContext) -> Tensor:
            if context.cache is not None and context.cache.length:
                raise UserError(
                    f"pairs are recorded from whole texts, and the cache holds "
                    f"{context.cache.length} earlier tokens; call the model without it"
                )
            kept = replace(context, cache=None, embedding=None, rotary=None)
            found.setdefault(name, []).append(Pair(stream.detach(), branch.detach(), kept))
            return Universal.join(module, stream, branch, context)

        return join

    sites = universal_connections(model)
    modes = {module: module.training for module in model.modules()}
    num_batches = 0
    try:
        model.eval()
        for name, module in sites.items():
            # not a hook: a patched layer hands its connection no context, but `join` gets it
            vars(module)["join"] = watching(name, module)
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
            num_batches += 1
    finally:
        for module in sites.values():
            vars(module).pop("join", None)
        for module, mode in modes.items():
            module.training = mode
    unseen = [name for name in sites if name not in found]
    if unseen:
        more = f" and {len(unseen) - 1} more" if unseen[1:] else ""
        raise UserError(
            f"{num_batches} batches reached no pair at {unseen[0]}{more}; give at least one batch "
            "that passes through the whole model"
        )
    return found


def warm_up(
    model: nn.Module,
    pairs: Mapping[str, list[Pair]],
    *,
    steps: int = 100,
    lr: float = 1e-2,
    rho: float = 1.0,
) -> dict[str, Fit]:
    """Fit gate and encoder (U1, U3) of every interpolator named in `pairs`, and move rho to `rho`.

    The objective and its reason are in this module's docstring. Adam, one batch a step in turn;
    rho is set and not learned, linearly from where it is in the first half of the steps. Nothing
    else of the model is read or changed, and no gradient is left behind. Raises UserError for
    names the model does not have and for numbers out of range.
    """
    if steps < 1 or not lr > 0:
        raise UserError(
            f"a warm-up of {steps} steps at lr {lr} fits nothing; both must be positive"
        )
    sites = universal_connections(model)
    unknown = [name for name in pairs if name not in sites]
    if unknown or not pairs:
        raise UserError(
            f"pairs were recorded at {unknown[0] if unknown else 'no connection'}, and the model "
            f"has universal connections at {', '.join(list(sites)[:3])}; record them from a model "
            "of the same names"
        )
    empty = [name for name, own in pairs.items() if not own]
    if empty:
        raise UserError(f"there is no pair of {empty[0]} to fit it on; record pairs from a batch")
    return {name: _fit(sites[name], own, steps, lr, rho) for name, own in pairs.items()}


def distance(join: Universal, pair: Pair) -> Tensor:
    """mean |y - (x + F)|^2 / mean |F|^2 of one pair, a float32 scalar; 0 is the residual join."""
    y = join.join(pair.stream, pair.branch, pair.context)
    off = (y - (pair.stream + pair.branch)).float()
    size = pair.branch.float().square()
    if pair.context.tokens is not None:
        real = pair.context.tokens[:, -off.shape[1] :, None]
        off, size = off * real, size * real
    return off.square().mean() / size.mean().clamp(min=torch.finfo(torch.float32).tiny)


def _fit(join: Universal, pairs: list[Pair], steps: int, lr: float, rho: float) -> Fit:
    own = {n: p for n, p in join.named_parameters() if n != "rho"}
    needed = {n: p.requires_grad for n, p in join.named_parameters()}
    start = join.rho.detach().clone()

    def objective() -> float:
        with torch.no_grad():
            return sum(float(distance(join, pair)) for pair in pairs) / len(pairs)

    join.requires_grad_(False)
    join.rho.fill_(rho)
    before = objective()
    optimizer = torch.optim.Adam(own.values(), lr=lr)
    try:
        for p in own.values():
            p.requires_grad_()
        for step in range(steps):
            share = min(2 * (step + 1) / steps, 1.0)
            join.rho.copy_(start + share * (rho - start))
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - step / steps)
            grads = torch.autograd.grad(
                distance(join, pairs[step % len(pairs)]), list(own.values()), allow_unused=True
            )
            for p, grad in zip(own.values(), grads, strict=True):
                p.grad = grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    finally:
        join.rho.fill_(rho)
        for n, p in join.named_parameters():
            p.requires_grad_(needed[n])
    return Fit(before=before, after=objective())
