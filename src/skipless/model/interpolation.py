"""Joins whose weights depend on the token: universal interpolation (C8) and the gated join (C10).

The published universal interpolation has five faults, each shown in
tests/model/test_interpolation_faults.py; docs/interpolation.md says what is built instead:

1. The encoder lets F see x and F up to its own position, in r channels (U1).
2. The aligner whitens with the branch's own statistics and colours with the stream's, from the
   tokens so far only (U2).
3. The gate reads the stream and one feature, spread or entropy (U3), token by token.

Registered in `connections.CONNECTIONS`. Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.model.aligned_join import FUSED, Join, aligned_join
from skipless.model.aligners import align
from skipless.model.connections import CONNECTIONS, Connection
from skipless.model.context import ForwardContext
from skipless.model.relation_encoder import RelationEncoder
from skipless.model.row_products import RowProducts, row_products
from skipless.model.token_statistics import Tokens


@CONNECTIONS.register("universal")
class Universal(Connection):
    """C8: y = x + kappa g phi, phi = F + rho (A(e) - F) (U0).

    x ──┬──────────┬─────────┬────────────────────(+)── y
        │        encoder   aligner   gate ─ * kappa┘
        └─ norm ─ f ┴─ e ─────┴─ A(e) ─ * rho ─ phi ┘

    With rho = 0, kappa = 2 and the gate's start of one half this is x + F, bit for bit.
    """

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        settings = config.universal
        self.rho = nn.Parameter(torch.empty(1))
        self.encoder = (
            RelationEncoder(hidden_size, settings.rank, settings.encoder_dropout)
            if settings.encoder
            else None
        )
        self.gate_weight = (
            nn.Parameter(torch.empty(hidden_size + 1)) if settings.gate == "dynamic" else None
        )
        self.gate_bias = nn.Parameter(torch.empty(1))
        self.reset_parameters()
        if self.encoder is not None:
            self.encoder.reset_parameters()

    def place(self, layer, sublayer, causal):
        super().place(layer, sublayer, causal)
        if causal and self.config.universal.aligner == "sinkhorn":
            raise UserError(
                "aligner 'sinkhorn' pairs every token with every other, so it would show a causal "
                "model the future; use 'diagonal', 'cholesky' or 'bures', or model.causal=False"
            )

    @property
    def needs_entropy(self) -> bool:
        settings = self.config.universal
        return (
            settings.gate == "dynamic"
            and settings.gate_feature == "entropy"
            and self.sublayer != "mlp"
        )

    def reset_parameters(self):
        nn.init.constant_(self.rho, self.config.universal.rho)
        nn.init.zeros_(self.gate_bias)
        if self.gate_weight is not None:
            nn.init.zeros_(self.gate_weight)

    def forward(self, stream, branch, context):
        return self.join(stream, branch, ForwardContext() if context is None else context)

    def join(self, stream: Tensor, branch: Tensor, context: ForwardContext) -> Tensor:
        """y [B, T, D] of x and F, under a context that says everything (`warmup.py` listens)."""
        settings = self.config.universal
        key = (self.layer, self.sublayer) if self.layer is not None else id(self)
        tokens = Tokens.of(settings, context, stream.shape[1], stream.device, key)
        if tokens.causal and settings.aligner == "sinkhorn":
            raise UserError(
                "aligner 'sinkhorn' cannot be causal; give a context with is_causal=False, or "
                "choose another aligner"
            )
        if tokens.causal and tokens.cache is None and settings.aligner in FUSED:
            return self._fused(stream, branch, context, tokens)
        e = branch if self.encoder is None else self.encoder(stream, branch, context, tokens)
        aligned = align(settings, tokens, stream, e)
        mixed = torch.addcmul(branch, aligned - branch, self.rho.to(branch.dtype))
        weight = settings.kappa * self.gate(stream, context)
        return torch.addcmul(stream, mixed, weight.to(branch.dtype))

    def _fused(
        self, stream: Tensor, branch: Tensor, context: ForwardContext, tokens: Tokens
    ) -> Tensor:
        """The same in few passes; for aligners of prefixes, without a cache."""
        settings, encoder = self.config.universal, self.encoder
        rows = [self.gate_rows] if encoder is None else [self.gate_rows, encoder.down]
        of_x = row_products(stream, torch.cat(rows), spread=self.needs_spread)
        given = Join(self.rho, settings.kappa * self._gate(of_x, context))
        if encoder is not None:
            of_f = row_products(branch, encoder.down)
            x = of_x.normalised[..., -settings.rank :]
            given.hidden, given.up = encoder.mix(x, of_f.normalised, context, tokens), encoder.up
        return aligned_join(settings, tokens, stream, branch, of_x.size, given)

    def gate(self, stream: Tensor, context: ForwardContext) -> Tensor:
        """U3: g = sigmoid(w . [norm(x), h] + b), [B, T, 1] or [1]; 0.5 at the start."""
        return self._gate(row_products(stream, self.gate_rows, spread=self.needs_spread), context)

    @property
    def needs_spread(self) -> bool:
        """Whether the gate reads the stream's spread."""
        return self.gate_weight is not None and not self.needs_entropy

    @property
    def gate_rows(self) -> Tensor:
        """The gate's weights of norm(x), [1, D], or [0, D] where it is constant."""
        if self.gate_weight is None:
            return self.rho.new_empty(0, self.hidden_size)
        return self.gate_weight[None, :-1]

    def _gate(self, of_x: RowProducts, context: ForwardContext) -> Tensor:
        if self.gate_weight is None:
            return torch.sigmoid(self.gate_bias)
        feature = of_x.spread
        if self.needs_entropy:
            if context.entropy is None:
                raise UserError(
                    "gate_feature 'entropy' needs the attention's entropy in the context, which "
                    "skipless' own attention fills in; use gate_feature 'spread' elsewhere"
                )
            feature = context.entropy[..., None]
        assert feature is not None, "it is the one or the other"
        logit = of_x.normalised[..., :1] + feature * self.gate_weight[-1]
        return torch.sigmoid(logit + self.gate_bias)

    def gains(self):
        return {"rho": self.rho.detach(), "gate_bias": self.gate_bias.detach()}

    def describe(self) -> str:
        """One line: aligner, gate, parameters, and their share of a layer of 12 D^2 weights."""
        settings, own = self.config.universal, sum(p.numel() for p in self.parameters())
        encoder = f"encoder of rank {settings.rank}" if settings.encoder else "no encoder"
        gate = "constant" if settings.gate == "constant" else (
            "entropy" if self.needs_entropy else "spread"
        )  # fmt: skip
        share = 2 * own / (12 * self.hidden_size**2)
        return (
            f"universal: {encoder}, aligner {settings.aligner}, gate {gate}: {own:,} parameters; "
            f"two sites are {share:.3%} of a layer of 12 D^2 at D = {self.hidden_size:,}"
        )


@CONNECTIONS.register("gated")
class Gated(Connection):
    """C10: y = s (1 - g) x + s g f, g = sigmoid(w x + b), 0.5 at the start; s = `scale`.

    x ──┬─────── * s(1-g) ──(+)── y
        ├─ linear ─ g        │
        └─ norm ─ f ─ * s g ─┘

    One gate a token (granularity scalar), or one a channel: D^2 weights. Source: highway networks,
    arXiv 1505.00387.
    """

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        channels = config.granularity == "channel"
        shape = (hidden_size, hidden_size) if channels else (hidden_size,)
        self.gate_weight = nn.Parameter(torch.empty(shape))
        self.gate_bias = nn.Parameter(torch.empty(hidden_size if channels else 1))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.gate_weight)
        nn.init.constant_(self.gate_bias, self.config.init or 0.0)

    def forward(self, stream, branch, context):
        weight = self.gate_weight.view(-1, self.hidden_size).to(stream.dtype)
        g = torch.sigmoid(F.linear(stream, weight, self.gate_bias.to(stream.dtype)))
        scale = self.config.scale
        return torch.addcmul(stream * (scale * (1 - g)), branch, scale * g)

    def gains(self):
        return {"gate_bias": self.gate_bias.detach()}


def universal_connections(model: nn.Module) -> dict[str, Universal]:
    """Every universal connection of any model by name. Raises UserError where there is none."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, Universal)}
    if not found:
        raise UserError(
            f"{type(model).__name__} has no universal connection; build or patch it with "
            "connection kind 'universal'"
        )
    return found


def describe_interpolation(model: nn.Module) -> str:
    """One line a universal connection, then the share of all of them in the model's parameters.

    Raises UserError for a model that has none.
    """
    found = universal_connections(model)
    own = sum(p.numel() for m in found.values() for p in m.parameters())
    total = sum(p.numel() for p in model.parameters())
    lines = [f"{name}: {module.describe()}" for name, module in found.items()]
    lines.append(f"all {len(found)}: {own:,} of {total:,} parameters, {own / total:.3%}")
    return "\n".join(lines)
