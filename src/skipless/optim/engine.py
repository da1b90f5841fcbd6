"""One step of the whitening engine on a bucket of blocks. The essay is in whitening.py.

Legend: K blocks of m x n, g gradients [K, m, n], s the state of the blocks at hand by name, t steps
of a parameter, sink where updates go.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from skipless.optim.buckets import Bucket, per_block, true_counts
from skipless.optim.sharding import Sink
from skipless.optim.sides import FullSide, Index, RootSide

ORTHONORMALIZE_EVERY = 16  # refreshes; a float32 basis drifts by about 1e-7 a refresh


def rms_scale(u: Tensor, target: float | None, count: int | None = None) -> Any:
    """Factor that brings the root mean square of u over `count` entries to `target`."""
    if target is None:
        return 1.0
    return target / (u.square().sum() / (count or u.numel())).sqrt().clamp(min=1e-30)


def factor_power(bucket: Bucket, factors: str) -> float:
    """Of each factor: 1/2 in KL, 1/4 for raw factors, 1/2 if only one side has a factor."""
    both = all(side.kind != "identity" for side in bucket.sides)
    return 0.25 if factors == "raw" and both else 0.5


def step_bucket(
    bucket: Bucket,
    gradients: dict[Tensor, Tensor],
    state: dict[Tensor, dict[str, Any]],
    group: dict[str, Any],
    sink: Sink,
    *,
    factors: str,
    tail: str,
) -> dict[Tensor, int]:
    """Update every parameter of `gradients`; returns the steps each has taken (0: not started)."""
    steps: dict[Tensor, int] = {}
    for k, p in enumerate(bucket.params):
        if p in gradients:
            step: Tensor = state[p]["step"]
            # An all-zero first gradient says nothing about the scale: wait for another.
            waits = step == 0 and not _begin(bucket, k, gradients[p], factors)
            steps[p] = 0 if waits else int(step.add_(1))
    chunks = bucket.chunks(gradients)
    whole = _Whole(bucket, chunks, group, factors, tail)
    for first, last in chunks:
        members = range(first, last)
        blocks = [bucket.layouts[k].to_blocks(gradients[bucket.params[k]]) for k in members]
        g = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        times = [max(steps[bucket.params[k]], 1) for k in members]
        chunk = _Chunk(whole, first, last, g, times)
        if whole.in_frame:
            chunk.in_frame(tail, sink)
        else:
            chunk.with_roots(sink)
    return steps


def _begin(bucket: Bucket, k: int, gradient: Tensor, factors: str) -> bool:
    """First gradient of parameter k: factors proportional to the identity, whose product is its
    mean square block by block. False if it is all zero."""
    layout = bucket.layouts[k]
    g = layout.to_blocks(gradient)
    counts = torch.tensor(layout.rows) * torch.tensor(layout.cols)
    square = g.square().sum((-2, -1)) / counts.to(g)
    if not square.sum() > 0:
        return False
    # A block without any gradient yet starts at its matrix's scale.
    square = torch.where(square > 0, square, square.mean())
    both = all(side.kind != "identity" for side in bucket.sides)
    start = square.sqrt() if factors == "kl" and both else square
    for side in bucket.sides:
        side.begin(bucket.slice(k, k + 1), start, factor_power(bucket, factors))
    return True


class _Whole:
    """What the chunks of one step share: the roots of the OLD factors of all blocks, and scratch
    (three stacks of a chunk's blocks: fresh memory costs as much as what is written to it)."""

    def __init__(
        self, bucket: Bucket, chunks: list, group: dict[str, Any], factors: str, tail: str
    ) -> None:
        self.bucket, self.group, self.is_kl = bucket, group, factors == "kl"
        self.in_frame = tail == "adam" or any(side.has_frame for side in bucket.sides)
        power, eps = factor_power(bucket, factors), group["eps"]
        counts = true_counts(bucket.layouts, bucket.buffers[bucket.average])
        self.roots = [
            side.root(bucket.buffers, power, eps, count)
            for side, count in zip(bucket.sides, counts, strict=True)
        ]
        starts = bucket.starts
        largest = max((starts[last] - starts[first] for first, last in chunks), default=0)
        self.scratch = torch.empty(
            3, largest if self.in_frame else 0, *bucket.block_shape, device=bucket.device
        )


def _part(root: Any, where: slice) -> Any:
    """The roots of some blocks: tensors [K, ...], tuples of such, or None."""
    if isinstance(root, tuple):
        return tuple(part[where] for part in root)
    return None if root is None else root[where]


class _Chunk:
    """Some neighbouring parameters of a bucket during one step."""

    def __init__(self, whole: _Whole, first: int, last: int, g: Tensor, times: list[int]) -> None:
        bucket = whole.bucket
        self.left, self.right = bucket.sides
        self.params = bucket.params[first:last]
        self.layouts = bucket.layouts[first:last]
        base, end = bucket.starts[first], bucket.starts[last]
        self.where = [
            slice(bucket.starts[k] - base, bucket.starts[k + 1] - base) for k in range(first, last)
        ]
        self.s, self.g, self.times, self.group = bucket.slice(first, last), g, times, whole.group
        self.is_kl = whole.is_kl
        self.rows, self.cols = true_counts(self.layouts, g)
        self.root_l, self.root_r = (_part(root, slice(base, end)) for root in whole.roots)
        self.scratch = whole.scratch[:, : end - base]

    def bias(self, beta: float) -> Any:
        """1 / (1 - beta^t), by block."""
        return per_block([1 / (1 - beta**t) for t in self.times], self.layouts, self.g)

    def with_roots(self, sink: Sink) -> None:
        """Whiten the gradient, average, update; no frame."""
        b1 = self.group["betas"][0]
        a = self.right.whiten(self.g, self.root_r)
        average = self.s["average"]
        if isinstance(self.left, RootSide) and average.dtype == torch.float32:
            average.baddbmm_(self.root_l, a, beta=b1, alpha=1 - b1)
        else:
            wide = average.float().lerp_(self.left.whiten(a, self.root_l), 1 - b1)
            average.copy_(wide)
            average = wide
        bias = self.bias(b1)
        for k, (p, layout, where) in enumerate(
            zip(self.params, self.layouts, self.where, strict=True)
        ):
            scale = rms_scale(average[where], self.group["update_rms"], math.prod(layout.shape))
            if self.group["update_rms"] is None:
                scale = 1 / (1 - b1 ** self.times[k]) if isinstance(bias, Tensor) else bias
            sink.blocks(p, layout, average[where], scale)
        c_r = self.left.whiten(self.g, self.root_l) if self.is_kl else self.g
        self.accumulate(a if self.is_kl else self.g, c_r)

    def in_frame(self, tail: str, sink: Sink) -> None:
        """Rotate the gradient into the frame, average and scale there, rotate the update back."""
        s, group = self.s, self.group
        b1, b2 = group["betas"]
        one, two, three = self.scratch
        p = self.right.enter(self.left.enter(self.g, s, out=one), s, out=two)
        momentum = s["momentum"]
        if momentum.dtype == torch.float32:
            momentum.lerp_(p, 1 - b1)
        else:
            wide = momentum.float().lerp_(p, 1 - b1)
            momentum.copy_(wide)
            momentum = wide
        if tail == "adam":
            s["second"].mul_(b2).addcmul_(p, p, value=1 - b2)
            root = (s["second"] * self.bias(b2)).sqrt_().add_(group["eps"])
            u = torch.div(momentum, root, out=root).mul_(self.bias(b1))
        else:
            root_l, bias = self.root_l, self.bias(b1)
            if isinstance(root_l, Tensor):  # one number a row: the correction costs nothing in it
                u = self.left.whiten(momentum, root_l * bias, out=one)
            else:
                u = self.left.whiten(torch.mul(momentum, bias, out=one), root_l)
            u = self.right.whiten(u, self.root_r, out=one)
        if group["update_rms"] is not None:
            # Turning does not change the norm, so it is known before the frame is left.
            for layout, where in zip(self.layouts, self.where, strict=True):
                u[where] *= rms_scale(u[where], group["update_rms"], math.prod(layout.shape))
        half = self.left.leave(u, s, out=three)
        if self.right.has_frame and all(
            sink.fuses(p) and not lay.padded
            for p, lay in zip(self.params, self.layouts, strict=True)
        ):
            for q, layout, where in zip(self.params, self.layouts, self.where, strict=True):
                sink.product(q, layout, half[where], s["right_basis"][where].mT)
        else:
            whole = self.right.leave(half, s)
            for q, layout, where in zip(self.params, self.layouts, self.where, strict=True):
                sink.take(q, layout.from_blocks(whole[where]))
        if self.is_kl:
            c_l = self.right.whiten(p, self.root_r, out=one)
            self.accumulate(c_l, self.left.whiten(p, self.root_l, out=two))
        else:
            self.accumulate(p, p)

    def accumulate(self, c_l: Tensor, c_r: Tensor) -> None:
        """L <- b2 L + (1-b2)/n c_l c_l^T, R <- b2 R + (1-b2)/m c_r^T c_r."""
        b2 = self.group["betas"][1]
        weight_l = weight_r = 1 - b2
        if isinstance(self.rows, Tensor):
            c_l = c_l / self.cols.unsqueeze(-1).sqrt()
            c_r = c_r / self.rows.unsqueeze(-1).sqrt()
        else:
            weight_l, weight_r = weight_l / self.cols, weight_r / self.rows
        self.left.accumulate(c_l, self.s, b2, weight_l)
        self.right.accumulate(c_r, self.s, b2, weight_r)


def refresh(
    bucket: Bucket, steps: dict[Tensor, int], group: dict[str, Any], *, factors: str, exact: bool
) -> None:
    """Renew bases or roots of the blocks whose turn it is."""
    every, b = group["refresh_every"], bucket.buffers
    power, eps, device = factor_power(bucket, factors), group["eps"], bucket.device
    due = list(bucket.due([p for p, t in steps.items() if t], steps, every))
    first_time = [k for k, t in due if t <= every or exact]
    again = [k for k, t in due if not (t <= every or exact)]
    for blocks, is_exact in ((first_time, True), (again, False)):
        for index in _indices(blocks, device):
            if factors == "kl":
                _rebalance(bucket, index, power)
            for side in bucket.sides:
                turn = side.refresh(b, index, is_exact, power, eps)
                if turn is None:
                    continue
                for what in ("momentum", "second"):
                    if what in b:
                        by = turn.square() if what == "second" else turn
                        old = b[what][index].float()
                        new = by.mT @ old if side.is_left else old @ by
                        # an index, unlike a slice, converts nothing
                        b[what][index] = new.to(b[what].dtype)
    worn = [k for k, t in due if (t // every) % ORTHONORMALIZE_EVERY == 0]
    for index in _indices(worn, device):
        for side in bucket.sides:
            if isinstance(side, FullSide) and side.has_frame:
                side.orthonormalize(b, index)


def _indices(blocks: list[int], device: torch.device) -> list[Index]:
    """All blocks at once where batches are fast; on CPUs one by one, which spares copies."""
    if device.type == "cpu":
        return [slice(k, k + 1) for k in blocks]
    return [torch.tensor(blocks, device=device)] if blocks else []


def _rebalance(bucket: Bucket, index: Index, power: float) -> None:
    """Give both KL factors the same mean eigenvalue: (cL, R/c) is the same preconditioner."""
    left, right = (side.mean(bucket.buffers, index) for side in bucket.sides)
    if left is None or right is None:
        return
    fine = (left > 0) & (right > 0)
    c = torch.where(fine, (right / left).sqrt(), 1.0)
    bucket.left.rescale(bucket.buffers, index, c, power)
    bucket.right.rescale(bucket.buffers, index, 1 / c, power)
