"""Gradient norm by layer, right after a backward pass. Read by `skipless.train`."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.sharded import full

_LAYER = re.compile(r"^(.*?)(?:^|\.)(\d+)\.")


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Euclidean norm of the gradient of each layer's parameters, in order of definition.

    Keys: "0", "1", ... for numbered blocks ("encoder.layers.0" where there are several lists of
    them), the first name part for the rest ("embed_tokens", "norm", "lm_head"). Parameters without
    a gradient count as absent. A non-finite gradient gives a non-finite norm. Sharded (DTensor)
    gradients are gathered. Raises UserError if no parameter has a gradient: the call came before
    backward or after zero_grad.
    """
    names, squares = [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            names.append(name)
            squares.append(_square(parameter.grad))
    if not squares:
        raise UserError(
            f"no parameter of {type(model).__name__} has a gradient; call gradient_norms between "
            "backward() and zero_grad()"
        )
    lists = {match.group(1) for name in names if (match := _LAYER.match(name))}
    totals: dict[str, float] = defaultdict(float)
    device = squares[0].device
    values = torch.stack([square.to(device) for square in squares]).tolist()
    for name, value in zip(names, values, strict=True):
        totals[_key(name, full=len(lists) > 1)] += value
    return {key: value**0.5 for key, value in totals.items()}


def _key(name: str, *, full: bool) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name.split(".")[0]
    return f"{match.group(1)}.{match.group(2)}" if full else match.group(2)


def _square(gradient: Tensor) -> Tensor:
    """Squared norm in float32 at least, so that squares of small half-precision numbers survive."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return full(torch.linalg.vector_norm(gradient, dtype=dtype)).square()
