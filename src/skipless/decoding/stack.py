"""All blocks of one new token in one C++ call, where every connection is an elementwise sum.

The first block runs the whole stack and tells the model so through the context. Connections C1-C7
and C9 are y = a x + b f + c x0 with numbers or vectors that are read from their parameters. Read by
`blocks.py`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, cast

from torch import Tensor, nn

from skipless.decoding.state import BlockState, mark, one_token, sum_of_hooks
from skipless.model import connections as kinds
from skipless.model.cache import KeyValueCache
from skipless.model.connections import Connection
from skipless.model.context import ForwardContext
from skipless.quant.integers.stacked import StackStep

Weight = float | Tensor


def weights_of(connection: Connection) -> tuple[Weight, Weight, Weight] | None:
    """(a, b, c) of y = a x + b f + c x0 (C0); None for a connection that is not of this form."""
    kind = type(connection)
    if kind is kinds.Residual:
        return 1.0, 1.0, 0.0
    if kind is kinds.NoConnection:
        return 0.0, 1.0, 0.0
    if kind is kinds.Fixed:
        return connection.config.a, connection.config.b, connection.config.c
    if kind in (kinds.ReZero, kinds.LayerScale, kinds.Interpolate, kinds.Anneal, kinds.Learned):
        gains = connection.gains()
        return gains.get("a", 1.0), gains.get("b", 1.0), 0.0
    return None


class Stack:
    """The blocks of one model as one call; built again when a gain or a norm changes."""

    def __init__(self, states: list[BlockState]) -> None:
        self.states = states
        self._turn = threading.Lock()
        self.prepare()

    def prepare(self) -> None:
        """What depends on the blocks alone; not yet whole while they are being copied."""
        states = self.states
        for state in states:
            if not state.is_ready:
                state.prepare()
        self.step: StackStep | None = None
        self._cache: weakref.ref[KeyValueCache] | None = None
        self._arrangement, self._next, self._capacity = (0, 0), 0, 0
        parts: list[nn.Module] = []
        for state in states:
            block = state.block
            parts += [block]
            for part in (block.attention_connection, block.mlp_connection):
                parts += [] if part is None else list(part.modules())
            if block.placement == "post":
                parts += [block.post_attention_layernorm, block.post_feedforward_layernorm]
        # The first block runs by itself, hooks and all; the others are asked for hooks here.
        own = [h for m in parts[1:] for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks = own + [hooks for state in states for hooks in state.hooks]
        self._num_hooks = sum_of_hooks(self._hooks)
        self._gains: list[tuple[dict[str, Any], str, Any]] = []
        self.is_ready = True

    def __deepcopy__(self, memo: dict) -> Stack:
        import copy

        twin = Stack.__new__(Stack)
        memo[id(self)] = twin
        twin.is_ready = False
        twin._turn = threading.Lock()
        twin.states = copy.deepcopy(self.states, memo)
        return twin

    @staticmethod
    def covers(states: list[BlockState]) -> bool:
        """Whether every connection is of the form, and no block drops anything."""
        return all(
            connection is None or weights_of(connection) is not None
            for state in states
            for connection in (state.block.attention_connection, state.block.mlp_connection)
        )

    def take(self, state: BlockState, stream: Tensor, context: ForwardContext) -> Tensor | None:
        """The stream behind the last block, if this pass is computed so; None if it is not."""
        if state is not self.states[0] or state.block.training:
            return None
        if not one_token(stream, context, state.record):
            return None
        with self._turn:  # the step holds the addresses of one cache, and threads have their own
            return self._run(stream, context)

    def _run(self, stream: Tensor, context: ForwardContext) -> Tensor | None:
        if not self.is_ready:
            self.prepare()
        if sum_of_hooks(self._hooks) != self._num_hooks:
            return None
        cache = cast(KeyValueCache, context.cache)
        if self.step is None or self._changed():
            self._build()
        assert self.step is not None, "just built"
        if not self._knows(cache, len(stream)):
            if not all(s.layer is None or s.holds(cache) for s in self.states):
                return None
            self._look_up(cache, len(stream))
        unseen = self.states[0].record.state.unseen
        for state in self.states if unseen else ():
            unseen -= state.names
        context.is_finished = True
        self._next = cache.length + 1
        return self.step.run(stream, context.embedding, context.rotary, cache.length)

    def _knows(self, cache: KeyValueCache, rows: int) -> bool:
        """Whether the addresses of the last step are those of the next token.

        They are if nothing came in between: a longer text would have grown past this length, and
        what rearranges rows counts.
        """
        known = self._cache() if self._cache is not None else None
        return (
            known is cache
            and self._arrangement == (cache.arrangement, rows)
            and self._next == cache.length
            and cache.length < self._capacity
        )

    def _look_up(self, cache: KeyValueCache, rows: int) -> None:
        """Tell the step where keys and values are; UserError for another number of rows."""
        assert self.step is not None, "built before"
        pairs = [state.stores(cache, rows) for state in self.states if state.layer is not None]
        for place, pair in enumerate(pairs):
            self.step.keep(place, pair)
        self._cache, self._arrangement = weakref.ref(cache), (cache.arrangement, rows)
        self._capacity = min((s.capacity for pair in pairs for s in pair), default=1 << 62)

    def _changed(self) -> bool:
        moved = any(mark(own[name]) != known for own, name, known in self._gains)
        return moved or any(state.changed() for state in self.states)

    def _build(self) -> None:
        make = StackStep()
        self._gains = []
        for state in self.states:
            block = state.block
            attention, mlp = state.steps()
            post = block.placement == "post"
            for step, connection, norm in (
                (attention, block.attention_connection, block.post_attention_layernorm),
                (mlp, block.mlp_connection, block.post_feedforward_layernorm if post else None),
            ):
                after = state.norm_of(norm if post else None)
                if connection is None:
                    if post:
                        make.add(None, (0.0, 1.0, 0.0), after, block_width(state))
                    continue
                weights = weights_of(connection)
                assert weights is not None, "`covers` has looked"
                make.add(step, weights, after, connection.hidden_size)
                for own in (connection._parameters, connection._buffers):
                    self._gains += [(own, name, mark(own[name])) for name in own]
        make.finish()
        self.step, self._cache = make, None


def block_width(state: BlockState) -> int:
    """D, from a norm of the block."""
    norm = cast(Any, state.block.post_feedforward_layernorm)
    return norm.weight.numel()
