"""What an optimiser can tell about itself: the table of `describe()`, the numbers of `metrics()`,
among them isometry drift (O4). Read by base.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from skipless import fallback
from skipless.sharded import full, local


def step_device(p: Tensor) -> torch.device:
    """Where AdamW's fused kernel wants the step count of p."""
    device = local(p).device
    return device if device.type == "cuda" else torch.device("cpu")


def tensor_bytes(state: dict[str, Any]) -> int:
    """Bytes of one parameter's state tensors on this process."""
    tensors = [local(v) for v in state.values() if isinstance(v, Tensor)]
    return sum(v.numel() * v.element_size() for v in tensors)


def isometry_drift(before: Tensor, after: Tensor) -> float:
    """Largest change of W W^T in one step, relative to its mean eigenvalue (O4).

    For an orthogonal `before` this is ||W+ W+^T - I||_2. The shorter side is used; stacks [..., m,
    n] give their worst matrix. NaN for a matrix without entries or whose products are not finite.
    """
    if before.numel() == 0:
        return math.nan
    if before.shape[-2] > before.shape[-1]:
        before, after = before.mT, after.mT
    gram = before @ before.mT
    change = after @ after.mT - gram
    if not torch.isfinite(change).all():
        return math.nan
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    return float((fallback.eigvalsh(change).abs().amax(-1) / size).max())


def copies(optimizer: Any) -> dict[Tensor, Tensor]:
    """Float32 copies of the hidden matrices that have a gradient, whole also where sharded."""
    return {
        p: _as_matrix(p, group).clone()
        for group in optimizer.param_groups
        if group["algorithm"] != "adamw" or group["role"] in optimizer._routing.spectral_roles
        for p in group["params"]
        if p.grad is not None
    }


def measure(optimizer: Any, before: dict[Tensor, Tensor]) -> dict[str, float]:
    """Update RMS, isometry drift (O4) and the preconditioner's numbers of the step since `before`
    (of `copies`), as "what/parameter"."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        lr = float(group["lr"])
        for p in [p for p in group["params"] if p in before]:
            after, name = _as_matrix(p, group), optimizer._names.get(p, "?")
            numbers = {}
            if lr > 0:
                undecayed = after / (1 - lr * group["weight_decay"])
                numbers["update_rms"] = float((before[p] - undecayed).square().mean().sqrt() / lr)
            numbers["isometry_drift"] = isometry_drift(before[p], after)
            numbers.update(optimizer._note_preconditioner(p, group))
            found.update({f"{what}/{name}": x for what, x in numbers.items()})
    return found


def _as_matrix(p: Tensor, group: dict[str, Any]) -> Tensor:
    """The whole parameter in float32; a kernel as out x (in * k)."""
    whole = full(p.detach()).float()
    return whole.flatten(1) if group["role"] == "convolution" else whole


def describe(optimizer: Any) -> str:
    """A table: every parameter with role, shape, treatment and state bytes."""
    rows = [("parameter", "role", "shape", "treatment", "state bytes")]
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            matrix = group["algorithm"] != "adamw"
            what = optimizer._describe_one(p, group) if matrix else "elementwise"
            rows.append((
                optimizer._names.get(p, "?"), str(group["role"]),
                "x".join(map(str, p.shape)) or "1", f"{group['algorithm']}, {what}",
                f"{tensor_bytes(optimizer.state.get(p, {})):,}",
            ))  # fmt: skip
            total += p.numel() * p.element_size()
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
    lines.append(f"parameters {total:,} bytes, state {optimizer.state_bytes():,} bytes")
    return "\n".join(line.rstrip() for line in lines)
