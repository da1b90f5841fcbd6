"""One decoder layer: attention, then MLP, each joined to the stream by its own connection.

Read by `transformer.py`. Equations C0-C9 of docs/equations.md are the connections.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from skipless.config import ConnectionConfig, ModelConfig
from skipless.model.attention import Attention
from skipless.model.connections import Connection, ReZero, build_connection
from skipless.model.context import ForwardContext
from skipless.model.mlp import MLP
from skipless.model.norms import build_norm

Sublayer = Literal["attention", "mlp"]
IDENTITY = ConnectionConfig(kind="fixed", a=1.0, b=0.0)
"""The join of a sublayer that is left out: y = x, whatever the branch."""


def is_absent(connection: ConnectionConfig) -> bool:
    """Whether a sublayer joined like this changes nothing (C3 with a = 1, b = c = 0)."""
    weights = (connection.a, connection.b, connection.c)
    return connection.kind == "fixed" and weights == (1, 0, 0)


class Block(nn.Module):
    """Attention and MLP sublayers with norms and connections.

        residual (C1)                         residual-free (C2)

        x ──┬──────────────────┐              x
            │                  │              │
        input_layernorm        │          input_layernorm
            │                  │              │
        self_attn              │          self_attn
            │                  │              │
            └───────────────> (+)             │
                               │              │
            ┌──────────────────┤              │
            │                  │              │
        post_attention_        │          post_attention_
        layernorm              │          layernorm
            │                  │              │
        mlp                    │          mlp
            │                  │              │
            └───────────────> (+)             │
                               │              │
                               y              y

    Norm placement "pre" is drawn. "post" norms the stream after each join instead
    (`post_attention_layernorm`, `post_feedforward_layernorm`); "none" has no norms in the block.

    A sublayer whose connection `is_absent` does not exist: it has no module, no norm in front, no
    connection and no entry in the cache. Its attributes are None.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.placement = config.norm_placement
        width, pre = config.hidden_size, self.placement == "pre"
        attention = config.connection_at(layer, "attention")
        mlp = config.connection_at(layer, "mlp")
        has_attention, has_mlp = not is_absent(attention), not is_absent(mlp)
        self.input_layernorm: nn.Module | None = None
        self.self_attn: Attention | None = None
        self.attention_connection: Connection | None = None
        self.post_attention_layernorm: nn.Module | None = None
        self.mlp: MLP | None = None
        self.mlp_connection: Connection | None = None
        if has_attention:
            self.input_layernorm = build_norm(config) if pre else None
            self.self_attn = Attention(config, layer)
            self.attention_connection = build_connection(attention, width)
        if self.placement == "post" or pre and has_mlp:
            self.post_attention_layernorm = build_norm(config)
        if has_mlp:
            self.mlp = MLP(config)
            self.mlp_connection = build_connection(mlp, width)
        if self.placement == "post":
            self.post_feedforward_layernorm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.place(layer, config.causal)
        if self.self_attn is not None and self.attention_connection is not None:
            self.self_attn.measures_entropy = self.attention_connection.needs_entropy
        self.tie_gains()

    def place(self, layer: int, causal: bool) -> None:
        """Tell the sublayers which layer of a model this is."""
        if self.self_attn is not None:
            self.self_attn.layer = layer
        if self.attention_connection is not None:
            self.attention_connection.place(layer, "attention", causal)
        if self.mlp_connection is not None:
            self.mlp_connection.place(layer, "mlp", causal)

    def drop(self, sublayer: Sublayer) -> None:
        """Remove one sublayer with its connection and the norm in front; y = x is left."""
        if sublayer == "attention":
            self.self_attn = self.attention_connection = self.input_layernorm = None
        else:
            self.mlp = self.mlp_connection = None
            if self.placement == "pre":
                self.post_attention_layernorm = None

    def tie_gains(self) -> None:
        """Let both sublayers share one alpha where C4 is set to granularity "block"."""
        first, second = self.attention_connection, self.mlp_connection
        if not (isinstance(first, ReZero) and isinstance(second, ReZero)):
            return
        if first.config.granularity == second.config.granularity == "block":
            second.alpha = first.alpha

    def forward(self, stream: Tensor, context: ForwardContext) -> Tensor:
        pre, post = self.placement == "pre", self.placement == "post"

        if self.self_attn is not None and self.attention_connection is not None:
            norm = self.input_layernorm
            branch = self.self_attn(stream if norm is None else norm(stream), context)
            if self.dropout is not None:
                branch = self.dropout(branch)
            stream = self.attention_connection(stream, branch, context)

        norm = self.post_attention_layernorm
        if post and norm is not None:
            stream = norm(stream)

        if self.mlp is not None and self.mlp_connection is not None:
            branch = self.mlp(norm(stream) if pre and norm is not None else stream)
            if self.dropout is not None:
                branch = self.dropout(branch)
            stream = self.mlp_connection(stream, branch, context)
        if post:
            stream = self.post_feedforward_layernorm(stream)
        return stream
