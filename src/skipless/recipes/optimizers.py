"""One small model, twelve optimiser rows: what docs/optimizers.md compares.

The model and the data of the demo, 300,000 tokens a row. All rows share the learning rate of
embedding, head and gains, so that what differs is the optimiser of the hidden matrices alone; its
updates have the size of AdamW's (Muon's "rms" scale, `update_rms` of the others), so that one grid
of learning rates suits all. Read by benchmarks/optimizer_loss.py.
"""

from __future__ import annotations

from skipless.config import OptimizerRecipe, RunConfig
from skipless.recipes import recipe
from skipless.recipes.demo import residual, residual_free
from skipless.recipes.parts import ADAMW_LR, kl_shampoo

LR = 2e-3
SHORT_MEMORY = (0.9, 0.95)
"""Decays of momentum and factors in runs of some 300 steps."""

METHODS: dict[str, tuple[str, OptimizerRecipe]] = {
    "adamw": ("AdamW", OptimizerRecipe(name="adamw", lr=LR, adamw_lr=ADAMW_LR)),
    "muon": ("Muon", OptimizerRecipe(name="muon", lr=LR, adamw_lr=ADAMW_LR)),
} | {
    short: (
        label,
        OptimizerRecipe(name=name, lr=LR, betas=SHORT_MEMORY, update_rms=0.2, adamw_lr=ADAMW_LR),
    )
    for short, name, label in (
        ("shampoo", "shampoo", "Shampoo"),
        ("soap", "soap", "SOAP"),
        ("kl-soap", "kl_soap", "KL-SOAP"),
        ("kl", "kl_shampoo", "KL-Shampoo"),
    )
}

KINDS = {
    "residual": (residual, "residual"),
    "rf": (residual_free, "residual-free"),
}


def _short(row: RunConfig) -> RunConfig:
    return row.replace(
        note="learning rate: the middle of a grid; docs/optimizers.md has the whole of it",
        train={"num_tokens": 300_000, "eval_every": 0, "eval_tokens": 65_536},
        probe={"every": 100},
    )


def _register(kind: str, method: str) -> None:
    make, words = KINDS[kind]
    label, optim = METHODS[method]

    def row() -> RunConfig:
        return _short(make(f"{words} + {label}", optim))

    row.__doc__ = f"{words.capitalize()}, {label}, 300,000 tokens."
    recipe(f"optim-{kind}-{method}")(row)


for _kind in KINDS:
    for _method in METHODS:
        _register(_kind, _method)


@recipe("optim-parity-fast")
def parity_fast() -> RunConfig:
    """KL-Shampoo as it is by default: blocks, eigenbases turned between steps."""
    return _short(residual("KL-Shampoo, default", kl_shampoo(3e-3)))


@recipe("optim-parity-reference")
def parity_reference() -> RunConfig:
    """KL-Shampoo's published steps on whole matrices, from the same start as the default."""
    fast = parity_fast()
    return fast.replace(
        label="KL-Shampoo, reference", optim={"reference": True, "start": "gradient"}
    )
