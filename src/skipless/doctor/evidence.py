"""What the rules read: one flat record, from the files of a run, a model with a batch, or both.

None or an empty field means "not measured". Filled by records.py and measuring.py; no torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

Curve = tuple[tuple[float, float], ...]
"""(step, value) pairs in order of steps."""


OF_WEIGHTS = "the weight "
"""How `Evidence.nonfinite` begins where weights themselves are not finite."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """How far outputs at positions below `cut` moved when tokens from `cut` on were changed."""

    difference: float
    """Largest absolute change."""
    largest: float
    """Largest absolute output, to compare with."""
    epsilon: float
    """Machine epsilon of the outputs' type."""
    cut: int
    first: str | None
    """The first module whose early outputs moved, in order of computation."""


@dataclass(frozen=True, kw_only=True)
class WeightMemory:
    """Bytes that the parameters and buffers keep, and what their values would need."""

    stored: int
    """Of every storage once, whole even if only a part of it is used."""
    reasons: Mapping[str, int]
    """{reason: bytes that could be given back}; empty if none."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One model's work, time and memory on one batch."""

    seconds: float
    """Of the fastest of several forward passes."""
    flops: float
    """Multiplications and additions of all matrix products, zeros counted."""
    zeros: float
    """Share of the linear layers' weights that are exactly 0."""
    saved_bytes: int
    """Tensors that a forward pass keeps for its backward, each storage once, weights left out."""
    weight_bytes: int
    operators: tuple[tuple[str, float], ...]
    """(operator, share of the time of a forward pass), largest first."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything the rules may look at."""

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """{dotted name: value} of a run or a model of ours, so that no remedy is one it has already."""
    losses: Curve = ()
    """Training loss in nats a token."""
    held_out: Curve = ()
    unigram: float | None = None
    """Held-out loss of token frequencies alone, nats a token."""
    num_steps: int | None = None
    """Of the whole training."""
    warmup_steps: int | None = None
    lr: float | None = None
    gradients: tuple[tuple[int, Mapping[int, float]], ...] = ()
    """(step, {layer: gradient norm of its weights}); step 0 is a model at rest."""
    gains: Mapping[str, Curve] = dataclasses.field(default_factory=dict)
    """{name: (step, mean |gain|)} of learned connection weights."""
    joins: tuple[Mapping[str, Any], ...] = ()
    """Rows of `Probe.geometry` (S7)."""
    attention: tuple[Mapping[str, Any], ...] = ()
    """Rows of `Probe.attention` (S10)."""
    num_keys: int | None = None
    """Length of the sequences that `attention` and `joins` were measured on."""
    causal: bool | None = None
    nonfinite: str | None = None
    """Where NaN or infinite values were; "" says that none were."""
    gate_norm: float | None = None
    """Gradient norm of all connection weights together, before clipping."""
    trunk_norm: float | None = None
    """Gradient norm of everything else."""
    leak: Leak | None = None
    weights: WeightMemory | None = None
    cost: Cost | None = None
    against: Cost | None = None
    """Of the model to compare with."""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """{field: why it is not there}, where more can be said than that it was not measured."""

    def needs(self, name: str, otherwise: str) -> str:
        """Why the field `name` is empty, in words that follow "needs"."""
        return self.missing.get(name, otherwise)

    def unset(self, *wanted: str) -> list[str]:
        """Those of "name=value (note)" that the settings do not say already; all where none are
        known."""
        found = []
        for text in wanted:
            name, _, value = text.partition(" (")[0].partition("=")
            has = self.settings.get(name)
            same = float(has) == float(value) if _is_number(has) else str(has).lower() == value
            if name not in self.settings or not same:
                found.append(text)
        return found

    def joined(self, other: Evidence) -> Evidence:
        """This, with `other` filling what is not measured here."""
        filled = {
            field.name: getattr(other, field.name) for field in dataclasses.fields(self)
            if getattr(self, field.name) in (None, (), {})
        }  # fmt: skip
        filled["missing"] = {**other.missing, **self.missing}
        if self.nonfinite == "" and other.nonfinite:  # what files held was finite, the rest is not
            filled["nonfinite"] = other.nonfinite
        elif self.nonfinite and (other.nonfinite or "").startswith(OF_WEIGHTS):
            # Files know where such numbers came out, weights where they come from.
            filled["nonfinite"] = f"{other.nonfinite}; {self.nonfinite}"
        if not self.attention and other.attention:
            filled["num_keys"] = other.num_keys
        return dataclasses.replace(self, **filled)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
