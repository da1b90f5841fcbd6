"""How far weight matrices are from isometries, and by how much a step moves them off (O4).

Read by `skipless.optim` users, `skipless.train` and reports. Works on any module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.probes.rows import F64
from skipless.sharded import full
from skipless.sites import is_linear, weight_of


def isometry_error(weight: Tensor, scale: float | None = None) -> float:
    """O4: ||W W^T / c - I||_2 over the shorter side of W [m, n], float64.

    `scale` is c: 1.0 gives the drift of a matrix that should be orthogonal; None takes the best
    one, (l_max + l_min) / 2 of the eigenvalues of W W^T, which gives (l_max - l_min) / (l_max +
    l_min) in [0, 1]: 0 for a scaled isometry, 1 for a singular matrix. NaN for a zero, an
    empty or a non-finite matrix. Raises UserError unless W has two dimensions.
    """
    if weight.dim() != 2:
        raise UserError(f"isometry needs a matrix, not a tensor of shape {tuple(weight.shape)}")
    w = full(weight.detach())
    w = (w.cpu() if w.device.type == "mps" else w).to(F64)
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    if gram.numel() == 0 or not torch.isfinite(gram).all():
        return math.nan
    values = torch.linalg.eigvalsh(gram)
    low, high = max(0.0, float(values[0])), float(values[-1])
    if scale is None:
        return (high - low) / (high + low) if high > 0 else math.nan
    return max(abs(high / scale - 1), abs(low / scale - 1))


def hidden_matrices(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the linear layers inside numbered blocks, by parameter name."""
    found = {
        f"{name}.weight": weight_of(module)
        for name, module in model.named_modules()
        if is_linear(module) and any(part.isdigit() for part in name.split("."))
    }
    if not found:
        raise UserError(f"{type(model).__name__} has no linear layer inside numbered blocks")
    return found


def isometry_drift(model: nn.Module | Mapping[str, Tensor]) -> dict[str, float]:
    """`isometry_error` relative to the best scalar, of every hidden matrix by parameter name."""
    matrices = hidden_matrices(model) if isinstance(model, nn.Module) else model
    return {name: isometry_error(weight) for name, weight in matrices.items()}


def polar_step_bound(lr: float) -> float:
    """O4: the most one orthogonal (polar) step of size lr moves an orthogonal W, 2 lr + lr^2."""
    return 2 * lr + lr**2


def sign_step_estimate(lr: float, dim: int) -> float:
    """O4: the drift of a generic sign step on an orthogonal d x d W, 2 sqrt(2 d) lr + 4 d lr^2."""
    return 2 * math.sqrt(2 * dim) * lr + 4 * dim * lr**2
