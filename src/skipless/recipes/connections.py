"""The comparison of connections: one small model, every way for a sublayer to join the stream.

`connections-DEPTH-KIND` are language models (width 128, 307,200 tokens of shakespeare + kjv),
`connections-author-4-KIND` encoders that tell which of four bodies of text a passage is from, whole
works held out. Within a depth all rows share parameters of the trunk, data, schedule, batch and
steps. KINDS is the table they are all made of; `skipless compare-connections` trains them and
docs/connections.md tells how to read the result. Tags C1-C11, I2-I4, I7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from skipless.config import (
    ConnectionConfig,
    ConnectionOverride,
    DataConfig,
    OptimizerRecipe,
    ProbeConfig,
    RunConfig,
)
from skipless.recipes import recipe
from skipless.recipes.demo import residual
from skipless.recipes.parts import (
    ANNEALED,
    IDENTITY_INIT,
    NO_SKIP,
    PAPER_INIT,
    RESIDUAL,
    adamw,
    kl_shampoo,
    muon,
)

LR = 4e-3
"""Shared by all AdamW rows: the best of the demo's sweep for residual, and 0.02 nats from the best
for residual-free (docs/log.md, "learning rates of the demo")."""
DEPTHS = (4, 8, 12, 24)
FEW = DEPTHS[:2]
"""Where every kind is run; the kinds with `deep` go on to 12 and 24 layers."""
AUTHOR_DEPTH = 4
AUTHORS = ("shakespeare", "kjv", "milton", "sotu")
FAST_KINDS = ("residual", "rezero", "layerscale", "none", "universal", "none-orthogonal-muon")

GROUPS = {
    "gains": "a learned gain on the branch",
    "weights": "learned or scheduled weights on both",
    "removed": "skips removed",
    "starts": "no skip, other starts and optimisers",
}
"""Rows that share a panel in the figures."""


def _uniform(connection: ConnectionConfig) -> Callable[[int], dict[str, Any]]:
    return lambda num_layers: {"connection": connection}


def _without(
    sublayer: Literal["attention", "mlp"] | None, half: int | None = None
) -> Callable[[int], dict[str, Any]]:
    """No skip in `sublayer` (None: both) of all layers, or of the first (0) or last (1) half."""

    def model(num_layers: int) -> dict[str, Any]:
        halves = (range(num_layers // 2), range(num_layers // 2, num_layers))
        layers = None if half is None else tuple(halves[half])
        rule = ConnectionOverride(connection=NO_SKIP, layers=layers, sublayer=sublayer)
        return {"connection": RESIDUAL, "connection_overrides": (rule,)}

    return model


def _started(connection: ConnectionConfig, init: Any) -> Callable[[int], dict[str, Any]]:
    return lambda num_layers: {"connection": connection, "init": init}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the comparison."""

    label: str
    about: str
    model: Callable[[int], dict[str, Any]]
    """Model settings that differ from the shared ones, for a number of layers."""
    group: str
    optim: OptimizerRecipe = field(default_factory=lambda: adamw(LR))
    deep: bool = False
    """Also at 12 and 24 layers."""
    baseline: str = "residual"
    """The kind it is measured against: the residual one with its optimiser."""

    @property
    def depths(self) -> tuple[int, ...]:
        return DEPTHS if self.deep else FEW

    @property
    def classifies(self) -> bool:
        """Whether there is a classification row of it too."""
        return self.optim.name == "adamw"


def _connection(**settings: Any) -> Callable[[int], dict[str, Any]]:
    return _uniform(ConnectionConfig(**settings))


_REZERO = _connection(kind="rezero")

KINDS: dict[str, Kind] = {
    "residual": Kind(
        label="residual", about="x + f, the baseline",
        model=_uniform(RESIDUAL), group="removed", deep=True,
    ),
    "rezero": Kind(
        label="ReZero", about="x + alpha f, a scalar a sublayer from 0",
        model=_REZERO, group="gains", deep=True,
    ),
    "rezero-block": Kind(
        label="ReZero, shared by block", about="one alpha for both sublayers of a block",
        model=_connection(kind="rezero", granularity="block"), group="gains",
    ),
    "rezero-gain-lr": Kind(
        label="ReZero, gain rate x 10", about="ReZero whose gains learn ten times as fast",
        model=_REZERO, group="gains",
        optim=OptimizerRecipe(name="adamw", lr=LR, gain_lr=10 * LR),
    ),
    "rezero-gain-decay": Kind(
        label="ReZero, gain decay 0.1", about="ReZero with weight decay on its gains",
        model=_REZERO, group="gains",
        optim=OptimizerRecipe(name="adamw", lr=LR, gain_weight_decay=0.1),
    ),
    "layerscale": Kind(
        label="LayerScale", about="x + gamma f, a gain a channel from 1e-4",
        model=_connection(kind="layerscale"), group="gains", deep=True,
    ),
    "layerscale-scalar": Kind(
        label="LayerScale, scalar", about="x + gamma f, a gain a sublayer from 1e-4",
        model=_connection(kind="layerscale", granularity="scalar"), group="gains",
    ),
    "interpolate": Kind(
        label="interpolate", about="(1 - lam) x + lam f, lam learned from 0.5",
        model=_connection(kind="interpolate"), group="weights",
    ),
    "learned": Kind(
        label="learned", about="a x + b f, both learned from 1",
        model=_connection(kind="learned"), group="weights",
    ),
    "gated": Kind(
        label="gated", about="(1 - g) x + g f, a gate a token from 0.5",
        model=_connection(kind="gated"), group="weights",
    ),
    "universal": Kind(
        label="universal", about="aligned and gated join",
        model=_connection(kind="universal"), group="weights", deep=True,
    ),
    "sphere": Kind(
        label="sphere", about="nGPT's join, directions interpolated by an alpha a channel",
        model=_connection(kind="sphere"), group="weights", deep=True,
    ),
    "anneal": Kind(
        label="annealed to none", about="a x + f, a falls to 0 over the first half",
        model=_uniform(ANNEALED), group="weights",
    ),
    "none": Kind(
        label="none", about="f alone, hard removal from the first step",
        model=_uniform(NO_SKIP), group="removed", deep=True,
    ),
    "no-attention-skip": Kind(
        label="no attention skip", about="the skip around the MLP only",
        model=_without("attention"), group="removed",
    ),
    "no-mlp-skip": Kind(
        label="no MLP skip", about="the skip around attention only",
        model=_without("mlp"), group="removed",
    ),
    "no-early-skips": Kind(
        label="no early skips", about="no skips in the first half of the layers",
        model=_without(None, 0), group="removed",
    ),
    "no-late-skips": Kind(
        label="no late skips", about="no skips in the last half of the layers",
        model=_without(None, 1), group="removed",
    ),
    "none-orthogonal": Kind(
        label="none, orthogonal", about="hard removal from the orthogonal start",
        model=_started(NO_SKIP, PAPER_INIT), group="starts", deep=True,
    ),
    "none-orthogonal-muon": Kind(
        label="none, orthogonal, Muon", about="hard removal from the orthogonal start, with Muon",
        model=_started(NO_SKIP, PAPER_INIT), group="starts", optim=muon(2.5e-3), deep=True,
        baseline="residual-muon",
    ),
    "none-orthogonal-kl": Kind(
        label="none, orthogonal, KL-Shampoo",
        about="hard removal from the orthogonal start, with KL-Shampoo",
        model=_started(NO_SKIP, PAPER_INIT), group="starts", optim=kl_shampoo(3e-3),
        baseline="residual-kl",
    ),
    "none-identity-muon": Kind(
        label="none, identity bias, Muon",
        about="hard removal with identity-biased attention, with Muon",
        model=_started(NO_SKIP, IDENTITY_INIT), group="starts", optim=muon(2.5e-3), deep=True,
        baseline="residual-muon",
    ),
    "residual-muon": Kind(
        label="residual, Muon", about="the baseline of the Muon rows",
        model=_uniform(RESIDUAL), group="starts", optim=muon(5e-3), deep=True,
        baseline="residual-muon",
    ),
    "residual-kl": Kind(
        label="residual, KL-Shampoo", about="the baseline of the KL-Shampoo rows",
        model=_uniform(RESIDUAL), group="starts", optim=kl_shampoo(3e-3), baseline="residual-kl",
    ),
}  # fmt: skip
"""In the order of tables and figures."""

_NOTES = {
    "adamw": f"learning rate {LR:g} for all AdamW rows: see recipes/connections.py",
    "muon": "learning rate from the demo's sweep (docs/log.md)",
    "kl_shampoo": "learning rate from the demo's sweep (docs/log.md)",
}


def _language_model(kind: Kind, num_layers: int) -> RunConfig:
    row = residual(f"{kind.label}, {num_layers} layers", kind.optim, _NOTES[kind.optim.name])
    return row.replace(
        model={"num_hidden_layers": num_layers, **kind.model(num_layers)},
        train={"num_tokens": 307_200, "eval_every": 100, "eval_tokens": 65_536},
        probe=ProbeConfig(every=0, trace_every=5, final_tokens=4_096),
    )


def _classifier(config: RunConfig) -> RunConfig:
    """The same trunk, bidirectional, with a label a passage: 32 tokens, about a sentence or two,
    so that the task is not solved by single words."""
    return config.replace(
        label=f"{config.label}, authors",
        model={"causal": False, "num_labels": len(AUTHORS)},
        data=DataConfig(sources=AUTHORS, held_out_fraction=0.1),
        train={"sequence_length": 32, "batch_size": 32},
    )


def name_of(kind: str, num_layers: int, *, authors: bool = False) -> str:
    """The recipe of a kind at a depth."""
    return f"connections-{'author-' if authors else ''}{num_layers}-{kind}"


def fast_settings() -> dict[str, str]:
    """Overrides for a smoke run: 20 steps of a narrower model. Not for conclusions."""
    return {
        "model.hidden_size": "64", "model.num_attention_heads": "2",
        "train.num_tokens": "20480", "train.warmup_steps": "4", "train.eval_every": "10",
        "train.eval_tokens": "4096", "probe.trace_every": "2", "probe.final_tokens": "1024",
        "evaluate.num_tokens": "4096",
    }  # fmt: skip


def _register(name: str, num_layers: int, *, authors: bool) -> None:
    kind = KINDS[name]

    def row() -> RunConfig:
        config = _language_model(kind, num_layers)
        return _classifier(config) if authors else config

    row.__doc__ = f"{kind.label}: {kind.about}; {num_layers} layers" + (
        ", which author." if authors else "."
    )
    recipe(name_of(name, num_layers, authors=authors))(row)


for _depth in DEPTHS:
    for _name, _kind in KINDS.items():
        if _depth in _kind.depths:
            _register(_name, _depth, authors=False)
for _name, _kind in KINDS.items():
    if _kind.classifies:
        _register(_name, AUTHOR_DEPTH, authors=True)
