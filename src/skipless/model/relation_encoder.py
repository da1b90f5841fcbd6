"""The relation encoder of universal interpolation (U1). Read by `interpolation.py`.

Everything happens in r channels (16 by default): four D x D projections, as published, would be 67
million weights a site at D = 4096; this is 0.13 million. Legend: B batch, T new tokens, S past plus
new tokens, D width, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from skipless.model.context import ForwardContext
from skipless.model.pair_attention import pair_attention, suits
from skipless.model.token_statistics import Tokens


class RelationEncoder(nn.Module):
    """U1: e = F + W_up attn(W_down norm(F); W_down norm([x_<=t, F_<=t])).

    norm(F) ─ W_down ─ query ───────────┐
    norm(x) ─ W_down ─┬─ key, value ─ attention ─ W_up ─(+)─ e
    norm(F) ─ W_down ─┘                            F ────┘

    One head. W_up starts at 0, so that e starts as F. The norm has no gain.
    """

    def __init__(self, hidden_size: int, rank: int, dropout: float = 0.0):
        super().__init__()
        self.hidden_size, self.rank, self.dropout = hidden_size, rank, dropout
        self.down = nn.Parameter(torch.empty(rank, hidden_size))
        self.query = nn.Parameter(torch.empty(rank, rank))
        self.key = nn.Parameter(torch.empty(rank, rank))
        self.value = nn.Parameter(torch.empty(rank, rank))
        self.up = nn.Parameter(torch.empty(hidden_size, rank))

    def start(self, generator: Generator) -> dict[str, Tensor]:
        """Weights by name as they start: normal draws of variance 1 / inputs, W_up 0; on the CPU,
        whole also where the parameters are sharded."""
        return {
            name: torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
            for name, weight in self.named_parameters() if name != "up"
        } | {"up": torch.zeros(self.up.shape)}  # fmt: skip

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """`start` with a CPU generator, or a fixed one."""
        for name, value in self.start(generator or Generator().manual_seed(0)).items():
            self.get_parameter(name).copy_(value)

    def forward(
        self, stream: Tensor, branch: Tensor, context: ForwardContext, tokens: Tokens
    ) -> Tensor:
        """e [B, T, D] of the new tokens' stream x and branch F, each [B, T, D]."""
        x, f = (
            F.linear(F.rms_norm(z, (self.hidden_size,)), self.down.to(z.dtype))
            for z in (stream, branch)
        )
        mixed = self.mix(x, f, context, tokens)
        return branch + F.linear(mixed, self.up.to(branch.dtype))

    def mix(self, x: Tensor, f: Tensor, context: ForwardContext, tokens: Tokens) -> Tensor:
        """h [B, T, r] of e = F + h W_up^T, from W_down norm(x) and W_down norm(F) [B, T, r]."""
        q = F.linear(f, self.query.to(f.dtype))
        pair = torch.cat((F.linear(x, self.key.to(x.dtype)), F.linear(x, self.value.to(x.dtype)),
                          F.linear(f, self.key.to(f.dtype)), F.linear(f, self.value.to(f.dtype))),
                         dim=-1)  # fmt: skip
        x_key, x_value, f_key, f_value = tokens.history("encoder", pair).chunk(4, dim=-1)
        if tokens.cache is None and tokens.causal and context.visible is None and suits(q[:, None]):
            texts = (t[:, None].contiguous() for t in (q, x_key, x_value, f_key, f_value))
            mixed = pair_attention(*texts, scale=q.shape[-1] ** -0.5)[:, 0]
        else:
            keys, values = torch.cat((x_key, f_key), dim=1), torch.cat((x_value, f_value), dim=1)
            mask = self._mask(context, tokens, q.shape[1], x_key.shape[1], q.device)
            mixed = F.scaled_dot_product_attention(
                q[:, None], keys[:, None], values[:, None], mask
            )[:, 0]  # fmt: skip
        if self.training and self.dropout:
            mixed = F.dropout(mixed, self.dropout)
        return mixed

    @staticmethod
    def _mask(context, tokens: Tokens, num_new: int, total: int, device) -> Tensor | None:
        """Bool [T, 2S] or [B, 1, T, 2S]: the same positions of x and of F; None sees all."""
        visible = context.visible
        if visible is None:
            if not tokens.causal or (num_new == 1 and tokens.past):
                return None
            ones = torch.ones(num_new, total, dtype=torch.bool, device=device)
            visible = ones.tril(tokens.past)
        return torch.cat((visible, visible), dim=-1)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, rank={self.rank}"
