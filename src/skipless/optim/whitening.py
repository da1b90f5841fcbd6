"""KL-Shampoo, KL-SOAP, SOAP and Shampoo: one whitening engine (O1, O2).

Every matrix is cut into uniform blocks (blocks.py); blocks of one shape, from whatever parameter,
are stacked and share batched products (buckets.py). Each side of a block keeps its factor in a form
of its own (sides.py). engine.py does a step. A block is m x n; G its gradient; all state float32.

root="qr" ("auto" on CPU and MPS): every block lives in its eigenbases. Five tensors a block: bases
Q_L, Q_R, factors L~ = Q_L^T L Q_L and R~ = Q_R^T R Q_R, momentum M~ = Q_L^T M Q_R. One step:
    1. P = Q_L^T G Q_R                                                      two products
    2. M~ <- b1 M~ + (1-b1) P
    3. U = Q_L [M~ / (1 - b1^t) / sqrt(l_L l_R^T)] Q_R^T, l = diag of the OLD factor   two products
       W <- (W - lr U)(1 - lr decay)
    4. L~ <- b2 L~ + (1-b2)/n C C^T, C = P / sqrt(l_R); R~ likewise         two half products
       Then diag(L~) IS the eigenvalue average of O1 step 6: (C C^T)_ii / n = mean_j P_ij^2/l_R,j.
    5. every `refresh_every` steps, each block at its own phase so that no step is a spike:
       Qd = qr(L~).Q, Q_L <- Q_L Qd, L~ <- Qd^T L~ Qd, M~ <- Qd^T M~; the right side likewise.
       As L Q_L = Q_L L~, qr(L Q_L) = Q_L qr(L~): this is O1 step 7 in the rotated frame. The first
       refresh is a full eigh. Every 16th takes the rounding out of the basis by Newton-Schulz.
Six products, two of them triangular, where O1 in the original frame takes fourteen.

root="jacobi" ("auto" on CUDA, where qr and eigh are loops over the batch): the same five tensors,
and step 5 by matrix products alone: Qd from three sweeps of Jacobi rotations of all pairs at once
(roots.jacobi_step), the first basis from sixteen. A run may go on with the other root. Three,
because L~ is far from diagonal by then (at b2 = 0.95 four tenths of it are new after ten steps):
||D^-1/2 L~ D^-1/2 - I||_F / sqrt(d), D = diag(L~), goes from some 1.2 to 0.38 by a QR power step,
to 1.10, 0.56 and 0.30 by one, two and three sweeps (docs/optimizers.md). A sweep is eight products.

How it differs from O1 (`reference=True` runs O1 literally: reference.py):
    * start: L = R = rms(first G) * I, so that l_L l_R is the mean square of the first gradient and
      a rank-1 gradient is safe; momentum is bias-corrected. Published: eigenvalues 0.1, no update
      on the first call.
    * after a refresh the eigenvalues are Rayleigh quotients in the new basis, where O1 keeps the
      averages that belonged to the old columns.
    * clamp (on 1/sqrt(l)) and eps are relative to the mean eigenvalue, and (cL, R/c) is rebalanced
      at refreshes: the direction does not depend on the gradient's scale.
    * blocks of `block_size` instead of whole matrices; `block_size=None` is unblocked.

root="eigh" and root="newton" (matmuls only) keep factors in the original frame with cached roots
X_L = L^-1/2, X_R = R^-1/2 and an average V of whitened gradients:
    A = G X_R, B = X_L G;  V <- b1 V + (1-b1) X_L A;  W <- (W - lr V/(1 - b1^t))(1 - lr decay);
    L <- b2 L + (1-b2)/n A A^T, R <- b2 R + (1-b2)/m B^T B;  roots renewed at refreshes.
Five products, two triangular. Given up: O1 step 6 (eigenvalues change only at refreshes), and
momentum averages gradients whitened by the roots of their own step. Not free: in a trial (4 layers,
D=96, 200 steps, one seed, lr 3e-3) held-out loss was 2.555 against 2.343 for "qr" and 2.527 for the
reference with the same start. So nothing chooses them by itself.

SOAP and KL-SOAP always work in the eigenbases: U = Q_L Adam(P) Q_R^T with second moment V; SOAP's
factors are raw (C = P), KL-SOAP's those of KL-Shampoo. At a refresh V is carried over by squared
entries, V <- (Qd o Qd)^T V: exact for a permutation of columns, where an implementation that
re-sorts columns and not V ties V to wrong directions. Published SOAP leaves V as it is and skips
the first update. Shampoo: L^-1/4 G R^-1/4 with raw factors, divided by n and m so that white noise
gives updates of unit RMS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError, check_choice
from skipless.optim import checking
from skipless.optim.base import RoleOptimizer
from skipless.optim.buckets import Bucket, SideChoice, state_shapes
from skipless.optim.engine import refresh, rms_scale, step_bucket
from skipless.optim.reference import reference_shapes, reference_update, whole_matrix
from skipless.optim.roots import full_precision
from skipless.optim.sharding import Sink
from skipless.sharded import local

ROOTS = ("auto", "eigh", "qr", "newton", "jacobi")
MAX_SIDE, RANK = 4096, 64
REFRESHES = {
    "qr": "a basis is refreshed by one QR power step, the first time by eigh",
    "jacobi": "a basis is refreshed by Jacobi sweeps, matrix products alone",
    "eigh": "a basis is refreshed by exact eigenvectors",
}
"""What `describe()` says of each."""


class Whitening(RoleOptimizer):
    """The engine. Use KLShampoo, KLSOAP, SOAP or Shampoo.

    `params`: a model (routed by role), named parameters, parameters or groups.
    `block_size`: None means whole matrices. `refresh_every`: steps between refreshes of a block.
    `root`: "qr": eigenbases, one power step a refresh; "jacobi": the same by matmuls only; "auto":
    "jacobi" on CUDA, else "qr". "eigh", "newton" (matmuls only): cached roots, faster and measured
    worse (above); in the SOAP forms "eigh" means exact eigenvectors at every refresh.
    `eps`: ridge relative to the mean eigenvalue; in the SOAP forms Adam's eps.
    `update_rms`: rescale each matrix's update to this root mean square (0.2 matches AdamW's).
    `reference=True`: O1 literally (KL-Shampoo only), `start` "published" unless "gradient" is set.
    `max_side`, `wide`, `rank`: a side longer than max_side is "diagonal", "low_rank" (top `rank`
    eigenpairs) or "identity". `one_sided`: whiten the shorter side of each block only.
    `momentum_dtype`: torch.bfloat16 halves the momentum. `packed`: factors as packed triangles, a
    fifth less state for a dearer step (eigenbases only). `split`: {part of a name: n} cuts fused
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
        max_side: int = MAX_SIDE,
        wide: str = "diagonal",
        rank: int = RANK,
        one_sided: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        packed: bool = False,
        **routing: Any,
    ) -> None:
        checking.no_unknown(self, routing)
        for what, value in (("reference", reference), ("one_sided", one_sided),
                            ("packed", packed)):  # fmt: skip
            checking.either(what, value)
        for what, value in (("refresh_every", refresh_every), ("max_side", max_side),
                            ("rank", rank)):  # fmt: skip
            checking.at_least_one(what, value)
        check_choice("root", root, ROOTS)
        check_choice("wide", wide, ("diagonal", "low_rank", "identity"))
        start = start or ("published" if reference else "gradient")
        check_choice("start", start, ("gradient", "published"))
        _check_size("update_rms", update_rms)
        if momentum_dtype not in (torch.float32, torch.bfloat16):
            raise UserError(
                f"momentum_dtype is {momentum_dtype}; torch.float32 or torch.bfloat16 was expected"
            )
        cached = root in ("eigh", "newton") and self.tail == "whiten"
        if reference:
            of_blocks = {
                "split": bool(routing.get("split")), "packed": packed, "one_sided": one_sided,
                "max_side": max_side != MAX_SIDE, "wide": wide != "diagonal", "rank": rank != RANK,
                "momentum_dtype": momentum_dtype != torch.float32,
            }  # fmt: skip
            self._check_reference([name for name, given in of_blocks.items() if given])
        elif start == "published":
            raise UserError("start='published' goes with reference=True; use start='gradient'")
        if root == "newton" and self.tail == "adam":
            raise UserError(f"{self.algorithm} needs eigenvectors; use root 'qr' or 'eigh'")
        if packed and cached:
            raise UserError(
                f"packed=True needs eigenbases, which root={root!r} does not keep; leave it out"
            )
        self._reference, self._start, self._root = reference, start, root
        self._cached_root = root if cached else None
        self._momentum_dtype = momentum_dtype
        self._sides = {
            "max_side": max_side, "wide": wide, "rank": rank, "one_sided": one_sided,
            "rotation_only": self.tail == "adam" and self.factors == "raw", "packed": packed,
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

    def _check_reference(self, of_blocks: list[str]) -> None:
        """The published steps: KL-Shampoo's, on whole matrices, so that settings of blocks would
        mean nothing."""
        if self.algorithm != "kl_shampoo":
            raise UserError(f"reference=True is KL-Shampoo's; {self.algorithm} has no such mode")
        if of_blocks:
            raise UserError(
                f"reference=True takes whole matrices as they are, where {of_blocks[0]} has no "
                "effect; leave one of them out"
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        checking.at_least_one("refresh_every of a parameter group", group.get("refresh_every", 1))
        _check_size("update_rms of a parameter group", group.get("update_rms"))

    def _matrix_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        layout = self._layout(p, group)
        if self._reference:
            return reference_shapes(*whole_matrix(layout))
        sides = self._choice(p).sides(*layout.block_shape)
        shapes, _ = state_shapes(sides, layout.block_shape, second=self.tail == "adam")
        return {what: (layout.num_blocks, *shape) for what, shape in shapes.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_buckets": {}}

    def _state_replaced(self) -> None:
        self._buckets = {}

    def _basis(self, device: torch.device) -> str:
        """How eigenbases on this device are refreshed: "eigh", "qr" or "jacobi"."""
        if self._root == "auto":
            return "jacobi" if device.type == "cuda" else "qr"
        return self._root

    def _choice(self, p: Tensor) -> SideChoice:
        basis = self._basis(local(p).device)
        return SideChoice(root=self._cached_root, basis=basis, **self._sides)

    def _describe_one(self, p: Tensor, group: dict[str, Any]) -> str:
        lay = self._layout(p, group)
        if self._reference:
            rows, columns = whole_matrix(lay)
            return f"whole, {rows} x {columns}, as published"
        left, right = self._choice(p).sides(*lay.block_shape)
        return f"{lay.num_blocks} of {lay.bm} x {lay.bn}, {left.kind} x {right.kind}"

    def describe(self) -> str:
        """The table of parameters; below it, how eigenbases are refreshed on each device."""
        lines = [super().describe()]
        devices = {
            local(p).device.type: local(p).device
            for group in self.param_groups if group["algorithm"] != "adamw"
            for p in group["params"]
        }  # fmt: skip
        for kind, device in devices.items():
            if self._cached_root is None and not self._reference:
                lines.append(f"on {kind}: {REFRESHES[self._basis(device)]}")
        return "\n".join(lines)

    def _group_buckets(self, group: dict[str, Any], ready: set[Tensor]) -> list[Bucket]:
        """Buckets that hold every parameter with state or a gradient; rebuilt when one is new."""
        key = id(group["params"])
        buckets = self._buckets.get(key)
        known = {p for b in buckets or () for p in b.params if "step" in self.state[p]}
        if buckets is not None and ready <= known:  # cleared state counts as none
            return buckets
        shapes: dict[tuple, Bucket] = {}
        for p in group["params"]:
            if p not in ready and len(self.state.get(p, {})) < 2:
                continue
            layout, device = self._layout(p, group), local(p).device
            place = (layout.block_shape, device)
            if place not in shapes:
                shapes[place] = Bucket(*self._choice(p).sides(*layout.block_shape))
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
        if self._reference or not state.keys() - {"step"}:  # another rank owns it, or no step yet
            return {}
        every, t = group["refresh_every"], int(state["step"])
        numbers = {"preconditioner_age": float(min(t, every - 1))}
        for side in self._choice(p).sides(*self._layout(p, group).block_shape):
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
                    layout = self._layout(p, group)
                    g = g.reshape(whole_matrix(layout))
                    update = reference_update(self.state[p], g, group, self._start)
                    if update is not None:
                        update = update * rms_scale(update, group["update_rms"])
                        sink.take(p, update.reshape(layout.shape))
                return
            gradients = dict(pairs)
            for bucket in self._group_buckets(group, set(gradients)):
                mine = {p: gradients[p] for p in bucket.params if p in gradients}
                steps = step_bucket(
                    bucket, mine, self.state, group, sink, factors=self.factors, tail=self.tail
                )
                refresh(bucket, steps, group, factors=self.factors, exact=self._root == "eigh")


def _check_size(what: str, value: float | None) -> None:
    """A root mean square to rescale updates to, or None."""
    if value is not None:
        checking.from_zero(what, value)
        if value == 0:
            raise UserError(f"{what} is 0, so nothing would move; give a size, or None")


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
