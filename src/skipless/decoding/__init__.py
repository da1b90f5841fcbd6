"""Faster decoding of our models on integers: few C++ calls a token, not hundreds of operations.

    quantize(model, "W8A8-KV8")
    fuse(to_integer(model))
    model.generate(ids, 100)

One new token at a time, what takes longest at batch 1 is starting operations. `fuse` lets the model
compute all blocks in one call where their connections are elementwise sums (C1-C7, C9; `stack.py`),
else each attention and MLP in one (`state.py`, `blocks.py`), and the float32 head in one that asks
memory early. Whatever is not one new token behind a cache on the CPU goes the usual way, as does a
block in which a hook was set (a probe). Integers are the same; norms, softmax, activation and head
agree to float32 rounding. `unfuse`, `from_integer` and `restore` undo it.
"""

from __future__ import annotations

import torch
from torch import nn

from skipless.compiled import forget_compiled, lasting
from skipless.decoding.blocks import STATE, FusedBlock
from skipless.decoding.head import FusedHead
from skipless.decoding.stack import Stack
from skipless.decoding.state import BlockState
from skipless.errors import UserError
from skipless.model import Block, Transformer
from skipless.quant import quantization
from skipless.quant.integers.fused import engine_of_steps

__all__ = ["fuse", "unfuse"]


@lasting
def fuse(model: Transformer) -> Transformer:
    """Decode with few C++ calls a token, in place; returns the model.

    Raises UserError, leaving the model as it was, for other models than our decoder, for one that
    does not run on integers by a C++ engine, one quantised beyond the inputs of linear layers, keys
    and values, and for parts no such call covers.
    """
    record = quantization(model)
    if not isinstance(model, Transformer):
        raise UserError(
            f"{type(model).__name__} is not skipless.model.Transformer, the only model with a "
            "fused step; leave fuse out: after quantize and to_integer others run on integers as "
            "they are"
        )
    if record is None:
        raise UserError(
            "the model does not run on integers; quantize it, then to_integer, then fuse"
        )
    beyond = {s.site.kind for s in record.activations} - {"linear_input", "key", "value"}
    if beyond:
        raise UserError(
            f"{record.scheme} in scope {record.scope} also rounds {', '.join(sorted(beyond))}, "
            "which a fused step does not; use scope 'linear'"
        )
    if record.inputs:
        raise UserError(
            f"the method {record.method} changes the inputs of {next(iter(record.inputs))} and "
            "others when the model runs, which a fused step does not; use rtn or gptq"
        )
    if any(isinstance(handle, _Handle) for handle in record.handles):
        raise UserError("the model is fused already")
    engine = engine_of_steps(model)
    states = [BlockState(block, record, engine) for block in model.blocks]
    for index, state in enumerate(states):
        try:
            state.build()
        except UserError as error:
            raise UserError(f"layer {index}: {error}") from None
    stack = Stack(states) if Stack.covers(states) else None
    for block, state in zip(model.blocks, states, strict=True):
        state.stack = stack
        setattr(block, STATE, state)
        block.__class__ = FusedBlock
    head = getattr(model, "lm_head", None)
    if type(head) is nn.Linear and head.weight.dtype == torch.float32:
        head.__class__ = FusedHead
    record.handles.append(_Handle(model))
    return model


def unfuse(model: Transformer) -> None:
    """Undo `fuse`; nothing happens if it was not called."""
    record = quantization(model)
    for handle in [h for h in record.handles if isinstance(h, _Handle)] if record else []:
        handle.remove()
        record.handles.remove(handle)  # pyright: ignore[reportOptionalMemberAccess]
    forget_compiled()


class _Handle:
    """Among the handles of `quantize`; goes with integer execution."""

    needs_integer = True

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def remove(self) -> None:
        for block in self.model.blocks:
            block.__class__ = Block
            delattr(block, STATE)
        head = getattr(self.model, "lm_head", None)
        if type(head) is FusedHead:
            head.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
