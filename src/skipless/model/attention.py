"""Self-attention: fused with an eager reference, grouped queries, RoPE, temperature T1, identity
bias I7, key/value cache and padding.

"sdpa" takes the fastest of three equal forms: blocks of queries (short causal texts on the CPU,
`blocked.py`), the fused kernel with the diagonal corrected (identity bias, `diagonal.py`), or
torch's `scaled_dot_product_attention` with whatever mask is needed.

`query`, `key`, `value` and (eager only) `probabilities` are identity modules: they show hooks the
tensors after RoPE. Legend: B batch, T new tokens, S past plus new tokens, H heads, G key/value
heads, K head size, D width. Read by `block.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.model import blocked, diagonal
from skipless.model.attention_entropy import attention_entropy
from skipless.model.blocked import blocked_attention
from skipless.model.context import ForwardContext
from skipless.model.diagonal import diagonal_attention
from skipless.model.rope import rotate
from skipless.model.temperature import AttentionTemperature


class Attention(nn.Module):
    """o_proj(softmax(scaling * Q K^T + mask + diag(identity_bias)) V); [B, T, D] to [B, T, D]."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.key_value_heads
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.implementation: str = config.attention_implementation
        width, inner = config.hidden_size, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.temperature = AttentionTemperature(config, layer)
        self.identity_bias = (
            None
            if config.init.identity_bias is None
            else nn.Parameter(torch.empty(config.num_attention_heads))
        )
        self.query, self.key, self.value = nn.Identity(), nn.Identity(), nn.Identity()
        self.probabilities = nn.Identity()
        self.measures_entropy = False

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim)
        if context.rotary is not None:
            q, k = rotate(q, *context.rotary), rotate(k, *context.rotary)
        q = self.query(q.transpose(1, 2))
        k, v = self.key(k.transpose(1, 2)), self.value(v.transpose(1, 2))
        factor = self.temperature.query_factor(context.num_visible, q.dtype)
        if factor is not None:
            q = q * factor
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)
        if self.measures_entropy:
            context.entropy = attention_entropy(
                q, k, scale=self.temperature.scaling, visible=context.visible,
                causal=context.is_causal, bias=self.identity_bias,
            )  # fmt: skip
        ways = {"eager": self._eager, "sdpa": self._fused}
        out = ways.get(self.implementation, self._outside)(q, k, v, context)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        scale, mask, bias = self.temperature.scaling, context.visible, self.identity_bias
        dropout = self.dropout if self.training else 0.0
        causal = context.is_causal and mask is None
        if mask is None and q.shape[2] == k.shape[2] and not dropout:
            if causal and blocked.suits(q):
                return blocked_attention(q, self._repeated(k), self._repeated(v), bias, scale=scale)
            if bias is not None and diagonal.suits(q):
                return diagonal_attention(
                    q, self._repeated(k), self._repeated(v), bias, causal=causal, scale=scale
                )
        if bias is not None:
            mask, causal = self._biased_mask(bias, q, k, context), False
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=causal, scale=scale,
            enable_gqa=self.num_heads != self.num_key_value_heads,
        )  # fmt: skip

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        scores = q @ self._repeated(k).transpose(-2, -1) * self.temperature.scaling
        if self.identity_bias is not None:
            scores = scores + self._biased_mask(self.identity_bias, q, k, context)
        elif context.visible is not None:
            scores = scores.masked_fill(~context.visible, -torch.inf)
        elif context.is_causal:
            scores = scores.masked_fill(~causal_visibility(q, k), -torch.inf)
        probabilities = torch.softmax(scores, dim=-1, dtype=_at_least_float32(scores)).to(q.dtype)
        probabilities = self.probabilities(probabilities)
        if self.training and self.dropout:
            probabilities = F.dropout(probabilities, self.dropout)
        return probabilities @ self._repeated(v)

    def _outside(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        assert context.outside is not None, f"nobody computes {self.implementation!r} attention"
        return context.outside(self, q, k, v)

    def _biased_mask(self, bias: Tensor, q: Tensor, k: Tensor, context: ForwardContext) -> Tensor:
        """The identity bias on the diagonal and -inf on hidden keys, [1 or B, H, T, S]."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        own = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        own = own.tril(num_keys - num_queries).triu(num_keys - num_queries)
        mask = own * bias.to(q.dtype)[None, :, None, None]
        visible = context.visible
        if visible is None and context.is_causal:
            visible = causal_visibility(q, k)
        return mask if visible is None else mask.masked_fill(~visible, -torch.inf)

    def _repeated(self, x: Tensor) -> Tensor:
        """Keys or values [B, G, S, K] once per query head [B, H, S, K]."""
        copies = self.num_heads // self.num_key_value_heads
        return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def causal_visibility(q: Tensor, k: Tensor) -> Tensor:
    """Bool [T, S], True where key position <= query position; queries are the last T keys."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
    return ones.tril(num_keys - num_queries)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
