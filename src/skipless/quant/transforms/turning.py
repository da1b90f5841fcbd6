"""Layers between rotations: their weights as a function of the rotations (Q5).

    y = W x = (W R)(R^T x)        readers of a tensor turn their input channels, its writer the
                                  output channels, and a norm between them has its gain moved on

Read by the method `rotation`, which learns R through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import counted
from skipless.quant.calibrate import run_batch
from skipless.quant.fake import fake_quantize
from skipless.quant.replacing import moved
from skipless.quant.transforms.changes import InputChange
from skipless.quant.transforms.orthogonal import Orthogonal, turn_columns
from skipless.quant.transforms.session import Session, wide
from skipless.quant.transforms.streams import Stream, leave
from skipless.sites import bias_of, weight_of


@dataclass(kw_only=True)
class TurnedLayer:
    """A linear layer between rotations; which of its inputs and outputs they turn."""

    name: str
    gain: Tensor | None = None
    reads: tuple[int, Tensor] | None = None
    """(which of the plan's turns, for each block of input channels which of its matrices)."""
    writes: tuple[int, Tensor, slice] | None = None
    """The same of the output channels in a slice."""
    matrix: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """[out, in] before rotating, with the gain of the norm in front."""
    bias: Tensor | None = None

    def turned(self, turns: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """(weight [out, in], bias) under `turns`, on their device and in their dtype."""
        matrix, bias = self.matrix.to(turns[0]), self.bias
        if self.reads is not None:
            turn, which = self.reads
            matrix = turn_columns(matrix, turns[turn], which)
        if self.writes is not None:
            turn, which, part = self.writes
            rows = [matrix[: part.start], matrix[part], matrix[part.stop :]]
            rows[1] = turn_columns(rows[1].T, turns[turn], which).T
            matrix = torch.cat(rows)
            if bias is not None:
                parts = bias.to(matrix)
                turned = turn_columns(parts[None, part], turns[turn], which)[0]
                bias = torch.cat([parts[: part.start], turned, parts[part.stop :]])
        return matrix, bias


@dataclass(kw_only=True)
class Plan:
    """What is rotated by what."""

    turns: list[Orthogonal]
    layers: list[TurnedLayer]
    stream: Stream | None
    norms: dict[str, Tensor]
    """Names of the weights of the stream's norms, and what makes their gains 1."""
    heads: int

    def describe(self) -> str:
        stream = "no stream" if self.stream is None else "the stream"
        return f"{counted(self.heads, 'value')} and {stream} learned"

    def read(self, session: Session) -> None:
        """Take the weights as they are now."""
        for layer in self.layers:
            layer.matrix = session.matrix(layer.name)
            if layer.gain is not None:
                layer.matrix = layer.matrix * layer.gain
            bias = bias_of(session.model.get_submodule(layer.name))
            layer.bias = None if bias is None or layer.writes is None else wide(bias)

    def values(
        self, session: Session, turns: list[Tensor], *, rounded: bool = False
    ) -> dict[str, Tensor]:
        """Parameters of the plan's layers and norms by name, as the model holds them, computed in
        the dtype of `turns`; `rounded` to the grids of the session's targets."""
        model, found = session.model, dict(self.norms)
        for layer in self.layers:
            matrix, bias = layer.turned(turns)
            module = model.get_submodule(layer.name)
            matrix = matrix.to(weight_of(module))
            if rounded and (target := session.targets.get(layer.name)) is not None:
                scheme = target.scheme
                matrix = fake_quantize(
                    matrix, scheme.weight_bits, granularity=scheme.weight_granularity,
                    symmetric=scheme.symmetric, clip=scheme.clip,
                )  # fmt: skip
            found[f"{layer.name}.weight"] = matrix if isinstance(module, nn.Linear) else matrix.T
            if bias is not None:
                found[f"{layer.name}.bias"] = bias
        return {name: value.to(model.get_parameter(name)) for name, value in found.items()}

    @torch.no_grad()
    def put(self, session: Session) -> None:
        """The rotations into the weights, for good (until `restore`)."""
        model, turns = session.model, [turn.matrix() for turn in self.turns]
        for name, value in self.values(session, turns).items():
            session.changes.set(model.get_parameter(name), value)
        if self.stream is not None:
            turn = turns[-1][0].to(next(model.parameters()).dtype)
            session.change_input(self.stream.blocks[0], Dense(turn))
            session.handles.append(leave(model, self.stream, Dense(turn.T.contiguous())))
            session.forget()


def run_with(model: nn.Module, values: dict[str, Tensor], batch: Any) -> Any:
    """The model's result on a batch with other tensors in the place of some parameters."""
    inside = {f"model.{name}": value for name, value in values.items()}
    return torch.func.functional_call(_Runner(model), inside, (batch,))


class _Runner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return run_batch(self.model, batch)


class Dense:
    """x -> x R."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __call__(self, x: Tensor) -> Tensor:
        if self.matrix.device != x.device:
            self.matrix = moved(self.matrix.to(x.dtype), x)  # MPS has no float64
        return x @ self.matrix.to(x.dtype)


@contextmanager
def turning(model: nn.Module, stream: Stream | None, turn: Tensor) -> Iterator[None]:
    """x R into the first block and R^T out of the last one, for a while."""
    if stream is None:
        yield
        return
    first = model.get_submodule(stream.blocks[0])
    enter = InputChange()
    enter.steps.append(Dense(turn[0]))
    handles = [
        first.register_forward_pre_hook(enter.hook, prepend=True, with_kwargs=True),
        leave(model, stream, Dense(turn[0].T)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
