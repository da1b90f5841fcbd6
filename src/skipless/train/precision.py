"""Reduced precision for forward and backward passes: autocast, chosen by one setting.

Weights, gradients, optimiser state and the loss stay fp32; matrix products run in bf16. bf16 has
fp32's range, so no loss scaling is needed. Read by loop.py and measure.py.
"""

from __future__ import annotations

import contextlib

import torch


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """The context for a forward pass under `precision` ("fp32" or "bf16") on `device`."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
