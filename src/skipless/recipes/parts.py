"""The pieces that recipes are made of: connections, initialisers, optimisers.

Tuned numbers say where they were tuned; the searches themselves are in docs/log.md.
"""

from __future__ import annotations

from skipless.config import ConnectionConfig, InitConfig, OptimizerRecipe, TemperatureConfig

RESIDUAL = ConnectionConfig(kind="residual")
NO_SKIP = ConnectionConfig(kind="none")
ANNEALED = ConnectionConfig(kind="anneal", anneal_fraction=0.5)
"""A skip that shrinks linearly to nothing over the first half of training (C7): ends as C2."""

BASELINE_INIT = InitConfig()
"""normal(0, 0.02), output projections scaled by depth (I6)."""
PAPER_INIT = InitConfig(value_output="haar", query_key="haar", mlp="suo")
"""The paper's orthogonal start (I2, I3, I4) with its published constants."""
IDENTITY_INIT = InitConfig(value_output="haar", query_key="unit", mlp="suo", identity_bias=5.0)
"""I2 and I4 with identity-biased attention (I7) in place of I3, which sits at the unigram loss
for hundreds of steps in short runs."""

PAPER_TEMPERATURE = TemperatureConfig(beta=1.1)

ADAMW_LR = 2e-3
"""Of embedding, head and norm gains in the rows whose hidden matrices another optimiser trains."""


def adamw(lr: float) -> OptimizerRecipe:
    """AdamW for every parameter."""
    return OptimizerRecipe(name="adamw", lr=lr, betas=(0.9, 0.98))


def muon(lr: float) -> OptimizerRecipe:
    """Muon with updates scaled to AdamW's root mean square."""
    return OptimizerRecipe(name="muon", lr=lr, muon_scale="rms", adamw_lr=ADAMW_LR)


def kl_shampoo(lr: float) -> OptimizerRecipe:
    """KL-Shampoo with the start that suits short runs (first gradient's scale, bias-corrected)."""
    return OptimizerRecipe(name="kl_shampoo", lr=lr, betas=(0.9, 0.95), adamw_lr=ADAMW_LR)


def kl_shampoo_published(lr: float) -> OptimizerRecipe:
    """KL-Shampoo's seven published steps (O1) and published start."""
    return OptimizerRecipe(
        name="kl_shampoo", lr=lr, betas=(0.9, 0.98), start="published", reference=True
    )
