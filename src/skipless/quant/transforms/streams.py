"""Who reads and who writes the residual stream, found by tracing: pre-RMSNorm models (Q5).

Layers that read a norm read the stream; the last linear layer before the next of them writes into
it. Read by the methods `stream` and `rotation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import uncompiled
from skipless.errors import UserError
from skipless.quant.replacing import replace_first
from skipless.quant.transforms.session import gain_offset, wide
from skipless.quant.transforms.tracing import Group, is_norm, read_groups
from skipless.sites import bias_of, block_names, linear_widths, weight_of


@dataclass(kw_only=True)
class Stream:
    """Who reads and who writes the stream of a model."""

    blocks: list[str]
    readers: list[Group]
    """Each reads a norm, its `direct`."""
    writers: list[str]
    """Names of linear layers."""
    offsets: dict[str, float]
    """By norm what its gain adds to its weight (`transforms.gain_offset`)."""
    width: int

    def gain(self, model: nn.Module, group: Group) -> tuple[Tensor, Tensor]:
        """(gain of the norm that a group reads, the weight that makes it a gain of 1)."""
        offset = self.offsets[group.direct or ""]
        gain = wide(weight_of(model.get_submodule(group.direct or ""))) + offset
        return gain, torch.full_like(gain, 1 - offset)

    def refusal(self, model: nn.Module) -> str:
        """What to say where outputs are not the same afterwards."""
        return (
            f"rotating the stream changes what {type(model).__name__} computes: something "
            "besides RMSNorm and linear layers is on it; use hadamard, which rotates layer by "
            "layer"
        )


def find_stream(model: nn.Module, batch: Any) -> Stream:
    """Readers and writers of the stream, by tracing `batch`. UserError where there is none."""
    blocks = block_names(model)
    if len({name.rpartition(".")[0] for name in blocks}) != 1:
        raise UserError(
            f"{type(model).__name__} has {'no' if not blocks else 'more than one'} list of "
            "blocks, and the method stream rotates one stream; use hadamard"
        )
    groups = [g for g in read_groups(model, batch) if g.block is not None]
    readers = [g for g in groups if g.direct and is_norm(model.get_submodule(g.direct))]
    if not readers:
        raise UserError(
            f"no linear layer of {type(model).__name__} reads a norm, and the method stream "
            "needs one in front of every sublayer; use hadamard"
        )
    width, offsets = readers[0].width, {}
    for group in readers:
        assert group.direct is not None
        norm = model.get_submodule(group.direct)
        offset = gain_offset(norm)
        if group.fixed or offset is None or group.width != width or bias_of(norm) is not None:
            raise UserError(
                f"{group.direct} is no RMSNorm with a plain gain, or its readers are shared; the "
                "method stream rotates pre-RMSNorm models, hadamard any other"
            )
        offsets[group.direct] = offset
    writers = _writers(model, groups, readers, width)
    return Stream(blocks=blocks, readers=readers, writers=writers, offsets=offsets, width=width)


def leave(model: nn.Module, stream: Stream, back: Callable[[Tensor], Tensor]) -> Any:
    """Turn back what leaves the last block; the handle of the hook."""
    return model.get_submodule(stream.blocks[-1]).register_forward_hook(_Leave(back))


class _Leave:
    """Hook of the last block."""

    def __init__(self, back: Callable[[Tensor], Tensor]) -> None:
        self.back = back

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        replaced, found = replace_first(output, self.back)
        return replaced if found else None


def _writers(model: nn.Module, groups: list[Group], readers: list[Group], width: int) -> list[str]:
    """In each block the last linear layer before the next one that reads a norm."""
    starts = {group.names[0] for group in readers}
    found: dict[str, None] = {}
    last: str | None = None
    block: str | None = None
    for group in groups:
        if (group.names[0] in starts or group.block != block) and last is not None:
            found[last] = None
        block = group.block
        last = None if group.names[0] in starts else group.names[-1]
    if last is not None:
        found[last] = None
    return [name for name in found if linear_widths(model.get_submodule(name))[1] == width]
