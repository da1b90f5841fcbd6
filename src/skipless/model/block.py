"""One decoder layer: attention, then MLP, each joined to the stream by its own connection.

Read by `transformer.py`. Equations C0-C9 of docs/equations.md are the connections.
"""

from __future__ import annotations

from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.model.attention import Attention
from skipless.model.connections import ReZero, build_connection
from skipless.model.context import ForwardContext
from skipless.model.mlp import MLP
from skipless.model.norms import build_norm


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
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.placement = config.norm_placement
        if self.placement == "pre":
            self.input_layernorm = build_norm(config)
        self.self_attn = Attention(config, layer)
        self.attention_connection = build_connection(
            config.connection_at(layer, "attention"), config.hidden_size
        )
        if self.placement != "none":
            self.post_attention_layernorm = build_norm(config)
        self.mlp = MLP(config)
        self.mlp_connection = build_connection(
            config.connection_at(layer, "mlp"), config.hidden_size
        )
        if self.placement == "post":
            self.post_feedforward_layernorm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.attention_connection.place(layer, "attention", config.causal)
        self.mlp_connection.place(layer, "mlp", config.causal)
        self.self_attn.measures_entropy = self.attention_connection.needs_entropy
        self.tie_gains()

    def tie_gains(self) -> None:
        """Let both sublayers share one alpha where C4 is set to granularity "block"."""
        pair = (self.attention_connection, self.mlp_connection)
        if all(isinstance(c, ReZero) and c.config.granularity == "block" for c in pair):
            self.mlp_connection.alpha = self.attention_connection.alpha

    def forward(self, stream: Tensor, context: ForwardContext) -> Tensor:
        pre, post = self.placement == "pre", self.placement == "post"

        branch = self.self_attn(self.input_layernorm(stream) if pre else stream, context)
        if self.dropout is not None:
            branch = self.dropout(branch)
        stream = self.attention_connection(stream, branch, context)
        if post:
            stream = self.post_attention_layernorm(stream)

        branch = self.mlp(self.post_attention_layernorm(stream) if pre else stream)
        if self.dropout is not None:
            branch = self.dropout(branch)
        stream = self.mlp_connection(stream, branch, context)
        if post:
            stream = self.post_feedforward_layernorm(stream)
        return stream
