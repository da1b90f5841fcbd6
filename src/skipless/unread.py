"""Settings that another setting leaves without effect, so that giving one is an error and not a
silent no-op.

Two strengths. What a kind of connection does not read is refused wherever it is set (`not_read`,
used by `connection_config.py`). The rules below are the `rules` of other settings, and `jsonable`
keeps them only where somebody has just written a value: a recipe may hold a refresh interval, and
changing its optimiser to Muon is no reason to complain of that. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

_GAIN = ("init", "granularity")
READ: dict[str, tuple[str, ...]] = {
    "residual": (), "none": (), "fixed": ("a", "b", "c"), "rezero": _GAIN, "layerscale": _GAIN,
    "interpolate": (*_GAIN, "scale"), "anneal": ("anneal_fraction", "anneal_shape"),
    "learned": _GAIN, "sphere": _GAIN, "universal": ("universal",), "gated": (*_GAIN, "scale"),
}  # fmt: skip
"""What each kind of connection reads of `ConnectionConfig`; the rest of it has to be left alone."""


def not_read(config: Any) -> dict[str, str]:
    """Fields of a `ConnectionConfig` that are set and that its kind does not read, with the first
    such leaf of each: {"universal": "universal.rank"}."""
    used = ("kind", *READ[config.kind])
    return {name: leaf for name, leaf in _changed(config).items() if name not in used}


def say_not_read(config: Any, where: str, leaf: str) -> str:
    """The sentence about a leaf that `not_read` found."""
    field, _, inner = leaf.partition(".")
    value = getattr(config, field)
    kinds = [kind for kind, used in READ.items() if field in used]
    one_of = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
    return (
        f"{where}{leaf} is {getattr(value, inner) if inner else value!r}, which kind "
        f"{config.kind!r} does not read; leave it out, or take kind {one_of}"
    )


def _changed(config: Any) -> dict[str, str]:
    """Fields that differ from their default, with the first such leaf of each."""
    found = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            inner = next(iter(_changed(value)), None)
            found |= {item.name: f"{item.name}.{inner}"} if inner else {}
        elif value != item.default:
            found[item.name] = item.name
    return found


class Rule(NamedTuple):
    """While `setting` has a value for which `idle` holds, `fields` have no effect."""

    setting: str
    idle: Callable[[Any], bool]
    fields: tuple[str, ...]


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_not(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


UNIVERSAL = (
    Rule("encoder", _is(False), ("rank", "encoder_dropout")),
    Rule("aligner", _is("none"), ("winsor", "winsor_window", "skip_first_token", "shrinkage")),
    Rule("aligner", _is_not("cholesky", "bures"), ("chunk_size",)),
    Rule("aligner", _is_not("sinkhorn"), ("sinkhorn_epsilon", "sinkhorn_steps")),
    Rule("winsor", _is(None), ("winsor_window",)),
    Rule("gate", _is("constant"), ("gate_feature",)),
)
INIT = (
    Rule("value_output", _is_not("haar"), ("a_vo",)),
    Rule("value_output", _is_not("cs"), ("cs_c",)),
    Rule("query_key", _is_not("haar"), ("a_qk",)),
    Rule("query_key", _is_not("cs"), ("cs_a", "cs_b")),
    Rule("mlp", _is_not("suo"), ("a_up", "a_down", "suo_correction")),
)
MODEL = (Rule("position", _is_not("rope"), ("rope_theta",)),)
OPTIMIZER = (
    Rule("name", _is("muon"), ("betas", "eps")),
    Rule("name", _is_not("muon"), ("momentum", "muon_scale", "muon_steps")),
    Rule("name", _is("adamw", "muon"), ("block_size", "refresh_every", "root", "update_rms")),
    Rule("reference", _is(True), ("block_size", "root")),
)
TRAIN = (
    Rule("schedule", _is("constant"), ("min_lr_ratio",)),
    Rule("schedule", _is_not("wsd"), ("decay_fraction",)),
)
