"""What a conversion is told: which skips go, in which order, and how the model is trained.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skipless import ranges
from skipless.errors import UserError, check_choice
from skipless.jsonable import Config, check_named
from skipless.sublayers import SUBLAYERS

__all__ = ["ORDERS", "ConversionConfig"]

ORDERS = ("last-first", "first-first", "by-share", "by-loss")


@dataclass(frozen=True, kw_only=True)
class ConversionConfig(Config):
    """Settings of `convert`."""

    to: Literal["none"] = "none"
    """What the skips become. Only kind none takes anything away; the others start neutral."""
    sites: tuple[str, ...] = SUBLAYERS
    """attention, cross_attention, mlp; those that the model has."""
    layers: tuple[int, ...] = ()
    """Indices, negative ones from the end; none means all."""
    stacks: tuple[str, ...] = ()
    """Part of a stack's name ("encoder"); none means all."""
    order: str = "last-first"
    """last-first or first-first (by depth), by-share (largest branch beside its stream first),
    by-loss (cheapest to remove alone first)."""
    skips_per_stage: int = 1
    """How many go at a time; 0 means all at once. 2 is a layer of a decoder when going by depth."""
    steps_per_stage: int = 100
    """Optimiser steps (AdamW, started anew each stage); 0 trains nothing."""
    start: Literal["fit", "anneal"] = "fit"
    """fit: a skip goes at once, the last matrix of its branch fitted to the old join by least
    squares; anneal: its weight falls from 1 to 0 while the model trains (C7)."""
    fit_batches: int = 8
    """Batches of that fit, one pass a skip."""
    lr: float = 1e-4
    warmup_steps: int = 5
    """Of each stage; after them the learning rate falls linearly to a tenth."""
    train: Literal["all", "layers"] = "all"
    """Which parameters learn: all, or those of the layers that lost a skip so far."""
    distill: float = 1.0
    """Weight of KL(original || model), in nats a token."""
    cross_entropy: float = 0.0
    """Weight of the cross-entropy with the text itself."""
    temperature: float = 1.0
    """Of both distributions in the KL, which is multiplied by its square."""
    anneal_fraction: float = 0.5
    """With start anneal: share of a stage's steps until the weight is 0."""
    max_grad_norm: float = 1.0
    loss_budget: float | None = None
    """Nats above the unconverted model; the stage that ends beyond it is undone and the last."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast, for accelerators; weights stay fp32."""

    def __post_init__(self) -> None:
        check_named("convert", self)
        ranges.some("convert", self, "sites", SUBLAYERS)
        check_choice("convert.order", self.order, ORDERS)
        ranges.whole("convert", self, "skips_per_stage", "steps_per_stage", "warmup_steps", low=0)
        ranges.whole("convert", self, "fit_batches", low=2)  # one chooses lambda
        ranges.real("convert", self, "lr", "temperature", "max_grad_norm", interval="(0, inf)")
        ranges.real("convert", self, "distill", "cross_entropy", interval="[0, inf)")
        ranges.real("convert", self, "anneal_fraction", interval="(0, 1]")
        ranges.real("convert", self, "loss_budget", interval="[0, inf)", or_none=True)
        if not (self.distill or self.cross_entropy):
            raise UserError(
                "convert.distill and convert.cross_entropy are both 0; give one of them a weight, "
                "or there is nothing to train towards"
            )
