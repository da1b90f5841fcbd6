"""Settings of a sublayer's join with the stream (C0-C11), apart from `config.py` for their length.

Read by `config.ModelConfig`, where they are the field `connection`. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from skipless import checks, unread
from skipless.errors import UserError
from skipless.interpolation_config import UniversalConfig
from skipless.jsonable import Config, is_given


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig(Config):
    """How a sublayer joins the stream: y = a * x + b * f(norm(x)) + c * x0 (C0)."""

    kind: str = "residual"
    """residual C1, none C2, fixed C3, rezero C4, layerscale C5, interpolate C6, anneal C7,
    learned C9, universal C8, gated C10, sphere C11."""
    init: float | None = None
    """Start of the learned gain; None means the kind's own (rezero 0, layerscale 1e-4,
    interpolate theta 0, learned 1, sphere 0.05)."""
    granularity: Literal["scalar", "channel", "block"] | None = None
    """One gain per sublayer, per channel, or one scalar shared by both sublayers of a block
    (rezero only). None means the kind's own: layerscale and sphere channel, the others scalar."""
    a: float = 1.0
    """Weight of the stream, kind fixed."""
    b: float = 1.0
    """Weight of the branch, kind fixed."""
    c: float = 0.0
    """Weight of the embedding x0, kind fixed."""
    scale: float = 1.0
    """s of C6: 1 from scratch; 2 makes theta = 0 exactly x + F."""
    anneal_fraction: float = 0.5
    """Share of training after which the stream's weight has reached 0 (C7)."""
    anneal_shape: Literal["linear", "cosine"] = "linear"
    universal: UniversalConfig = field(default_factory=UniversalConfig)
    """Everything of kind universal."""

    def __post_init__(self) -> None:
        checks.check_connection(self)

    @classmethod
    def from_dict(cls, values, *, where: str = ""):
        """As `Config.from_dict`. What the kind does not read is an error where somebody has just
        given it; from older files, and from settings that a change starts from, it is left out."""
        found = _Lenient.read(values, where)
        named = where or "connection."
        settings = {item.name: getattr(found, item.name) for item in fields(cls)}
        for name, leaf in unread.not_read(found).items():
            if is_given(f"{named}{leaf}"):
                raise UserError(unread.say_not_read(found, named, leaf))
            del settings[name]
        if checks.is_plain(found) and not any(is_given(f"{named}{n}") for n in ("kind", *"abc")):
            settings["kind"] = "residual"
        return cls(**settings)


class _Lenient(ConnectionConfig):
    """The same settings, of which some may be such as the kind does not read."""

    def __post_init__(self) -> None:
        checks.check_connection_ranges(self)

    @classmethod
    def read(cls, values, where: str) -> ConnectionConfig:
        """As `Config.from_dict`."""
        return Config.from_dict.__func__(cls, values, where=where)  # type: ignore[attr-defined]


_Lenient.__name__ = ConnectionConfig.__name__  # for sentences about it


@dataclass(frozen=True, kw_only=True)
class ConnectionOverride(Config):
    """A different connection in some layers or in one kind of sublayer."""

    connection: ConnectionConfig
    layers: tuple[int, ...] | None = None
    """Layer indices (negative ones count from the end); None means all."""
    sublayer: Literal["attention", "mlp"] | None = None
    """None means both."""

    @classmethod
    def from_dict(cls, values, *, where: str = ""):
        if isinstance(values, dict) and "connection" not in values:
            raise UserError(
                f"{where or 'a connection override.'}connection is missing; say which connection "
                'these layers get, such as {"connection": {"kind": "none"}}'
            )
        return super().from_dict(values, where=where)

    def __post_init__(self) -> None:
        checks.check_override(self)
