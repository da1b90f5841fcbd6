"""One Hadamard rotation of the whole residual stream, in the weights, for pre-RMSNorm models (Q5).

RMSNorm without its gain commutes with an orthogonal R: norm(x R) = norm(x) R. So every layer that
reads the stream through a norm takes W R, every layer that writes into it R^T W, and the model
computes the same on a stream x R, in which no channel stands out. Unlike `hadamard` this also
reaches the tensors between the blocks (scope block), where residual models keep their giants.

1. gains of the norms inside the blocks go into the layers that read them
2. readers: W R.  Writers (the last linear layer before the next norm): R^T W, and their biases
3. x R where the stream enters the first block, x R^T where it leaves the last one. Embedding, head
   and final norm stay as they are, tied or not; the price is two rotations a pass
4. the outputs are compared with those before; if they differ, the model has something else on its
   stream (a LayerNorm, gains per channel) and the method refuses

Source: R1 of SpinQuant, arXiv 2405.16406, and QuaRot, arXiv 2404.00456, which rotate embedding and
head instead and untie them; both know Llama by name, here readers and writers are traced. A model
without skips has no shared stream; if it is built of RMSNorm and linear layers the same algebra
holds and the method works on it too. Read by `by_name.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from skipless.errors import UserError
from skipless.jsonable import Config
from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.replacing import replace_first
from skipless.quant.rotation import Rotate
from skipless.quant.sources import all_outputs, nearly_equal
from skipless.quant.tracing import Group, is_norm, read_groups
from skipless.quant.transforms import Session, gain_offset
from skipless.sites import bias_of, block_names, linear_widths, weight_of


@dataclass(frozen=True, kw_only=True)
class StreamRotation(Config):
    """Rotate the residual stream; pre-RMSNorm models only."""

    name: ClassVar[str] = "stream"
    stage: ClassVar[int] = 0

    def __str__(self) -> str:
        return self.name

    def prepare(self, session: Session) -> None:
        """Rotate; raises UserError for a model that is not built for it."""
        model, batch = session.model, session.small()
        blocks = block_names(model)
        if len({name.rpartition(".")[0] for name in blocks}) != 1:
            raise UserError(
                f"{type(model).__name__} has {'no' if not blocks else 'more than one'} list of "
                "blocks, and the method stream rotates one stream; use hadamard"
            )
        with evaluation_mode(model):
            before = all_outputs(run_batch(model, batch))
        groups = [g for g in read_groups(model, batch) if g.block is not None]
        readers = [g for g in groups if g.direct and is_norm(model.get_submodule(g.direct))]
        if not readers:
            raise UserError(
                f"no linear layer of {type(model).__name__} reads a norm, and the method stream "
                "needs one in front of every sublayer; use hadamard"
            )
        width = readers[0].width
        rotate, back = Rotate(width), Rotate(width, inverse=True)
        for group in readers:
            self._read(session, group, rotate)
        for name in _writers(model, groups, readers, width):
            session.set_matrix(name, rotate(session.matrix(name).T).T)
            bias = bias_of(model.get_submodule(name))
            if bias is not None:
                session.changes.set(bias, rotate(bias.detach().float()))  # type: ignore[arg-type]
        session.change_input(blocks[0], rotate)
        last = model.get_submodule(blocks[-1])
        session.handles.append(last.register_forward_hook(_Leave(back)))
        with evaluation_mode(model):
            after = all_outputs(run_batch(model, batch))
        if not nearly_equal(before, after):
            raise UserError(
                f"rotating the stream changes what {type(model).__name__} computes: something "
                "besides RMSNorm and linear layers is on it; use hadamard, which rotates layer by "
                "layer"
            )
        session.forget()
        session.notes.append(f"stream: rotated in {len(blocks)} blocks, {len(readers)} norms freed")

    def _read(self, session: Session, group: Group, rotate: Rotate) -> None:
        assert group.direct is not None
        norm = session.model.get_submodule(group.direct)
        offset = gain_offset(norm)
        if (
            group.fixed
            or offset is None
            or group.width != rotate.width
            or bias_of(norm) is not None
        ):
            raise UserError(
                f"{group.direct} is no RMSNorm with a plain gain, or its readers are shared; the "
                "method stream rotates pre-RMSNorm models, hadamard any other"
            )
        gain = weight_of(norm).detach().float() + offset
        for name in group.names:
            session.set_matrix(name, rotate(session.matrix(name) * gain))
        session.changes.set(norm.weight, torch.full_like(gain, 1 - offset))  # type: ignore[arg-type]


class _Leave:
    """Hook of the last block."""

    def __init__(self, back: Rotate) -> None:
        self.back = back

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
