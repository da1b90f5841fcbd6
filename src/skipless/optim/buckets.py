"""Blocks of one shape from many parameters, stacked, with their state as views of the stacks.

State belongs to parameters (`optimizer.state[p]`), whatever bucket a parameter is in: a bucket
stacks it for batched products and puts views back, so a state_dict does not depend on bucketing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.optim.blocks import Layout
from skipless.optim.packed import PackedSide
from skipless.optim.sides import (
    DiagonalSide,
    FullSide,
    IdentitySide,
    LowRankSide,
    RootSide,
)

# Parameters join one chunk on a CPU while its gradient is below this: small matrices share
# products, large ones (which gain nothing) stay in the cache. 128 KiB to 1 MiB measured alike.
CHUNK_BYTES = 2**18


@dataclass(frozen=True, kw_only=True)
class SideChoice:
    """Which form a side of a given length takes."""

    root: str | None = None
    """None: eigenbasis; "eigh" or "newton": inverse roots by that method."""
    basis: str = "qr"
    """How eigenbases are refreshed: "qr", "jacobi" or "eigh" (which the engine asks for)."""
    max_side: int = 4096
    wide: str = "diagonal"
    rank: int = 64
    one_sided: bool = False
    rotation_only: bool = False
    """Sides serve as a basis only (SOAP): a side without eigenvectors is the identity."""
    packed: bool = False
    """Factors of eigenbases as packed triangles."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.max_side < 1:
            raise UserError(f"rank {self.rank} and max_side {self.max_side} must be at least 1")

    def sides(self, bm: int, bn: int) -> tuple[IdentitySide, IdentitySide]:
        """Left and right side of blocks bm x bn."""
        made = []
        for name, dim, other in (("left", bm, bn), ("right", bn, bm)):
            # Of two equal sides the right one (inputs) stays when only one is wanted.
            longer = dim > other or (dim == other and name == "left")
            if self.one_sided and longer:
                made.append(IdentitySide(name, dim))
            elif dim <= self.max_side:
                made.append(self._whole(name, dim))
            elif self.rotation_only or self.wide == "identity":
                made.append(IdentitySide(name, dim))
            elif self.wide == "low_rank":
                made.append(LowRankSide(name, dim, self.rank))
            else:
                made.append(DiagonalSide(name, dim))
        return made[0], made[1]

    def _whole(self, name: str, dim: int) -> IdentitySide:
        if self.root:
            return RootSide(name, dim, self.root)
        kind = PackedSide if self.packed else FullSide
        return kind(name, dim, self.basis)


def state_shapes(
    sides: Iterable[IdentitySide], block_shape: tuple[int, int], *, second: bool
) -> tuple[dict[str, tuple[int, ...]], str]:
    """State tensors of one block by name, and which of them averages gradients."""
    left, right = sides
    shapes: dict[str, tuple[int, ...]] = {**left.shapes(), **right.shapes()}
    framed = second or left.has_frame or right.has_frame
    average = "momentum" if framed else "average"
    shapes[average] = block_shape
    if second:
        shapes["second"] = block_shape
    return shapes, average


@dataclass
class Bucket:
    """Stacked blocks. `buffers` hold the state, [K, ...] each."""

    left: IdentitySide
    right: IdentitySide
    params: list[Tensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First block of each parameter; one more entry ends the last."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    average: str = "momentum"
    """The buffer of averaged gradients: "momentum" (raw) or "average" (whitened ones)."""

    @property
    def device(self) -> torch.device:
        return self.buffers[self.average].device

    @property
    def sides(self) -> tuple[IdentitySide, IdentitySide]:
        return self.left, self.right

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layouts[0].block_shape

    def slice(self, first: int, last: int) -> dict[str, Tensor]:
        """The state of parameters first..last-1, as views."""
        i, j = self.starts[first], self.starts[last]
        return {what: buffer[i:j] for what, buffer in self.buffers.items()}

    def allocate(
        self,
        state: dict[Tensor, dict[str, Any]],
        device: torch.device,
        *,
        second: bool,
        momentum_dtype: torch.dtype,
    ) -> None:
        """Stack the members' state; every state tensor becomes a view of its stack."""
        self.starts = [0]
        for layout in self.layouts:
            self.starts.append(self.starts[-1] + layout.num_blocks)
        shapes, self.average = state_shapes(self.sides, self.block_shape, second=second)
        for p in self.params:
            state[p].setdefault("step", torch.zeros((), dtype=torch.float32))
        for what, shape in shapes.items():
            dtype = momentum_dtype if what == self.average else torch.float32
            stacked = torch.zeros(self.starts[-1], *shape, dtype=dtype, device=device)
            if what.endswith("_basis"):
                stacked.diagonal(dim1=-2, dim2=-1).fill_(1)
            for i, p in enumerate(self.params):
                piece = stacked[self.starts[i] : self.starts[i + 1]]
                old = state[p].get(what)
                if old is not None:
                    piece.copy_(old)
                state[p][what] = piece
            self.buffers[what] = stacked

    def chunks(self, ready: Iterable[Tensor]) -> list[tuple[int, int]]:
        """Runs of neighbouring parameters that are in `ready`, small enough for the cache."""
        ready = set(ready)
        bm, bn = self.block_shape
        on_cpu = self.device.type == "cpu"
        limit = max(1, CHUNK_BYTES // (4 * bm * bn)) if on_cpu else math.inf
        runs: list[tuple[int, int]] = []
        for k, p in enumerate(self.params):
            if p not in ready:
                continue
            first = runs[-1][0] if runs and runs[-1][1] == k else k
            if first < k and self.starts[k + 1] - self.starts[first] <= limit:
                runs[-1] = (first, k + 1)
            else:
                runs.append((k, k + 1))
        return runs

    def due(self, ready: Iterable[Tensor], steps: dict[Tensor, int], every: int):
        """Blocks whose turn it is to be refreshed: (block, parameter's step) pairs.

        Block k of the bucket has phase k mod `every`, so each step refreshes its share.
        """
        ready = set(ready)
        for k, p in enumerate(self.params):
            if p in ready:
                first, last, t = self.starts[k], self.starts[k + 1], steps[p]
                for block in range(first + (-t - first) % every, last, every):
                    yield block, t


def true_counts(layouts: list[Layout], like: Tensor) -> tuple[Any, Any]:
    """True rows and columns: plain numbers where nothing is padded, else [K, 1]."""
    if not any(lay.padded for lay in layouts):
        return layouts[0].bm, layouts[0].bn
    rows = torch.tensor([r for lay in layouts for r in lay.rows], device=like.device)
    cols = torch.tensor([c for lay in layouts for c in lay.cols], device=like.device)
    return rows.unsqueeze(-1), cols.unsqueeze(-1)


def per_block(values: list[float], layouts: list[Layout], like: Tensor) -> Any:
    """One number a parameter to a number, or to [K, 1, 1] where they differ."""
    if len(set(values)) == 1:
        return values[0]
    spread = [v for v, lay in zip(values, layouts, strict=True) for _ in range(lay.num_blocks)]
    return torch.tensor(spread, device=like.device, dtype=torch.float32).view(-1, 1, 1)
