"""rf-small: where the comparison is judged beyond the demo.

8 layers of width 192, 20 million tokens a row. On two CPU cores a row takes hours, so run it in the
background; it checkpoints and resumes. `--train.num_tokens 5e6` gives a shorter, complete schedule.
"""

from __future__ import annotations

from skipless.config import DataConfig, RunConfig
from skipless.recipes import demo, recipe


def _small(row: RunConfig) -> RunConfig:
    return row.replace(
        note="learning rate from the demo's sweep at width 128, not swept at this size",
        model={
            "hidden_size": 192,
            "num_attention_heads": 6,
            "num_hidden_layers": 8,
        },
        data=DataConfig(sources=("shakespeare", "kjv", "milton", "sotu", "moby_dick")),
        train={
            "num_tokens": 20_000_000,
            "batch_size": 32,
            "warmup_steps": 100,
            "eval_every": 100,
            "eval_tokens": 65_536,
            "checkpoint_every": 50,
        },
        probe={"every": 200},
        evaluate={"num_tokens": 131_072, "quantize_tokens": 32_768},
    )


@recipe("rf-small-residual-adamw")
def residual_adamw() -> RunConfig:
    """Residual, AdamW, width 192, 20 M tokens."""
    return _small(demo.residual_adamw())


@recipe("rf-small-residual-kl")
def residual_kl() -> RunConfig:
    """Residual, KL-Shampoo, width 192, 20 M tokens."""
    return _small(demo.residual_kl())


@recipe("rf-small-residual-muon")
def residual_muon() -> RunConfig:
    """Residual, Muon, width 192, 20 M tokens."""
    return _small(demo.residual_muon())


@recipe("rf-small-rf-adamw")
def rf_adamw() -> RunConfig:
    """Residual-free, AdamW, width 192, 20 M tokens."""
    return _small(demo.rf_adamw())


@recipe("rf-small-rf-kl")
def rf_kl() -> RunConfig:
    """Residual-free, KL-Shampoo, width 192, 20 M tokens."""
    return _small(demo.rf_kl())


@recipe("rf-small-rf-muon")
def rf_muon() -> RunConfig:
    """Residual-free, Muon, width 192, 20 M tokens."""
    return _small(demo.rf_muon())
