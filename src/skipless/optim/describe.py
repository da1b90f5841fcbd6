"""What an optimiser can tell about itself: the table of `describe()`, and isometry drift (O4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skipless.optim.sharding import local


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

    For an orthogonal `before` this is ||W+ W+^T - I||_2. The shorter side is used; stacks give
    their worst matrix, kernels are flattened behind the output channel.
    """
    if before.ndim > 3:
        before, after = before.flatten(1), after.flatten(1)
    if before.shape[-2] > before.shape[-1]:
        before, after = before.mT, after.mT
    gram = before @ before.mT
    change = after @ after.mT - gram
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    return float((torch.linalg.eigvalsh(change).abs().amax(-1) / size).max())


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
