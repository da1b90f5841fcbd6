"""The rows of `make demo`: same data, tokens, batch and schedule; only connection, start and
optimiser differ.

Each row's learning rate is the best of a sweep of the same size (docs/log.md, "learning rates of
the demo").
"""

from __future__ import annotations

from skipless.config import (
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimizerRecipe,
    ProbeConfig,
    RunConfig,
    TrainConfig,
)
from skipless.recipes import recipe
from skipless.recipes.parts import (
    ANNEALED,
    BASELINE_INIT,
    IDENTITY_INIT,
    NO_SKIP,
    PAPER_INIT,
    PAPER_TEMPERATURE,
    RESIDUAL,
    adamw,
    kl_shampoo,
    kl_shampoo_published,
    muon,
)


def _base() -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            hidden_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            vocab_size=2_048,
            max_position_embeddings=128,
        ),
        data=DataConfig(sources=("shakespeare", "kjv")),
        train=TrainConfig(
            num_tokens=409_600,
            batch_size=8,
            sequence_length=128,
            warmup_steps=50,
            num_threads=1,
        ),
        probe=ProbeConfig(every=50),
        evaluate=EvaluateConfig(quantize_tokens=16_384),
    )


def _row(label: str, optim: OptimizerRecipe, note: str, **model) -> RunConfig:
    return _base().replace(label=label, optim=optim, note=note, model=model)


def _swept(rates: str) -> str:
    return f"learning rate: the best of {rates} at this size, one seed each (docs/log.md)"


def residual(label: str, optim: OptimizerRecipe, note: str = "") -> RunConfig:
    """A residual row: C1 with the usual small normal start."""
    return _row(label, optim, note, connection=RESIDUAL, init=BASELINE_INIT)


def residual_free(label: str, optim: OptimizerRecipe, note: str = "") -> RunConfig:
    """A residual-free row: identity-biased attention, a skip annealed away (C7), T1 off."""
    return _row(label, optim, note, connection=ANNEALED, init=IDENTITY_INIT)


@recipe("demo-residual-adamw", paper="baseline")
def residual_adamw() -> RunConfig:
    """Residual connections, AdamW: how nearly every model is trained."""
    return residual("residual + AdamW", adamw(4e-3), _swept("2e-3, 4e-3, 8e-3"))


@recipe("demo-residual-kl", paper="baseline")
def residual_kl() -> RunConfig:
    """Residual connections, KL-Shampoo: is it the optimiser alone?"""
    return residual("residual + KL-Shampoo", kl_shampoo(3e-3), _swept("1.5e-3, 3e-3, 6e-3"))


@recipe("demo-residual-muon", paper="control")
def residual_muon() -> RunConfig:
    """Residual connections, Muon."""
    return residual("residual + Muon", muon(5e-3), _swept("2.5e-3, 5e-3, 1e-2"))


@recipe("demo-rf-adamw", paper="baseline")
def rf_adamw() -> RunConfig:
    """No residual connections at the end of training, AdamW."""
    return residual_free("residual-free + AdamW", adamw(2e-3), _swept("1e-3, 2e-3, 4e-3"))


@recipe("demo-rf-kl", paper="proposed")
def rf_kl() -> RunConfig:
    """No residual connections at the end of training, KL-Shampoo."""
    return residual_free(
        "residual-free + KL-Shampoo", kl_shampoo(3e-3), _swept("1.5e-3, 3e-3, 6e-3")
    )


@recipe("demo-rf-muon", paper="control")
def rf_muon() -> RunConfig:
    """No residual connections at the end of training, Muon."""
    return residual_free(
        "residual-free + Muon", muon(2.5e-3), _swept("1.25e-3, 2.5e-3, 5e-3, 1e-2")
    )


@recipe("demo-rf-literal", paper="proposed, literally")
def rf_literal() -> RunConfig:
    """The paper's literal settings: no skip from the first step, orthogonal start, KL-Shampoo.

    I2, I3, I4 and T1.
    """
    return _row(
        "residual-free, literal paper settings",
        kl_shampoo_published(5e-4),
        "constants made for 194 M parameters and 50,000 steps; not tuned to this size on purpose",
        connection=NO_SKIP,
        init=PAPER_INIT,
        temperature=PAPER_TEMPERATURE,
    )


ROWS = (
    "demo-residual-adamw",
    "demo-residual-kl",
    "demo-residual-muon",
    "demo-rf-adamw",
    "demo-rf-kl",
    "demo-rf-muon",
    "demo-rf-literal",
)


def fast(config: RunConfig) -> RunConfig:
    """The same row, small enough that all rows finish in under two minutes. Not for conclusions."""
    return config.replace(
        name=config.name.replace("demo-", "demo-fast-"),
        note="a first look: 40 steps, learning rate of the full demo",
        model={"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 8},
        train={"num_tokens": 40_960, "warmup_steps": 8, "eval_every": 20, "eval_tokens": 4_096},
        probe={"every": 10, "num_tokens": 1_024, "final_tokens": 4_096},
        evaluate={"num_tokens": 8_192, "quantize_tokens": 8_192, "sample_tokens": 24},
    )


FAST_ROWS = tuple(name.replace("demo-", "demo-fast-") for name in ROWS)


def _register_fast(name: str) -> None:
    from skipless.recipes import get

    def small() -> RunConfig:
        return fast(get(name))

    small.__doc__ = f"{name}, small enough for a first look; not for conclusions."
    recipe(name.replace("demo-", "demo-fast-"))(small)


for _name in ROWS:
    _register_fast(_name)
