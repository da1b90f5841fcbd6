"""Ways to quantise by name: what is done to the model, and how codes are chosen.

| stage | method   | needs data | does                                                             |
|-------|----------|------------|------------------------------------------------------------------|
| 0     | stream   | yes        | rotates the residual stream of pre-RMSNorm models                |
| 1     | smooth   | yes        | SmoothQuant; smooth:0.75 sets its strength                       |
| 1     | awq      | yes        | AWQ's searched scales                                            |
| 2     | hadamard | yes        | rotates every tensor that linear layers read                     |
| 0, 2  | rotation | yes        | rotation:learned learns the rotations that are free at run time  |
| 3     | outliers | yes        | columns from 6 on (outliers:20, outliers:1%) in full precision   |
| 4     | rtn      | no         | codes rounded to the nearest: the default                        |
| 4     | gptq     | yes        | codes with second-order information; gptq:order                  |
| 4     | codebook | no         | k-means instead of a uniform grid                                |

"smooth+gptq" combines them; they run in the order of their stages, one of each stage.
Read by `quant.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from skipless.errors import UserError, suggestion
from skipless.jsonable import Config
from skipless.quant.methods.awq import Awq
from skipless.quant.methods.codebook import Codebook
from skipless.quant.methods.gptq import Gptq
from skipless.quant.methods.hadamard import Hadamard
from skipless.quant.methods.learned_rotation import LearnedRotation
from skipless.quant.methods.outliers import Outliers
from skipless.quant.methods.smooth import Smooth
from skipless.quant.methods.stream import StreamRotation
from skipless.quant.transforms.session import Session
from skipless.quant.weights import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class Rtn(Config):
    """Every weight rounded to the nearest code."""

    name: ClassVar[str] = "rtn"
    stage: ClassVar[int] = 4

    def __str__(self) -> str:
        return self.name

    def prepare(self, session: Session) -> None:
        """Nothing."""

    def choose(self, session: Session, weights: Sequence[QuantizedWeight]) -> None:
        """Nothing: weights come rounded."""


Method = (
    StreamRotation | Smooth | Awq | Hadamard | LearnedRotation | Outliers | Rtn | Gptq | Codebook
)


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{what}: {text!r} is not a number") from None


def _outliers(text: str) -> Outliers:
    if text.endswith("%"):
        return Outliers(threshold=None, share=_number(text[:-1], "outliers") / 100)
    return Outliers(threshold=_number(text, "outliers"))


def _rotation(text: str) -> LearnedRotation:
    """learned[,steps=N][,lr=X][,seed=N][,offline]"""
    kind, *options = text.split(",")
    if kind != "learned":
        raise UserError(f"rotation is {kind!r}; rotation:learned is known, hadamard and stream too")
    values: dict = {}
    for option in options:
        key, equals, value = option.partition("=")
        if option == "offline":
            values[key] = True
        elif equals and key in ("steps", "seed") and value.isdecimal():
            values[key] = int(value)
        elif equals and key == "lr":
            values[key] = _number(value, "rotation: lr")
        else:
            raise UserError(
                f"rotation:learned has the option {option!r}; steps=N, lr=X, seed=N and offline "
                "are known, with commas between"
            )
    return LearnedRotation(**values)


def _gptq(text: str) -> Gptq:
    if text != "order":
        raise UserError(f"gptq has no option {text!r}; gptq:order is known")
    return Gptq(act_order=True)


PLAIN: dict[str, Callable[[], Method]] = {
    "stream": StreamRotation, "smooth": Smooth, "awq": Awq, "hadamard": Hadamard,
    "rotation": LearnedRotation, "outliers": Outliers, "rtn": Rtn, "gptq": Gptq,
    "codebook": Codebook,
}  # fmt: skip
METHODS = tuple(PLAIN)
WITH_OPTION: dict[str, Callable[[str], Method]] = {
    "smooth": lambda text: Smooth(strength=_number(text, "smooth")),
    "rotation": _rotation,
    "outliers": _outliers,
    "gptq": _gptq,
}


def parse_methods(method: str | Method | Sequence[str | Method]) -> list[Method]:
    """ "smooth+gptq", a method, or a list of either -> methods in the order in which they run.

    Raises UserError for an unknown name or option, and for two that exclude each other.
    """
    if isinstance(method, str):
        given: list[str | Method] = list(method.split("+"))
    else:
        given = [method] if isinstance(method, Config) else list(method)  # type: ignore[list-item]
    found: list[Method] = []
    for item in given:
        if isinstance(item, str) and "+" in item:
            found += parse_methods(item)
        else:
            found.append(_one(item) if isinstance(item, str) else item)
    for stage in (0, 1, 2, 3, 4):
        same = [m for m in found if stage in getattr(m, "covers", (m.stage,))]
        if len(same) > 1:
            raise UserError(
                f"{' and '.join(map(str, same))} exclude each other: they do the same part of the "
                "work; name one of them"
            )
    if not any(m.stage == 4 for m in found):
        found.append(Rtn())
    return sorted(found, key=lambda m: m.stage)


def method_name(methods: Sequence[Method]) -> str:
    """The text form; rounding to the nearest is named only where it is alone."""
    named = [str(m) for m in methods if m.name != "rtn"]
    return "+".join(named) or "rtn"


def needs_data(methods: Sequence[Method]) -> bool:
    """Whether some method looks at calibration batches."""
    return any(m.name not in ("rtn", "codebook") for m in methods)


def looks_ahead(methods: Sequence[Method]) -> bool:
    """Whether what is done to a layer depends on how later ones are quantised."""
    return any(m.name == "rotation" for m in methods)


def _one(text: str) -> Method:
    name, colon, option = text.strip().partition(":")
    if name not in PLAIN:
        raise UserError(f"the method {name!r} is unknown; {suggestion(name, PLAIN, noun='method')}")
    if not colon:
        return PLAIN[name]()
    if name not in WITH_OPTION:
        raise UserError(f"the method {name} takes no option, and {text!r} gives it one")
    return WITH_OPTION[name](option)
