"""Blocks that compute attention and MLP of one new token in one C++ call each.

Connections and the norms after a sublayer stay modules; `stack.py` takes them in where it can.
Read by `skipless.decoding`.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from skipless.decoding.state import BlockState
from skipless.model import Block
from skipless.model.cache import KeyValueCache
from skipless.model.context import ForwardContext
from skipless.quant.integers.fused import run_attention, run_mlp

STATE = "_skipless_fused"


class FusedBlock(Block):
    """A block whose sublayers take one new token in one call each; made by `fuse`."""

    def forward(self, stream: Tensor, context: ForwardContext) -> Tensor:
        state: BlockState = getattr(self, STATE)
        if not state.is_ready:
            state.prepare()
        if state.stack is not None:
            done = state.stack.take(state, stream, context)
            if done is not None:
                return done
        if not state.fits(stream, context):
            return super().forward(stream, context)
        cache = cast(KeyValueCache, context.cache)
        attention, mlp = state.steps()
        post = self.placement == "post"
        if attention is not None and self.attention_connection is not None:
            stores = state.stores(cache, len(stream))
            branch = run_attention(
                attention, stream.contiguous(), context.rotary, stores, cache.length
            )
            stream = self.attention_connection(stream, branch, context)
        norm = self.post_attention_layernorm
        if post and norm is not None:
            stream = norm(stream)
        if mlp is not None and self.mlp_connection is not None:
            stream = self.mlp_connection(stream, run_mlp(mlp, stream.contiguous()), context)
        if post:
            stream = self.post_feedforward_layernorm(stream)
        return stream
