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
    5. L~ <- b2 L~ + (1-b2)/n C C^T, C = P / sqrt(l_R); R~ likewise    two half products
    6. nothing: diag(L~) IS the eigenvalue average of O1 step 6, since
       (C C^T)_ii / n = mean_j P_ij^2 / l_R,j
    7. every `refresh_every` steps, for each block at its own phase so that no step is a spike:
       Qd = qr(L~).Q, Q_L <- Q_L Qd, L~ <- Qd^T L~ Qd, M~ <- Qd^T M~; the right side likewise.
       Every 16th refresh rounding is taken out of the basis by one Newton-Schulz step.
       As L Q_L = Q_L L~, qr(L Q_L) = Q_L qr(L~): this is O1 step 7 in the rotated frame.

What the frame buys: about six matmuls a step where O1 in the original frame takes fourteen, the
eigenvalue averages for nothing, and G R^-1 G^T without an inverse.

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

root="newton" (the default of KL-Shampoo and Shampoo on CUDA, where eigh and qr are loops over the
batch) keeps L, R in the original frame with cached inverse roots L^-1/2, R^-1/2 from matmuls alone;
steps 2-5 are the same formulas with those roots, and step 6 is given up: eigenvalues change only at
refreshes. Sides that are too wide: sides.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError, check_choice
from skipless.optim.base import RoleOptimizer, Sink
from skipless.optim.buckets import Bucket, SideChoice, per_block, true_counts
from skipless.optim.reference import reference_update
from skipless.optim.roots import full_precision
from skipless.optim.sharding import local
from skipless.optim.sides import FullSide

ROOTS = ("auto", "eigh", "qr", "newton")
ORTHONORMALIZE_EVERY = 16  # refreshes; a float32 basis drifts by about 1e-7 a refresh


class Whitening(RoleOptimizer):
    """The engine. Use KLShampoo, KLSOAP, SOAP or Shampoo.

    `params`: a model (routed by role), named parameters, parameters or groups.
    `block_size`: None means whole matrices. `refresh_every`: steps between refreshes of a block.
    `root`: "qr" (a power step), "eigh" (exact), "newton" (matmuls only, no eigenvectors), or
    "auto": newton on CUDA where it applies, else qr.
    `eps`: ridge relative to the mean eigenvalue; in the SOAP forms Adam's eps.
    `update_rms`: rescale each matrix's update to this root mean square (0.2 matches AdamW's).
    `reference=True`: O1 literally (KL-Shampoo only), `start` "published" unless "gradient" is set.
    `max_side`, `wide`, `rank`: a side longer than max_side is "diagonal", "low_rank" (top `rank`
    eigenpairs) or "identity". `one_sided`: whiten the shorter side of each block only.
    `momentum_dtype`: torch.bfloat16 halves the momentum. `split`: {part of a name: n} cuts fused
    rows (QKV) into n matrices first. `adamw_*`, `gain_*`: the AdamW part.
    Raises UserError for values out of range.
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
        max_side: int = 4096,
        wide: str = "diagonal",
        rank: int = 64,
        one_sided: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        **routing: Any,
    ) -> None:
        check_choice("root", root, ROOTS)
        check_choice("wide", wide, ("diagonal", "low_rank", "identity"))
        start = start or ("published" if reference else "gradient")
        check_choice("start", start, ("gradient", "published"))
        if reference and self.algorithm != "kl_shampoo":
            raise UserError(f"reference=True is KL-Shampoo's; {self.algorithm} has no such mode")
        if start == "published" and not reference:
            raise UserError("start='published' goes with reference=True; use start='gradient'")
        if root == "newton" and self.tail == "adam":
            raise UserError(f"{self.algorithm} needs eigenvectors; use root 'qr' or 'eigh'")
        if refresh_every < 1:
            raise UserError(f"refresh_every is {refresh_every}; at least 1 was expected")
        if update_rms is not None and not update_rms > 0:
            raise UserError(f"update_rms is {update_rms}; it must be positive, or None")
        self._reference, self._start, self._root = reference, start, root
        self._momentum_dtype = momentum_dtype
        self._sides = {
            "max_side": max_side, "wide": wide, "rank": rank, "one_sided": one_sided,
            "rotation_only": self.tail == "adam" and self.factors == "raw",
        }  # fmt: skip
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

    def _choice(self, device: torch.device) -> SideChoice:
        newton = self._root == "newton" or (
            self._root == "auto" and device.type == "cuda" and self.tail == "whiten"
        )
        return SideChoice(newton=newton, **self._sides)

    def _describe_one(self, p: Tensor, group: dict[str, Any]) -> str:
        lay = self._layout(p, group)
        if self._reference:
            return f"{lay.stack} whole, {lay.m} x {lay.n}, as published"
        left, right = self._choice(local(p).device).sides(*lay.block_shape)
        return f"{lay.num_blocks} of {lay.bm} x {lay.bn}, {left.kind} x {right.kind}"

    def _group_buckets(self, group: dict[str, Any], ready: set[Tensor]) -> list[Bucket]:
        """Buckets that hold every parameter with state or a gradient; rebuilt when one is new."""
        key = id(group["params"])
        buckets = self._buckets.get(key)
        if buckets is not None and ready <= {p for b in buckets for p in b.params}:
            return buckets
        shapes: dict[tuple, Bucket] = {}
        for p in group["params"]:
            if p not in ready and "momentum" not in self.state.get(p, {}):
                continue
            layout, device = self._layout(p, group), local(p).device
            place = (layout.block_shape, device)
            if place not in shapes:
                shapes[place] = Bucket(*self._choice(device).sides(*layout.block_shape))
            shapes[place].params.append(p)
            shapes[place].layouts.append(layout)
        for (_, device), bucket in shapes.items():
            bucket.allocate(
                self.state, device, second=self.tail == "adam",
                momentum_dtype=self._momentum_dtype,
            )  # fmt: skip
        self._buckets[key] = list(shapes.values())
        return self._buckets[key]

    def _note_preconditioner(self, p: Tensor, group: dict[str, Any]) -> dict[str, float]:
        """Age of the oldest block's basis in steps, and the range of eigenvalue estimates."""
        state = self.state[p]
        if self._reference or not state or state["step"] == 0:
            return {}
        every, t = group["refresh_every"], int(state["step"])
        numbers = {"preconditioner_age": float(min(t, every - 1))}
        for side in self._choice(local(p).device).sides(*self._layout(p, group).block_shape):
            values = side.eigenvalues(state)
            if values is not None:
                low, high = values.clamp(min=0).amin(-1), values.amax(-1)
                numbers[f"{side.name}_smallest"] = float(low.min())
                numbers[f"{side.name}_largest"] = float(high.max())
                numbers[f"{side.name}_condition"] = float((high / low.clamp(min=1e-38)).max())
        return numbers

    # ---- the step ---------------------------------------------------------------------------

    def _update_matrices(
        self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], sink: Sink
    ) -> None:
        with full_precision():
            if self._reference:
                for p, g in pairs:
                    g = g.reshape(self._layout(p, group).shape)
                    update = reference_update(self.state[p], g, group, self._start)
                    if update is not None:
                        sink.take(p, update * _rms_scale(update, group["update_rms"]))
                return
            gradients = dict(pairs)
            for bucket in self._group_buckets(group, set(gradients)):
                steps: dict[Tensor, int] = {}
                for first, last in bucket.chunks(gradients):
                    self._step_chunk(bucket, first, last, gradients, group, steps, sink)
                self._refresh(bucket, gradients, group, steps)

    def _step_chunk(self, bucket: Bucket, first, last, gradients, group, steps, sink) -> None:
        """Steps 1-5 for the parameters first..last-1 of a bucket."""
        members, layouts = bucket.params[first:last], bucket.layouts[first:last]
        blocks = [lay.to_blocks(gradients[p]) for lay, p in zip(layouts, members, strict=True)]
        g = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        s, left, right = bucket.slice(first, last), bucket.left, bucket.right
        for k, p in enumerate(members):
            step = self.state[p]["step"]
            if step == 0 and not self._begin(bucket, first + k, blocks[k]):
                steps[p] = 0
                continue  # an all-zero first gradient says nothing about the scale
            steps[p] = int(step.add_(1))
        b1, b2 = group["betas"]
        rows, cols = true_counts(layouts, g)
        times = [max(steps[p], 1) for p in members]

        p = right.enter(left.enter(g, s), s)
        momentum = s["momentum"]
        if momentum.dtype == torch.float32:
            momentum.lerp_(p, 1 - b1)
        else:
            momentum.copy_(wide := momentum.float().lerp_(p, 1 - b1))
            momentum = wide
        power = self._power(bucket)
        root_l = left.root(s, power, group["eps"], rows)
        root_r = right.root(s, power, group["eps"], cols)
        bias = per_block([1 / (1 - b1**t) for t in times], layouts, g)
        if self.tail == "adam":
            s["second"].mul_(b2).addcmul_(p, p, value=1 - b2)
            bias2 = per_block([1 / (1 - b2**t) for t in times], layouts, g)
            u = (momentum * bias).div_((s["second"] * bias2).sqrt_().add_(group["eps"]))
        else:
            u = right.whiten(left.whiten(momentum, root_l, s), root_r, s)
            u = u * bias if u is momentum else u.mul_(bias)
        self._finish(bucket, first, last, u, s, group, sink)

        c_l, c_r = (right.whiten(p, root_r, s), left.whiten(p, root_l, s)) if (
            self.factors == "kl") else (p, p)  # fmt: skip
        weight_l = weight_r = 1 - b2
        if isinstance(rows, Tensor):
            c_l, c_r = c_l / cols.unsqueeze(-1).sqrt(), c_r / rows.unsqueeze(-1).sqrt()
        else:
            weight_l, weight_r = weight_l / cols, weight_r / rows
        left.accumulate(c_l, s, b2, weight_l)
        right.accumulate(c_r, s, b2, weight_r)

    def _finish(self, bucket: Bucket, first: int, last: int, u: Tensor, s, group, sink) -> None:
        """Leave the frame and hand each parameter its update, in the last product if possible."""
        offset = bucket.starts[first]
        parts = [
            (bucket.params[k], bucket.layouts[k],
             slice(bucket.starts[k] - offset, bucket.starts[k + 1] - offset))
            for k in range(first, last)
        ]  # fmt: skip
        if group["update_rms"] is not None:
            # Turning does not change the norm, so it is known before the frame is left.
            for _, lay, where in parts:
                u[where] *= _rms_scale(u[where], group["update_rms"], math.prod(lay.shape))
        half = bucket.left.leave(u, s)
        basis = s.get("right_basis")
        if basis is not None and all(sink.fuses(p) and not lay.padded for p, lay, _ in parts):
            for p, lay, where in parts:
                sink.product(p, lay, half[where], basis[where].mT)
            return
        whole = bucket.right.leave(half, s)
        for p, lay, where in parts:
            sink.take(p, lay.from_blocks(whole[where]))

    def _power(self, bucket: Bucket) -> float:
        """Of each factor: 1/2 in KL, 1/4 for raw factors, 1/2 if only one side has a factor."""
        both = all(side.kind != "identity" for side in bucket.sides)
        return 0.25 if self.factors == "raw" and both else 0.5

    def _begin(self, bucket: Bucket, k: int, g: Tensor) -> bool:
        """First gradient of parameter k: factors proportional to the identity, whose product is
        its mean square by block. False if it is all zero."""
        layout = bucket.layouts[k]
        counts = torch.tensor(layout.rows) * torch.tensor(layout.cols)
        square = g.square().sum((-2, -1)) / counts.to(g)
        if not square.sum() > 0:
            return False
        # A block without any gradient yet starts at its matrix's scale.
        square = torch.where(square > 0, square, square.mean())
        both = all(side.kind != "identity" for side in bucket.sides)
        start = square.sqrt() if self.factors == "kl" and both else square
        for side in bucket.sides:
            side.begin(bucket.slice(k, k + 1), start, self._power(bucket))
        return True

    def _refresh(self, bucket: Bucket, gradients, group: dict[str, Any], steps) -> None:
        """Step 7 for the blocks whose turn it is."""
        every, b, power = group["refresh_every"], bucket.buffers, self._power(bucket)
        device = b["momentum"].device
        due = list(bucket.due([p for p in gradients if steps.get(p)], steps, every))
        exact = [k for k, t in due if t <= every or self._root == "eigh"]
        again = [k for k, t in due if not (t <= every or self._root == "eigh")]
        for blocks, is_exact in ((exact, True), (again, False)):
            if not blocks:
                continue
            index = torch.tensor(blocks, device=device)
            self._rebalance(bucket, index, power)
            for side in bucket.sides:
                turn = side.refresh(b, index, is_exact, power, group["eps"])
                for what in ("momentum", "second") if turn is not None else ():
                    if what in b:
                        by = turn.square() if what == "second" else turn
                        old = b[what][index].float()
                        new = by.mT @ old if side.is_left else old @ by
                        b[what][index] = new.to(b[what].dtype)
        worn = [k for k, t in due if (t // every) % ORTHONORMALIZE_EVERY == 0]
        if worn:
            for side in bucket.sides:
                if isinstance(side, FullSide):
                    side.orthonormalize(b, torch.tensor(worn, device=device))

    def _rebalance(self, bucket: Bucket, index: Tensor, power: float) -> None:
        """Give both KL factors the same mean eigenvalue: (cL, R/c) is the same preconditioner."""
        left, right = (side.mean(bucket.buffers, index) for side in bucket.sides)
        if self.factors != "kl" or left is None or right is None:
            return
        fine = (left > 0) & (right > 0)
        c = torch.where(fine, (right / left).sqrt(), 1.0)
        bucket.left.rescale(bucket.buffers, index, c, power)
        bucket.right.rescale(bucket.buffers, index, 1 / c, power)


def _rms_scale(u: Tensor, target: float | None, count: int | None = None) -> Any:
    """Factor that brings the root mean square of u over `count` entries to `target`."""
    if target is None:
        return 1.0
    return target / (u.square().sum() / (count or u.numel())).sqrt().clamp(min=1e-30)


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
