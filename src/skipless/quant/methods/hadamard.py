"""Hadamard rotation of every tensor that linear layers read, layer by layer (Q5).

    y = W x = (W R)(R^T x)        R orthogonal, entries of +-1 / sqrt(n)

R mixes all channels, so that an outlier channel is spread over all of them and the values look
Gaussian, which is what a uniform grid likes best (S11). Works without a residual stream, since
nothing is shared between layers.

1. V under O: heads mix tokens, not channels, so the rotation of each head's channels passes through
   attention. Where `sources.rotates_in_blocks` finds that it does, R goes into the weights of V and
   O and costs nothing when the model runs.
2. everything else: x R is computed when the model runs, W R beforehand. Widths 2^k times 1, 12, 20,
   28 or 36 have a Hadamard matrix here and take about n (P + m) multiplications; others are rotated
   in blocks (`transforms.rotation`).

Sources: arXiv 2404.00456 (QuaRot's online rotations), 2307.13304. QuaRot keeps most rotations in
the residual stream, for free; that is the method `stream`, which composes with this one (what it
rotated is then rotated once more, to no harm). Read by `by_name.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from skipless.errors import counted
from skipless.jsonable import Config
from skipless.quant.transforms.rotation import Rotate, rotation
from skipless.quant.transforms.session import Session, wide
from skipless.quant.transforms.sources import Source
from skipless.quant.transforms.tracing import Group
from skipless.sites import bias_of


@dataclass(frozen=True, kw_only=True)
class Hadamard(Config):
    """Rotate the input of every linear layer by a Hadamard matrix."""

    name: ClassVar[str] = "hadamard"
    stage: ClassVar[int] = 2

    def __str__(self) -> str:
        return self.name

    def prepare(self, session: Session) -> None:
        """Rotate every group of the session."""
        fused = 0
        for group in session.changeable:
            found = session.value_head(group)
            if found is not None:
                _fuse(session, group, *found)
                fused += 1
                continue
            rotate_online(session, group)
        rest = len(session.changeable) - fused
        session.notes.append(
            f"hadamard: {counted(fused, 'tensor')} rotated for free, {rest} when the model runs"
        )


def rotate_online(session: Session, group: Group) -> None:
    """x R when the model runs, W R beforehand."""
    rotate = Rotate(group.width)
    session.change_inputs(group, rotate)
    for name in session.members(group):
        session.set_matrix(name, rotate(session.matrix(name)))


def _fuse(session: Session, group: Group, source: Source, size: int) -> None:
    """Rotate the source's output and the readers' input in blocks of `size` channels."""
    turn = rotation(size)
    first, width = int(source.channels.min()), int(source.channels.unique().numel())
    part = slice(first, first + width)
    matrix = session.matrix(source.name).clone()
    turn = turn.to(matrix)
    matrix[part] = (matrix[part].T.unflatten(-1, (-1, size)) @ turn).flatten(-2).T
    session.set_matrix(source.name, matrix)
    bias = bias_of(session.model.get_submodule(source.name))
    if bias is not None:
        turned = wide(bias).clone()
        turned[part] = (turned[part].unflatten(-1, (-1, size)) @ turn).flatten(-2)
        session.changes.set(bias, turned)  # type: ignore[arg-type]
    for name in session.members(group):
        matrix = session.matrix(name)
        session.set_matrix(name, (matrix.unflatten(-1, (-1, size)) @ turn).flatten(-2))
