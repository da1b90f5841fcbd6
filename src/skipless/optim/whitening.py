"""KL-Shampoo, KL-SOAP, SOAP and Shampoo: one whitening engine (O1, O2).

How it works. Every matrix is cut into uniform blocks (blocks.py); blocks of the same shape, from
whatever parameter, are stacked and share batched matmuls. A block m x n keeps five tensors, all
float32: the bases Q_L, Q_R; the factors in those bases, L~ = Q_L^T L Q_L and R~ = Q_R^T R Q_R;
and the momentum in those bases, M~ = Q_L^T M Q_R. (The SOAP forms add the second moment V.)

One step with gradient G:
    1. P = Q_L^T G Q_R                                     two products
    2. M~ <- b1 M~ + (1-b1) P
    3. U~ = M~ / sqrt(l_L l_R^T), l = diag of the OLD factor; U = Q_L U~ Q_R^T    two products
    4. W <- (W - lr U)(1 - lr decay)
    5. L~ <- b2 L~ + (1-b2)/n C C^T, C = P / sqrt(l_R); R~ likewise             two products
    6. nothing: diag(L~) IS the eigenvalue average of O1 step 6, since
       (C C^T)_ii / n = mean_j P_ij^2 / l_R,j
    7. every `refresh_every` steps, for each block at its own phase so that no step is a spike:
       Qd = qr(L~).Q, Q_L <- Q_L Qd, L~ <- Qd^T L~ Qd, M~ <- Qd^T M~; the right side likewise.
       As L Q_L = Q_L L~, qr(L Q_L) = Q_L qr(L~): this is O1 step 7 in the rotated frame.

What the frame buys: six matmuls a step where O1 in the original frame takes ten, five tensors
instead of six (the eigenvalue averages are a diagonal), and G R^-1 G^T needs no inverse.

How it differs from O1 (which `reference=True` runs literally, reference.py):
    * start: Q = I and L = R = rms(first G) * I, so l_L l_R is the mean square of the first gradient
      and a rank-1 gradient is safe; the momentum is bias-corrected. The first refresh is a full
      eigh. Published: eigenvalues 0.1, no update on the first call.
    * after a refresh the eigenvalues are the Rayleigh quotients in the new basis, where O1 keeps
      the averages belonging to the old columns. Nothing else is given up for speed.
    * the clamp on 1/sqrt(l) and eps are relative to the mean eigenvalue, and (cL, R/c) is
      rebalanced at refreshes: the direction does not depend on the gradient's scale.
    * blocks of `block_size` instead of whole matrices; `block_size=None` is unblocked.

The others. SOAP: L, R from raw gradients (C = P), U~ = Adam of P with second moment V. At a refresh
V is carried over by squared entries, V <- (Qd o Qd)^T V: exact for a permutation of columns, where
an implementation that re-sorts columns but not V ties V to wrong directions. KL-SOAP: the same tail
on KL factors. Shampoo: raw factors, U~ = M~ / (l_L l_R^T)^(1/4), factors divided by n and m so that
white noise gives updates of unit RMS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError, check_choice
from skipless.optim.base import RoleOptimizer
from skipless.optim.blocks import Layout
from skipless.optim.reference import reference_update
from skipless.optim.roots import full_precision, inverse_power, power_step, sorted_eigh
from skipless.optim.sharding import decay_and_subtract, local

CHUNK_BYTES = 2**20  # a chunk's gradient; its eight temporaries then stay in a 16 MiB cache


@dataclass
class Bucket:
    """Blocks of one shape, stacked over parameters. `buffers` hold the state, [K, ...] each."""

    params: list[Tensor]
    layouts: list[Layout]
    starts: list[int] = field(default_factory=list)
    """First block of each parameter; one more entry ends the last."""
    phases: list[int] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Whitening(RoleOptimizer):
    """The engine. Use KLShampoo, KLSOAP, SOAP or Shampoo.

    `params`: a model (routed by role), named parameters, parameters or groups. `block_size` None
    means whole matrices. `eps`: ridge relative to the mean eigenvalue (for the SOAP forms, Adam's
    eps). `update_rms`: rescale each matrix's update to this root mean square. `root`: how bases are
    refreshed, "qr" (one power step; "auto" means qr) or "eigh" (exact). `reference=True`
    runs O1 literally (KL-Shampoo only), with `start` "published" unless "gradient" is asked for.
    `split`: {part of a name: n} cuts fused rows (QKV) into n matrices first. `adamw_*`, `gain_*`:
    the AdamW part. Raises UserError for values out of range.
    """

    algorithm = "kl_shampoo"
    factors = "kl"
    tail = "whiten"
    default_lr = 1e-3
    default_betas = (0.9, 0.98)

    def __init__(
        self,
        params: nn.Module | Iterable,
        lr: float | None = None,
        *,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        block_size: int | None = 256,
        refresh_every: int = 10,
        root: str = "auto",
        update_rms: float | None = None,
        reference: bool = False,
        start: str | None = None,
        **routing: Any,
    ) -> None:
        check_choice("root", root, ("auto", "eigh", "qr"))
        start = start or ("published" if reference else "gradient")
        check_choice("start", start, ("gradient", "published"))
        if reference and self.algorithm != "kl_shampoo":
            raise UserError(f"reference=True is KL-Shampoo's; {self.algorithm} has no such mode")
        if start == "published" and not reference:
            raise UserError("start='published' goes with reference=True; use start='gradient'")
        if refresh_every < 1:
            raise UserError(f"refresh_every is {refresh_every}; at least 1 was expected")
        if update_rms is not None and not update_rms > 0:
            raise UserError(f"update_rms is {update_rms}; it must be positive, or None")
        self._reference = reference
        self._start = start
        self._root = "qr" if root == "auto" else root
        self._buckets: dict[int, list[Bucket]] = {}
        super().__init__(
            params,
            lr=self.default_lr if lr is None else lr,
            betas=self.default_betas if betas is None else betas,
            eps=eps,
            weight_decay=weight_decay,
            block_size=None if reference else block_size,
            extra={"refresh_every": refresh_every, "update_rms": update_rms},
            **routing,
        )

    def _state_replaced(self) -> None:
        self._buckets = {}

    def _describe_one(self, p: Tensor, group: dict[str, Any]) -> str:
        lay = self._layout(p, group)
        return f"{lay.num_blocks} blocks of {lay.bm} x {lay.bn}"

    # ---- buckets ----------------------------------------------------------------------------

    def _group_buckets(self, group: dict[str, Any], ready: set[Tensor]) -> list[Bucket]:
        """Buckets that hold every parameter with state or a gradient; rebuilt when one is new."""
        key = id(group["params"])
        buckets = self._buckets.get(key)
        if buckets is not None and ready <= {p for b in buckets for p in b.params}:
            return buckets
        shapes: dict[tuple, Bucket] = {}
        for p in group["params"]:
            if p not in ready and not self.state.get(p):
                continue
            layout = self._layout(p, group)
            bucket = shapes.setdefault((layout.block_shape, local(p).device), Bucket([], []))
            bucket.params.append(p)
            bucket.layouts.append(layout)
        for bucket in shapes.values():
            self._allocate(bucket, group)
        self._buckets[key] = list(shapes.values())
        return self._buckets[key]

    def _allocate(self, bucket: Bucket, group: dict[str, Any]) -> None:
        """Stack the members' state; every state tensor becomes a view of its stack."""
        bm, bn = bucket.layouts[0].block_shape
        bucket.starts = [0]
        for layout in bucket.layouts:
            bucket.starts.append(bucket.starts[-1] + layout.num_blocks)
        total = bucket.starts[-1]
        bucket.phases = [k % group["refresh_every"] for k in range(total)]
        shapes = {
            "left": (bm, bm), "right": (bn, bn), "left_basis": (bm, bm), "right_basis": (bn, bn),
            "momentum": (bm, bn),
        }  # fmt: skip
        if self.tail == "adam":
            shapes["second"] = (bm, bn)
        device = local(bucket.params[0]).device
        for what, shape in shapes.items():
            stacked = torch.zeros(total, *shape, dtype=torch.float32, device=device)
            if what.endswith("basis"):
                stacked.diagonal(dim1=-2, dim2=-1).fill_(1)
            for i, p in enumerate(bucket.params):
                piece = stacked[bucket.starts[i] : bucket.starts[i + 1]]
                state = self.state[p]
                if what in state:
                    piece.copy_(state[what])
                state[what] = piece
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
            bucket.buffers[what] = stacked

    def _state_device(self, what: str, p: Tensor) -> torch.device:
        if what == "step" and "momentum" in self.state[p]:
            return torch.device("cpu")
        return super()._state_device(what, p)

    # ---- the step ---------------------------------------------------------------------------

    def _update_matrices(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        with full_precision():
            if self._reference:
                for p, g in pairs:
                    update = reference_update(
                        self.state[p], g.reshape(self._layout(p, group).shape), group, self._start
                    )
                    if update is not None:
                        self._apply(p, update, group)
                return
            gradients = dict(pairs)
            for bucket in self._group_buckets(group, set(gradients)):
                for first, last in _chunks(bucket, gradients):
                    self._step_chunk(bucket, first, last, gradients, group)
                self._refresh(bucket, gradients, group)

    def _apply(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        if group["update_rms"] is not None:
            rms = update.square().mean().sqrt()
            update = update * (group["update_rms"] / rms.clamp(min=1e-30))
        if self.collect_metrics:
            self._note(p, update, group)
        decay_and_subtract(p, update.to(local(p).device), float(group["lr"]), group["weight_decay"])

    def _step_chunk(self, bucket: Bucket, first: int, last: int, gradients, group) -> None:
        """Steps 1-5 for the parameters first..last-1 of a bucket."""
        i, j = bucket.starts[first], bucket.starts[last]
        members = range(first, last)
        layouts = [bucket.layouts[k] for k in members]
        blocks = [bucket.layouts[k].to_blocks(gradients[bucket.params[k]]) for k in members]
        g = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        b = {what: buffer[i:j] for what, buffer in bucket.buffers.items()}
        rows, cols = _counts(layouts, g)
        steps = [self.state[bucket.params[k]]["step"] for k in members]
        fresh = [k for k, s in zip(members, steps, strict=True) if s.item() == 0]
        if fresh:
            self._begin(bucket, fresh, gradients)
        for s in steps:
            s += 1
        b1, b2 = group["betas"]
        bias1 = _per_block([1 - b1 ** s.item() for s in steps], layouts, g)
        bias2 = _per_block([1 - b2 ** s.item() for s in steps], layouts, g)

        p = b["left_basis"].mT @ g @ b["right_basis"]
        b["momentum"].lerp_(p, 1 - b1)
        left = b["left"].diagonal(dim1=-2, dim2=-1)
        right = b["right"].diagonal(dim1=-2, dim2=-1)
        power = 0.5 if self.factors == "kl" else 0.25
        scale_l = inverse_power(left, power=power, eps=group["eps"], true_dim=rows).unsqueeze(-1)
        scale_r = inverse_power(right, power=power, eps=group["eps"], true_dim=cols).unsqueeze(-2)
        if self.tail == "adam":
            b["second"].mul_(b2).addcmul_(p, p, value=1 - b2)
            u = (b["momentum"] / bias1) / ((b["second"] / bias2).sqrt_() + group["eps"])
        else:
            u = b["momentum"] * (scale_l / bias1) * scale_r
        u = b["left_basis"] @ u @ b["right_basis"].mT
        for lay, k in zip(layouts, members, strict=True):
            piece = u[bucket.starts[k] - i : bucket.starts[k + 1] - i]
            self._apply(bucket.params[k], lay.from_blocks(piece), group)

        n_root, m_root = _root(cols), _root(rows)
        c_l = p * (scale_r / n_root) if self.factors == "kl" else p / n_root
        c_r = p * (scale_l / m_root) if self.factors == "kl" else p / m_root
        b["left"].baddbmm_(c_l, c_l.mT, beta=b2, alpha=1 - b2)
        b["right"].baddbmm_(c_r.mT, c_r, beta=b2, alpha=1 - b2)

    def _begin(self, bucket: Bucket, fresh: list[int], gradients) -> None:
        """First gradient of some members: factors proportional to the identity. KL factors take
        its RMS each (their product is then its mean square), raw ones its mean square."""
        for k in fresh:
            p, layout = bucket.params[k], bucket.layouts[k]
            piece = slice(bucket.starts[k], bucket.starts[k + 1])
            g = layout.to_blocks(gradients[p])
            counts = torch.tensor(layout.rows) * torch.tensor(layout.cols)
            square = g.square().sum((-2, -1)) / counts.to(g)
            # A block without any gradient yet starts at its matrix's scale.
            square = torch.where(square > 0, square, square.mean())
            start = square.sqrt() if self.factors == "kl" else square
            for what in ("left", "right"):
                bucket.buffers[what][piece].diagonal(dim1=-2, dim2=-1).copy_(start.unsqueeze(-1))

    def _refresh(self, bucket: Bucket, gradients, group: dict[str, Any]) -> None:
        """Step 7 for the blocks whose turn it is."""
        every = group["refresh_every"]
        power, exact = [], []
        for k, p in enumerate(bucket.params):
            if p not in gradients:
                continue
            t = int(self.state[p]["step"].item())
            for block in range(bucket.starts[k], bucket.starts[k + 1]):
                if (t + bucket.phases[block]) % every == 0:
                    first_time = t <= every or self._root == "eigh"
                    (exact if first_time else power).append(block)
        b = bucket.buffers
        for indices, is_exact in ((power, False), (exact, True)):
            if not indices:
                continue
            index = torch.tensor(indices, device=b["left"].device)
            if self.factors == "kl":
                _rebalance(b, index)
            for side in ("left", "right"):
                _turn(b, index, side, is_exact)

    def _note(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        name = self._names.get(p, "?")
        self._metrics[f"update_rms/{name}"] = float(update.square().mean().sqrt())


def _turn(b: dict[str, Tensor], index: Tensor, side: str, exact: bool) -> None:
    """Rotate one side of some blocks to a better eigenbasis."""
    factor = b[side][index]
    factor = (factor + factor.mT) / 2
    turn = sorted_eigh(factor)[1] if exact else power_step(factor)
    b[side][index] = turn.mT @ factor @ turn
    b[f"{side}_basis"][index] = b[f"{side}_basis"][index] @ turn
    for what in ("momentum", "second"):
        if what not in b:
            continue
        by = turn.square() if what == "second" else turn
        old = b[what][index]
        b[what][index] = by.mT @ old if side == "left" else old @ by


def _rebalance(b: dict[str, Tensor], index: Tensor) -> None:
    """Give both factors of some blocks the same mean eigenvalue: (cL, R/c) is the same."""
    left, right = b["left"][index], b["right"][index]
    mean_l = left.diagonal(dim1=-2, dim2=-1).mean(-1)
    mean_r = right.diagonal(dim1=-2, dim2=-1).mean(-1)
    fine = (mean_l > 0) & (mean_r > 0)
    c = torch.where(fine, (mean_r / mean_l).sqrt(), 1.0).view(-1, 1, 1)
    b["left"][index] = left * c
    b["right"][index] = right / c


def _chunks(bucket: Bucket, gradients: dict[Tensor, Tensor]) -> list[tuple[int, int]]:
    """Runs of neighbouring parameters that have a gradient, small enough for the cache."""
    bm, bn = bucket.layouts[0].block_shape
    on_cpu = bucket.buffers["left"].device.type == "cpu"
    limit = max(1, CHUNK_BYTES // (4 * bm * bn)) if on_cpu else math.inf
    runs: list[tuple[int, int]] = []
    for k, p in enumerate(bucket.params):
        if p not in gradients:
            continue
        joins = (
            runs
            and runs[-1][1] == k
            and bucket.starts[k + 1] - bucket.starts[runs[-1][0]] <= limit
        )
        if joins:
            runs[-1] = (runs[-1][0], k + 1)
        else:
            runs.append((k, k + 1))
    return runs


def _counts(layouts: list[Layout], like: Tensor) -> tuple[Any, Any]:
    """True rows and columns: plain numbers where nothing is padded, else [K, 1]."""
    if not any(lay.padded for lay in layouts):
        return layouts[0].bm, layouts[0].bn
    rows = [r for lay in layouts for r in lay.rows]
    cols = [c for lay in layouts for c in lay.cols]
    return tuple(torch.tensor(x, device=like.device).unsqueeze(-1) for x in (rows, cols))


def _root(count: Any) -> Any:
    return count.unsqueeze(-1).sqrt() if isinstance(count, Tensor) else math.sqrt(count)


def _per_block(values: list[float], layouts: list[Layout], like: Tensor) -> Any:
    """One number a parameter to a number, or to [K, 1, 1] where they differ."""
    if len(set(values)) == 1:
        return values[0]
    spread = [v for v, lay in zip(values, layouts, strict=True) for _ in range(lay.num_blocks)]
    return torch.tensor(spread, device=like.device, dtype=like.dtype).view(-1, 1, 1)


class KLShampoo(Whitening):
    """KL-Shampoo (O1): covariance factors fitted in KL divergence, M whitened by both."""


class KLSOAP(Whitening):
    """Adam in the eigenbases of KL-Shampoo's factors (O2)."""

    algorithm, tail = "kl_soap", "adam"
    default_betas = (0.95, 0.95)


class SOAP(Whitening):
    """Adam in the eigenbases of Shampoo's factors (O2)."""

    algorithm, factors, tail = "soap", "raw", "adam"
    default_lr, default_betas = 3e-3, (0.95, 0.95)


class Shampoo(Whitening):
    """L^-1/4 M R^-1/4 with factors of the raw gradient (O2)."""

    algorithm, factors = "shampoo", "raw"
