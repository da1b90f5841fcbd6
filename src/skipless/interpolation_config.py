"""Settings of the universal interpolation (C8, U0-U3), apart from `config.py` for their length.

Read by `config.ConnectionConfig`, where they are the field `universal`. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from skipless import checks, unread
from skipless.jsonable import Config


@dataclass(frozen=True, kw_only=True)
class UniversalConfig(Config):
    """y = x + kappa g (F + rho (A(e) - F)): encoder e, aligner A and gate g of kind universal.

    From scratch the defaults; in a pretrained residual model rho 0 and kappa 2, which is x + F bit
    for bit at the start.
    """

    aligner: Literal["none", "mean", "diagonal", "cholesky", "bures", "sinkhorn"] = "diagonal"
    """What brings e into x's distribution (U2). none leaves e as it is; cholesky and bures use
    whole covariances, O(D^3) per chunk; sinkhorn is for encoders (causal=False) only."""
    encoder: bool = True
    """Whether e is F plus the relation encoder's attention (U1), or F itself."""
    rank: int = 16
    """Width of the relation encoder's one head."""
    encoder_dropout: float = 0.0
    """Dropout on the encoder's mixed values, before W_up."""
    gate: Literal["dynamic", "constant"] = "dynamic"
    """dynamic: one number a token, sigmoid(w . [norm(x), h] + b) (U3); constant: sigmoid(b)."""
    gate_feature: Literal["spread", "entropy"] = "spread"
    """h: the standard deviation over x's channels, or the attention's normalised entropy. MLP
    sublayers have no attention and always use spread."""
    rho: float = 1.0
    """Start of the learned weight of the alignment; 0 in surgery."""
    kappa: float = 1.0
    """Constant factor of the gate; 2 in surgery, so that a gate of one half is a factor of 1."""
    winsor: float | None = 5.0
    """A token whose root mean square exceeds this many times the median of its predecessors' enters
    statistics scaled down to that limit; None switches that off."""
    winsor_window: int = 16
    """Tokens, the newest included, over which a causal model takes that median."""
    skip_first_token: bool = True
    """Leave the first token, where massive activations live, out of every statistic."""
    shrinkage: float = 8.0
    """Tokens' worth of prior that pulls the alignment to the identity while the prefix is short."""
    chunk_size: int = 64
    """Tokens after which a causal cholesky or bures renews its covariances."""
    sinkhorn_epsilon: float = 0.05
    """Entropic regularisation, as a share of the mean cost."""
    sinkhorn_steps: int = 20

    rules: ClassVar[tuple[unread.Rule, ...]] = unread.UNIVERSAL

    def __post_init__(self) -> None:
        checks.check_universal(self)
