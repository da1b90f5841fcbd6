"""The AdamW part of every optimiser: what is no hidden matrix, and everything under AdamW.

Read by base.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from skipless.optim.describe import step_device
from skipless.sharded import local


def update_adamw(
    states: dict[Tensor, dict[str, Any]],
    group: dict[str, Any],
    pairs: list[tuple[Tensor, Tensor]],
) -> None:
    """One decoupled AdamW step of each (parameter, gradient); `states` is the optimiser's.

    Moments are float32, of a float64 parameter float64.
    """
    lists: dict[tuple, list[tuple]] = {}
    for p, g in pairs:
        state, wide = states[p], torch.promote_types(p.dtype, torch.float32)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device(p))
            state["exp_avg"] = torch.zeros_like(p, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=wide)
        weight, gradient = local(p), local(g)
        if weight.numel() == 0:
            state["step"] += 1
            continue
        master = weight.to(wide)
        row = (master, gradient.to(master.dtype), local(state["exp_avg"]),
               local(state["exp_avg_sq"]), state["step"], weight)  # fmt: skip
        # Fused kernels walk through memory: entries must lie alike in all four.
        fused = master.device.type in ("cpu", "cuda") and _lie_alike(*row[:4])
        lists.setdefault((master.device, fused), []).append(row)
    for (_, fused), rows in lists.items():
        masters, grads, first, second, steps, weights = map(list, zip(*rows, strict=True))
        adamw(
            masters, grads, first, second, [], steps,
            foreach=not fused, capturable=False, differentiable=False, fused=fused,
            grad_scale=None, found_inf=None, has_complex=False, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=float(group["lr"]),
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for master, weight in zip(masters, weights, strict=True):
            if master is not weight:
                weight.copy_(master)


def _lie_alike(*tensors: Tensor) -> bool:
    """Whether tensors of one shape are dense and have their entries in the same order."""
    first = tensors[0]
    if all(x.is_contiguous() for x in tensors):
        return True
    order = sorted(range(first.ndim), key=first.stride, reverse=True)
    return first.permute(order).is_contiguous() and all(
        x.stride() == first.stride() for x in tensors
    )
