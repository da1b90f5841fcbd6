"""What a conversion finds: one row a stage, the control without training, and all of it together.

No torch here. The report reads it as convert.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skipless.jsonable import Config
from skipless.surgery.conversion.settings import ConversionConfig

__all__ = ["RECORD_FILE", "Conversion", "Stage", "Untrained"]

RECORD_FILE = "convert.json"
"""File of a converted folder with everything measured on the way."""


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
        on = "" if self.num_tokens is None else f" on {self.num_tokens:,} tokens"
        if not kept:
            return f"no skip was removed: loss {self.loss:.4f}{on}"
        last = kept[-1]
        return (
            f"{last.num_removed} of {self.total} skips removed: loss {self.loss:.4f} -> "
            f"{last.loss:.4f} ({last.increase:+.4f}){on}, after {last.tokens:,} tokens; "
            f"KL to the original {last.kl:.4f}"
        )
