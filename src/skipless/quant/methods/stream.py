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
from typing import ClassVar

from skipless.errors import UserError, counted
from skipless.jsonable import Config
from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.transforms.rotation import Rotate
from skipless.quant.transforms.session import Session, wide
from skipless.quant.transforms.sources import all_outputs, nearly_equal
from skipless.quant.transforms.streams import find_stream, leave
from skipless.sites import bias_of


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
        stream = find_stream(model, batch)
        with evaluation_mode(model):
            before = all_outputs(run_batch(model, batch))
        rotate, back = Rotate(stream.width), Rotate(stream.width, inverse=True)
        for group in stream.readers:
            gain, one = stream.gain(model, group)
            for name in group.names:
                session.set_matrix(name, rotate(session.matrix(name) * gain))
            norm = model.get_submodule(group.direct or "")
            session.changes.set(norm.weight, one)  # type: ignore[arg-type]
        for name in stream.writers:
            session.set_matrix(name, rotate(session.matrix(name).T).T)
            bias = bias_of(model.get_submodule(name))
            if bias is not None:
                session.changes.set(bias, rotate(wide(bias)))  # type: ignore[arg-type]
        session.change_input(stream.blocks[0], rotate)
        session.handles.append(leave(model, stream, back))
        with evaluation_mode(model):
            after = all_outputs(run_batch(model, batch))
        if not nearly_equal(before, after):
            raise UserError(stream.refusal(model))
        session.forget()
        session.notes.append(
            f"stream: rotated in {counted(len(stream.blocks), 'block')}, "
            f"{counted(len(stream.readers), 'norm')} freed"
        )
