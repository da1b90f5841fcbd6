"""What a rule may say: a finding, or what it would need. Silence means healthy.

Read by every file of rules, and by checkup.py, which orders what they say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEVELS = ("broken", "harmful", "costly", "note")
"""Worst first: wrong results; training that suffers; time or memory given away; good to know."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One illness."""

    level: str
    """One of LEVELS."""
    excess: float
    """How many times beyond its threshold, at least 1; orders findings of one level."""
    symptom: str
    """What is seen, in one clause."""
    evidence: str
    """The numbers, and the threshold they passed."""
    cause: str
    """What most often brings it about."""
    remedy: str
    """A setting or command to try first."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The evidence for programs."""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, f"level {self.level!r} is none of {LEVELS}"

    @property
    def order(self) -> tuple[int, float]:
        """Sorts worst first."""
        excess = self.excess if math.isfinite(self.excess) else 1e300
        return LEVELS.index(self.level), -excess


@dataclass(frozen=True)
class Unchecked:
    """A rule without its evidence."""

    needs: str
    """What would let it be checked, after "needs"."""


Verdict = Finding | Unchecked | None
