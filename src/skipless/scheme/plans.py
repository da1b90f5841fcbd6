"""How a training is quantised, in words (Q3). Read by `quant.training` and a run's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from skipless.errors import UserError
from skipless.jsonable import Config, check_named
from skipless.scheme.formats import Scheme


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Config):
    """How a training is quantised: "W4A4 scope=block from=0.1 over=0.3" (Q3).

    Full precision for the share `start` of the steps ("from"), then from 8 bits down to the
    scheme's over the share `over`, then the scheme.
    """

    scheme: Scheme
    scope: Literal["linear", "block", "all"] = "linear"
    start: float = 0.1
    over: float = 0.0

    def __post_init__(self) -> None:
        check_named("training quantisation", self)
        if not (0 <= self.start <= 1 and 0 <= self.over <= 1 and self.start + self.over <= 1):
            raise UserError(
                f"from={self.start:g} over={self.over:g} does not fit into a training; shares from "
                "0 to 1 that add up to at most 1 were expected"
            )
        if self.scheme.needs_calibration:
            raise UserError(
                f"{self.scheme} fixes ranges, which move while a model trains; leave out -static"
            )

    @classmethod
    def parse(cls, text: TrainingPlan | Scheme | str) -> TrainingPlan:
        """Read the text form. Raises UserError with one sentence for anything else."""
        if isinstance(text, TrainingPlan):
            return text
        if isinstance(text, Scheme):
            return cls(scheme=text)
        values: dict = {}
        rest = []
        for word in text.split() if isinstance(text, str) else [text]:
            key, equals, value = word.partition("=") if isinstance(word, str) else ("", "", "")
            if not equals or key not in ("scope", "from", "over"):
                rest.append(word)
            elif key == "scope":
                if value not in ("linear", "block", "all"):
                    raise UserError(f"{text!r}: scope is {value!r}; linear, block or all is one")
                values["scope"] = value
            else:
                try:
                    values["start" if key == "from" else key] = float(value)
                except ValueError:
                    raise UserError(f"{text!r}: {key} is {value!r}, no number") from None
        if not rest:
            raise UserError(f"{text!r} names no scheme; write 'W4A4 scope=block from=0.1'")
        return cls(scheme=Scheme.parse(" ".join(map(str, rest))), **values)

    def bits(self, target: int, progress: float, first: int = 8) -> int | None:
        """The width at a share of the training, None before it begins."""
        if progress < self.start:
            return None
        if progress >= self.start + self.over:
            return target
        left = 1 - (progress - self.start) / self.over
        return target + math.ceil(max(first - target, 0) * left)
