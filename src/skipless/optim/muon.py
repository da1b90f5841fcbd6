"""Muon: momentum, then the nearest orthogonal matrix, scaled by shape (O3).

Matrices of the same shape are orthogonalised in one batched product. The arithmetic dtype is
chosen per device: float32 on CPUs (bf16 is 90 times slower there without bf16 units), bf16 on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skipless import fallback
from skipless.errors import UserError, check_choice
from skipless.optim import checking
from skipless.optim.base import RoleOptimizer
from skipless.optim.blocks import Layout
from skipless.optim.buckets import CHUNK_BYTES
from skipless.optim.sharding import Sink

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Jordan's quintic: fast, singular values end in about [0.7, 1.2].
    "keller": ((3.4445, -4.7750, 2.0315),),
    # The convergent quintic (15 x - 10 x^3 + 3 x^5) / 8: slow, ends at 1.
    "convergent": ((1.875, -1.25, 0.375),),
    # Polar Express, arXiv 2505.16932, l = 1e-3, degree 5: optimal per iteration, ends at 1.
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.875, -1.25, 0.375),
    ),
}
SCALES = ("keller", "rms", "spectral")


def scale_factor(rule: str, num_rows: int, num_columns: int) -> float:
    """Factor on the orthogonal update of an out x in matrix: keller sqrt(max(1, out/in)), rms
    0.2 sqrt(max(out, in)) (RMS 0.2, as AdamW's), spectral sqrt(out/in)."""
    check_choice("scale", rule, SCALES)
    if rule == "keller":
        return math.sqrt(max(1.0, num_rows / num_columns))
    if rule == "rms":
        return 0.2 * math.sqrt(max(num_rows, num_columns))
    return math.sqrt(num_rows / num_columns)


def orthogonalize(
    x: Tensor, *, steps: int = 5, coefficients: str = "keller", dtype: torch.dtype | None = None
) -> Tensor:
    """Nearest (semi-)orthogonal matrix of each x [K, m, n] by Newton-Schulz, in x's dtype.

    `coefficients`: "keller", "convergent", "polar_express" or "svd" (exact, for tests). `dtype` is
    the arithmetic's; None means float32 on CPU and MPS, bfloat16 on CUDA. A zero matrix stays zero.
    """
    if coefficients == "svd":
        u, s, vh = fallback.svd(x.float())
        keep = s > s[..., :1] * 1e-6 * max(x.shape[-2:])
        return ((u * keep.unsqueeze(-2)) @ vh).to(x.dtype)
    check_choice("coefficients", coefficients, COEFFICIENTS)
    table = COEFFICIENTS[coefficients]
    if dtype is None:
        dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    if not x.numel():
        return x
    tall = x.shape[-2] > x.shape[-1]
    y = _lifted(x.mT if tall else x)
    # Polar Express wants a little room below 1, since rounding pushes norms above it.
    room = 1.01 if coefficients == "polar_express" else 1.0
    norm = y.float().square().sum((-2, -1), keepdim=True).sqrt().mul(room).clamp(min=1e-30)
    y = (y / norm).to(dtype)
    for step in range(steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = y @ y.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, poly, y, beta=a)
    y = y.mT if tall else y
    return y.to(x.dtype)


def _lifted(x: Tensor) -> Tensor:
    """x, times a power of two where its squares would underflow: the direction is all that counts.

    Half precision is left alone: its smallest number has a square in float32.
    """
    if x.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return x
    tiny = x.abs().amax((-2, -1), keepdim=True) < 2.0**-50
    return torch.where(tiny, x * 2.0**90, x)


class Muon(RoleOptimizer):
    """Muon for hidden matrices and kernels, AdamW for the rest, in one optimiser.

    `momentum`: decay of the average; Nesterov by default. `scale`: see `scale_factor`.
    `coefficients`: see `orthogonalize`. `split`: {part of a name: n} cuts fused rows (QKV) into n
    matrices first. Raises UserError for values out of range.
    """

    algorithm = "muon"
    without = ("block_size",)

    def __init__(
        self,
        params: nn.Module | Iterable,
        lr: float = 5e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        scale: str = "rms",
        steps: int = 5,
        coefficients: str = "keller",
        dtype: torch.dtype | None = None,
        **routing: Any,
    ) -> None:
        checking.no_unknown(self, routing)
        check_choice("scale", scale, SCALES)
        check_choice("coefficients", coefficients, (*COEFFICIENTS, "svd"))
        checking.either("nesterov", nesterov)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UserError(f"dtype is {dtype!r}; torch.float32 or torch.bfloat16 was expected")
        checking.decay("momentum", momentum)
        checking.at_least_one("steps", steps)
        self._settings = {"steps": steps, "coefficients": coefficients, "dtype": dtype}
        super().__init__(
            params, lr=lr, betas=(momentum, 0.0), eps=0.0, weight_decay=weight_decay,
            extra={"nesterov": nesterov, "scale": scale}, **routing,
        )  # fmt: skip

    def _describe_one(self, p: Tensor, group: dict[str, Any]) -> str:
        lay = self._layout(p, group)
        return f"{lay.stack} of {lay.m} x {lay.n}, scale {group['scale']}"

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_choice("scale of a parameter group", group.get("scale", "rms"), SCALES)
        checking.either("nesterov of a parameter group", group.get("nesterov", True))

    def _matrix_shapes(self, p: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"momentum": tuple(p.shape)}

    def _prepare(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        """Momentum, elementwise (on each rank's own piece); returns what is orthogonalised."""
        state, momentum = self.state[p], group["betas"][0]
        if "momentum" not in state:
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
        state["step"] += 1
        g = g.float()
        buffer = state["momentum"].lerp_(g, 1 - momentum)
        return torch.lerp(g, buffer, momentum) if group["nesterov"] else buffer

    def _disown(self, p: Tensor, counts: bool) -> None:
        """Momentum is sharded like its parameter: every rank keeps its own piece."""

    def _update_matrices(
        self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], sink: Sink
    ) -> None:
        shapes: dict[tuple, list[tuple[Tensor, Layout, Tensor]]] = {}
        for p, u in pairs:
            lay = self._layout(p, group)
            shapes.setdefault((lay.m, lay.n, u.device), []).append((p, lay, lay.to_blocks(u)))
        for (m, n, device), members in shapes.items():
            factor = scale_factor(group["scale"], m, n)
            limit = max(1, CHUNK_BYTES // (4 * m * n)) if device.type == "cpu" else len(members)
            for i in range(0, len(members), limit):
                part = members[i : i + limit]
                joined = torch.cat([u for _, _, u in part]) if len(part) > 1 else part[0][2]
                whole = orthogonalize(joined, **self._settings).mul_(factor)
                pieces = whole.split([len(u) for _, _, u in part])
                for (p, lay, _), piece in zip(part, pieces, strict=True):
                    sink.take(p, lay.from_blocks(piece))
