"""What is quantised to how many bits, as one value with a short name (Q1).

    W<b>[A<b>|Afp][-KV<b>][-P<b>]  then any of
    -w:tensor|channel|g<n>   granularity of weights      (default tensor)
    -a:tensor|token          granularity of activations  (default tensor)
    -asym                    zero point, weights and activations (default symmetric)
    -static                  activation ranges fixed from calibration batches (default dynamic)
    -clip:absmax|p<percent>|mse|gauss                    (default absmax)

`W8A8`, `W4A4-KV8-w:g128-a:token`, `W3Afp` (weights only), `W8A12-static-clip:p99.9`. `A16` is an
integer width, `Afp` floating point. Printing gives the canonical text: options in the order
above, defaults left out.

Mixed precision: exceptions for some places follow after spaces, PATTERN=SCHEME or PATTERN=fp, as
in `W4A8 layers.11.mlp.*=W8A8 layers.0=fp`; where several match, the last counts. A pattern is
fnmatch's ("*" crosses dots) and is held against the name of a module, of the modules it lies in,
and of a site.
Read by everything that quantises; no torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from skipless.errors import UserError, suggestion
from skipless.jsonable import Config, check_named
from skipless.scheme.limits import GROUP, NUMBER, PERCENTILE, check_bits, check_value
from skipless.scheme.patterns import FULL_PRECISION, matches, split_override

_WIDTHS = re.compile(rf"W({NUMBER})(?:A({NUMBER}|fp))?((?:-.*)?)", re.DOTALL)
_OPTIONS = ("KV<b>", "P<b>", "w:", "a:", "asym", "static", "clip:")


@dataclass(frozen=True, kw_only=True)
class Scheme(Config):
    """Widths and options of one quantisation. `Scheme.parse("W8A8")`; `str(scheme)` is its name.

    `to_dict()` and `Scheme.from_dict()` go to JSON and back. Raises UserError when the widths
    leave 2..16, or an option would have no effect.
    """

    weight_bits: int
    activation_bits: int | None
    """None keeps activations in floating point (Afp)."""
    kv_bits: int | None = None
    """Keys and values; None means the activation's width, where the scope covers them."""
    probability_bits: int | None = None
    """Attention probabilities; None means the activation's width, where the scope covers them."""
    weight_granularity: str = "tensor"
    """tensor, channel (one scale per output channel) or g<n> (n input channels share a scale)."""
    activation_granularity: Literal["tensor", "token"] = "tensor"
    symmetric: bool = True
    dynamic: bool = True
    """Activation ranges from each tensor itself; False takes them from calibration batches."""
    clip: str = "absmax"
    """absmax, p<percent> (percentile of |x|), mse (least squared error), gauss (S11)."""
    overrides: tuple[tuple[str, str], ...] = ()
    """(pattern, scheme or "fp") for what is quantised otherwise or not; the last that matches."""

    def __post_init__(self) -> None:
        check_bits("weights", self.weight_bits)
        for what in ("activation", "kv", "probability"):
            bits = getattr(self, f"{what}_bits")
            if bits is not None:
                check_bits(what, bits)
        check_value("weight granularity", self.weight_granularity, ("tensor", "channel"), GROUP)
        check_value("activation granularity", self.activation_granularity, ("tensor", "token"))
        check_named("scheme", self)
        check_value("clip", self.clip, ("absmax", "mse", "gauss"), PERCENTILE)
        percent = PERCENTILE.fullmatch(self.clip)
        if percent and not 0 < float(percent[1]) <= 100:
            raise UserError(f"clip {self.clip!r} is not a percentile in (0, 100]; try p99.9")
        if self.activation_bits is None and self.kv_bits is None and self.probability_bits is None:
            for option, idle in (
                ("-static", self.dynamic),
                ("-a:token", self.activation_granularity == "tensor"),
            ):
                if not idle:
                    raise UserError(
                        f"{option} has no effect on a weight-only scheme; leave it out or give "
                        f"activations a width, W{self.weight_bits}A8{option}"
                    )
        if not self.dynamic and self.activation_granularity == "token":
            raise UserError(
                "-static and -a:token exclude each other, since a fixed range cannot follow each "
                "token; leave one of them out"
            )
        if self.overrides:
            checked = tuple(_check_override(*pair) for pair in self.overrides)
            object.__setattr__(self, "overrides", checked)
            patterns = [pattern for pattern, _ in checked]
            if twice := [p for p in patterns if patterns.count(p) > 1]:
                raise UserError(f"the override {twice[0]!r} is given twice; keep one of them")

    def bits_together(self) -> int:
        """Bits of weights and activations, by which schemes are ordered; 32 for full precision."""
        return self.weight_bits + (self.activation_bits or 32)

    def with_overrides(
        self, overrides: Mapping[str, Scheme | str | None] | Iterable[str]
    ) -> Scheme:
        """This scheme with exceptions added: {pattern: scheme, "fp" or None}, or "PATTERN=SCHEME"
        texts. Raises UserError for a pattern or scheme that is none."""
        if isinstance(overrides, str):
            overrides = [overrides]
        if not isinstance(overrides, Iterable):
            raise UserError(
                f"overrides are {overrides!r}; {{'layers.0.*': 'W8A8'}} or a list of "
                "'PATTERN=SCHEME' was expected"
            )
        if isinstance(overrides, Mapping):
            pairs = [(p, FULL_PRECISION if s is None else str(s)) for p, s in overrides.items()]
        else:
            pairs = [split_override(text) for text in overrides]
        return replace(self, overrides=(*self.overrides, *pairs))

    @property
    def base(self) -> Scheme:
        """This scheme without its exceptions."""
        return replace(self, overrides=()) if self.overrides else self

    def parts(self) -> list[Scheme]:
        """The formats that occur in it, the base first, each once."""
        others = [_parsed(text) for _, text in self.overrides if text != FULL_PRECISION]
        return list(dict.fromkeys((self.base, *others)))

    @property
    def needs_calibration(self) -> bool:
        """Whether some range is fixed from batches (-static)."""
        return not all(part.dynamic for part in self.parts())

    def at(self, *names: str) -> Scheme | None:
        """The format of what goes by `names` (a module, a site); None leaves it as it is."""
        for pattern, text in reversed(self.overrides):
            if any(matches(pattern, name) for name in names):
                return None if text == FULL_PRECISION else _parsed(text)
        return self.base

    @property
    def group_size(self) -> int | None:
        """Input channels that share a scale of the weights (-w:g<n>), else None."""
        group = GROUP.fullmatch(self.weight_granularity)
        return int(group[1]) if group else None

    @classmethod
    def parse(cls, text: str | Scheme) -> Scheme:
        """Read the text form. Raises UserError with one sentence for anything else."""
        if isinstance(text, Scheme):
            return text
        if isinstance(text, str) and "=" in text and len(words := text.split()) > 1:
            return cls.parse(words[0]).with_overrides(words[1:])
        match = _WIDTHS.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise UserError(
                f"{_short(text)} is not a quantisation scheme; {_meant(text)}expected "
                "W<bits>A<bits> such as 'W8A8', or W<bits>Afp for weights only"
            )
        width, activation, options = match.groups()
        if activation is None:
            raise UserError(
                f"{text!r} does not say what happens to activations; {_meant(text)}write "
                f"W{width}Afp to keep them in floating point or W{width}A16 for 16-bit integers"
            )
        values: dict = {
            "weight_bits": int(width),
            "activation_bits": None if activation == "fp" else int(activation),
        }
        seen = []
        for part in options.split("-")[1:]:
            key, value = _read_option(part, text)
            if key in seen:
                raise UserError(f"{text!r} sets {key.replace('_', ' ')} twice; keep one of them")
            seen.append(key)
            values[key] = value
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{text!r}: {error}") from None

    def __str__(self) -> str:
        activation = "fp" if self.activation_bits is None else self.activation_bits
        text = f"W{self.weight_bits}A{activation}"
        if self.kv_bits is not None:
            text += f"-KV{self.kv_bits}"
        if self.probability_bits is not None:
            text += f"-P{self.probability_bits}"
        if self.weight_granularity != "tensor":
            text += f"-w:{self.weight_granularity}"
        if self.activation_granularity != "tensor":
            text += f"-a:{self.activation_granularity}"
        text += "" if self.symmetric else "-asym"
        text += "" if self.dynamic else "-static"
        text += "" if self.clip == "absmax" else f"-clip:{self.clip}"
        return " ".join((text, *(f"{pattern}={what}" for pattern, what in self.overrides)))


@lru_cache(maxsize=256)
def _parsed(text: str) -> Scheme:
    return Scheme.parse(text)


def _check_override(pattern: str, scheme: str) -> tuple[str, str]:
    if not isinstance(pattern, str) or not pattern or re.search(r"[\s=]", pattern):
        raise UserError(
            f"the pattern of an override is {pattern!r}; a name without spaces and '=' was "
            "expected, such as 'layers.0.*'"
        )
    if scheme == FULL_PRECISION:
        return pattern, scheme
    try:
        parsed = Scheme.parse(scheme)
    except UserError as error:
        raise UserError(f"override {pattern}={scheme}: {error}, or fp") from None
    if parsed.overrides:
        raise UserError(f"override {pattern!r} is {scheme!r}, which has overrides itself")
    return pattern, str(parsed)


def _read_option(part: str, text: str) -> tuple[str, object]:
    """One option between dashes -> (field, value)."""
    if match := re.fullmatch(f"(KV|P)({NUMBER})", part):
        return ("kv_bits" if match[1] == "KV" else "probability_bits"), int(match[2])
    if part in ("asym", "static"):
        return ("symmetric" if part == "asym" else "dynamic"), False
    name, colon, value = part.partition(":")
    fields = {"w": "weight_granularity", "a": "activation_granularity", "clip": "clip"}
    if colon and name in fields:
        return fields[name], value
    near = suggestion(part, _OPTIONS, noun="option")
    raise UserError(f"{text!r} has the unknown option {'-' + part!r}; {near}")


def _meant(text: object) -> str:
    """ "did you mean 'W4A8'? " where only letters' cases, spaces or dashes are wrong, else ""."""
    if not isinstance(text, str) or len(text) > 80:
        return ""
    plain = re.sub(r"[\s_]", "", text).lower()
    spelled = re.sub(r"^w-?([0-9]+)[-/]?a-?", r"W\1A", plain)
    spelled = re.sub(r"-(kv|p)(?=[0-9])", lambda m: m[0].upper(), spelled)
    try:
        return f"did you mean {str(Scheme.parse(spelled))!r}? " if spelled != text else ""
    except UserError:
        return ""


def _short(text: object) -> str:
    """`repr`, cut to what fits into a sentence."""
    whole = repr(text)
    return whole if len(whole) <= 80 else f"{whole[:60]}…{whole[-10:]}"
