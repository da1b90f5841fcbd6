"""What weights keep in memory, and what their values would need.

Read by measuring.py and timing.py.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import torch
from torch import Tensor, nn

from skipless.doctor.costs import CODES, COPIES, VIEWS, ZEROS
from skipless.doctor.evidence import WeightMemory
from skipless.sites import is_linear, weight_of

MAX_CODES = 256
"""Distinct values that 8 bits can name."""
SAMPLE = 4096
"""Values looked at first: ordinary weights show more than MAX_CODES among so few."""


def weight_memory(model: nn.Module) -> WeightMemory:
    """Bytes of all storages of parameters and buffers, each once, and why some could go.

    Reasons: storage behind a slice; equal tensors in two places; at most 256 distinct values of a
    matrix in 16 or 32 bits; whole rows of zeros in a linear layer. Constant matrices, such as zeros
    to start from, are left out.
    """
    tensors = {n: t for n, t in chain(model.named_parameters(), model.named_buffers())
               if t.device.type != "meta"}  # fmt: skip
    storages: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        storages[tensor.untyped_storage().data_ptr()].append((name, tensor.detach()))
    linear = {f"{n}.weight" for n, m in model.named_modules() if is_linear(m)}
    stored, reasons = 0, defaultdict(int)
    seen: list[Tensor] = []
    for group in storages.values():
        kept = group[0][1].untyped_storage().nbytes()
        used = min(kept, sum({t.data_ptr(): t.numel() * t.element_size() for _, t in group}
                             .values()))  # fmt: skip
        stored += kept
        if kept > used:
            reasons[VIEWS] += kept - used
        for name, tensor in group[:1]:
            size = tensor.numel() * tensor.element_size()
            if tensor.dim() < 2 or not size or bool((tensor == tensor.flatten()[:1]).all()):
                continue  # a constant matrix is a start, and equal ones are no copies
            if any(_same(tensor, other) for other in seen):
                reasons[COPIES] += size
                continue
            seen.append(tensor)
            wide = tensor.is_floating_point() and tensor.element_size() > 1
            if wide and _num_values(tensor) <= MAX_CODES:
                reasons[CODES] += size - tensor.numel()
            elif name in linear:
                empty = int((tensor == 0).all(dim=1).sum())
                reasons[ZEROS] += empty * tensor.shape[1] * tensor.element_size()
    return WeightMemory(stored=stored, reasons={k: v for k, v in reasons.items() if v})


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage once."""
    return weight_memory(model).stored


def share_of_zeros(model: nn.Module) -> float:
    """Share of the weights of linear layers that are exactly 0."""
    weights = [weight_of(m).detach() for m in model.modules() if is_linear(m)]
    total = sum(w.numel() for w in weights)
    return sum(int((w == 0).sum()) for w in weights) / total if total else 0.0


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _num_values(tensor: Tensor) -> int:
    """Distinct values of a matrix; of a small one, which needs few anyway, more than MAX_CODES."""
    flat = tensor.reshape(-1)
    if len(flat) <= 4 * MAX_CODES:
        return MAX_CODES + 1
    stride = max(1, len(flat) // SAMPLE)
    if len(torch.unique(flat[::stride])) > MAX_CODES:
        return MAX_CODES + 1
    return len(torch.unique(flat))
