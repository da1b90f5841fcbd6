"""What a conversion is told and what it finds: settings, one row a stage, the result.

Read by `converting.py`, which does it, by `converting_text.py` and, as convert.json, by the report.
No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from skipless import checks
from skipless.errors import UserError, check_choice
from skipless.jsonable import Config

__all__ = ["ORDERS", "RECORD_FILE", "Conversion", "ConversionConfig", "Stage"]

RECORD_FILE = "convert.json"
"""File of a converted folder with everything measured on the way."""
ORDERS = ("last-first", "first-first", "by-share", "by-loss")
SITES = ("attention", "cross_attention", "mlp")


@dataclass(frozen=True, kw_only=True)
class ConversionConfig(Config):
    """Which skips go, in which order, and how the model is trained meanwhile."""

    to: Literal["none"] = "none"
    """What the skips become. Only kind none takes anything away; the others start neutral."""
    sites: tuple[str, ...] = SITES
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
        checks.some("convert", self, "sites", SITES)
        check_choice("convert.order", self.order, ORDERS)
        checks.whole("convert", self, "skips_per_stage", "steps_per_stage", "warmup_steps", low=0)
        checks.whole("convert", self, "fit_batches", low=2)  # one chooses lambda
        checks.real("convert", self, "lr", "temperature", "max_grad_norm", interval="(0, inf)")
        checks.real("convert", self, "distill", "cross_entropy", interval="[0, inf)")
        checks.real("convert", self, "anneal_fraction", interval="(0, 1]")
        checks.real("convert", self, "loss_budget", interval="[0, inf)", or_none=True)
        if not (self.distill or self.cross_entropy):
            raise UserError(
                "convert.distill and convert.cross_entropy are both 0; give one of them a weight, "
                "or there is nothing to train towards"
            )


@dataclass(frozen=True, kw_only=True)
class Stage(Config):
    """One row of the record: what went, and how the model was afterwards."""

    removed: tuple[str, ...]
    """Connections whose skip went in this stage."""
    num_removed: int
    """Skips gone in all."""
    share: float
    """Of all skips of the model."""
    loss: float
    """Held-out, nats a token (or what `loss=` measures)."""
    increase: float
    """Over the unconverted model, on the same text."""
    standard_error: float | None
    """Of `increase`, over sequences; None with `loss=` or one sequence."""
    kl: float
    """KL(original || model) in nats a position, on the held-out text."""
    fitted: float | None
    """Held-out loss after the fit, before training; None without either."""
    grad_norm: float | None
    """Median over the stage's steps, before clipping; None without steps."""
    tokens: int
    """Read since the start, by fits and training; examples where batches hold no tokens."""
    seconds: float
    """Since the start, measuring included, over all resumptions."""
    kept: bool = True
    """False for a stage beyond the budget, which was undone."""


@dataclass(frozen=True, kw_only=True)
class Untrained(Config):
    """The control: the same skips gone from the original weights, without training."""

    num_removed: int
    share: float
    loss: float
    increase: float


@dataclass(frozen=True, kw_only=True)
class Conversion(Config):
    """All that a conversion measured. `to_dict()` of it is convert.json."""

    settings: ConversionConfig
    model: str
    """Class of the model."""
    order: tuple[str, ...]
    """Connections in the order of their going."""
    total: int
    """Skips of the model, those out of question included."""
    already: int = 0
    """Skips that were gone before."""
    loss: float
    """Held-out, of the unconverted model."""
    standard_error: float | None
    num_tokens: int | None
    """Held-out tokens; None with `loss=`."""
    untrained: tuple[Untrained, ...]
    """At the same numbers of skips as the stages, from the start."""
    stages: tuple[Stage, ...] = ()
    finished: bool = False
    source: dict = field(default_factory=dict)
    """What the command adds: model, text, batch, sequence length."""

    @property
    def converted(self) -> tuple[str, ...]:
        """Connections that have no skip any more, in the order of their going."""
        return tuple(name for stage in self.stages if stage.kept for name in stage.removed)

    def describe(self) -> str:
        """One line: skips gone, loss before and after, tokens."""
        kept = [stage for stage in self.stages if stage.kept]
        if not kept:
            return f"no skip was removed: loss {self.loss:.4f}"
        last = kept[-1]
        return (
            f"{last.num_removed} of {self.total} skips removed: loss {self.loss:.4f} -> "
            f"{last.loss:.4f} ({last.increase:+.4f}) after {last.tokens:,} tokens; "
            f"KL to the original {last.kl:.4f}"
        )
