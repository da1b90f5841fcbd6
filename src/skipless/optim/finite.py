"""Which gradients can be used: those whose squares are finite in float32. Read by base.py."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from skipless.optim.sharding import add_over_ranks
from skipless.sharded import local


def finite(
    params: list[Tensor], names: dict[Tensor, str], skipped: dict[str, int]
) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) where the gradient's norm and its square are finite in float32;
    others are counted in `skipped` by name and left out: averages of squares would keep infinity.

    All of `params` have a gradient; all ranks that share one decide alike.
    """
    gradients = cast("list[Tensor]", [p.grad for p in params])
    # A sum of squares is non-finite if any entry is, or if it overflows.
    pieces = [local(g) for g in gradients]
    pieces = [x.float() if x.dtype == torch.float64 else x for x in pieces]
    sums = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in pieces]
    by_device: dict[torch.device, list[int]] = {}
    for i, s in enumerate(sums):
        by_device.setdefault(s.device, []).append(i)
    pairs = []
    for indices in by_device.values():
        stacked = torch.stack([sums[i] for i in indices])
        add_over_ranks(stacked, [params[i] for i in indices])
        for i, good in zip(indices, torch.isfinite(stacked).tolist(), strict=True):
            if good:
                pairs.append((params[i], gradients[i]))
            else:
                name = names.get(params[i], "?")
                skipped[name] = skipped.get(name, 0) + 1
    return pairs
