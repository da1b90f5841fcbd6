"""KL-Shampoo exactly as published: O1's seven steps, whole matrices, float32, one at a time.

The slow yardstick for whitening.py's fast path, and the mode for literal reproductions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skipless import fallback
from skipless.optim.blocks import Layout
from skipless.optim.roots import largest_amplification, sorted_eigh


def reference_update(
    state: dict[str, Any], grad: Tensor, group: dict[str, Any], start: str
) -> Tensor | None:
    """Advance O1 by one gradient m x n and return the step to subtract (None on the first call).

    `start="gradient"` replaces step 1 by factors and eigenvalues at the gradient's RMS, updates
    from the first call on and bias-corrects the momentum.
    """
    g = grad.float()
    m, n = g.shape
    b1, b2 = group["betas"]
    if not state:
        state["step"] = torch.zeros(())
        _start(state, g, b2, start)
        if start == "published":
            state["step"] += 1
            state["momentum"] = (1 - b1) * g
            return None
        state["momentum"] = torch.zeros_like(g)
    state["step"] += 1
    q_l, q_r = state["left_basis"], state["right_basis"]
    l_l, l_r = state["left_eigenvalues"], state["right_eigenvalues"]

    state["momentum"].mul_(b1).add_(g, alpha=1 - b1)  # step 2
    momentum = state["momentum"]
    if start == "gradient":
        momentum = momentum / (1 - b1 ** state["step"].item())
    p = q_l.T @ momentum @ q_r  # step 3
    s = _clamped(l_l, m)[:, None] * _clamped(l_r, n)[None, :]
    update = q_l @ (p * (s / (1 + group["eps"] * s))) @ q_r.T

    inverse_r = (q_r / l_r) @ q_r.T  # step 5
    inverse_l = (q_l / l_l) @ q_l.T
    state["left"].mul_(b2).add_(g @ inverse_r @ g.T, alpha=(1 - b2) / n)
    state["right"].mul_(b2).add_(g.T @ inverse_l @ g, alpha=(1 - b2) / m)
    square = (q_l.T @ g @ q_r).square()  # step 6
    state["left_eigenvalues"] = b2 * l_l + (1 - b2) * (square / l_r[None, :]).mean(1)
    state["right_eigenvalues"] = b2 * l_r + (1 - b2) * (square / l_l[:, None]).mean(0)
    if int(state["step"].item()) % group["refresh_every"] == 0:  # step 7
        state["left_basis"] = fallback.qr(state["left"] @ q_l)[0]
        state["right_basis"] = fallback.qr(state["right"] @ q_r)[0]
    return update


def whole_matrix(layout: Layout) -> tuple[int, int]:
    """Rows and columns of a parameter as one matrix: a stack (experts) is a tall one, a kernel
    out x (in * k)."""
    return layout.stack * layout.m, layout.n


def reference_shapes(m: int, n: int) -> dict[str, tuple[int, ...]]:
    """State of a matrix m x n, apart from its step count."""
    return {
        "left": (m, m), "right": (n, n), "left_basis": (m, m), "right_basis": (n, n),
        "left_eigenvalues": (m,), "right_eigenvalues": (n,), "momentum": (m, n),
    }  # fmt: skip


def _start(state: dict[str, Any], g: Tensor, b2: float, start: str) -> None:
    m, n = g.shape
    if start == "published":  # step 1
        state["left"] = (1 - b2) * (g @ g.T) / n
        state["right"] = (1 - b2) * (g.T @ g) / m
        state["left_basis"] = sorted_eigh(state["left"])[1].contiguous()
        state["right_basis"] = sorted_eigh(state["right"])[1].contiguous()
        value = torch.full((), 0.1, device=g.device)
    else:
        value = g.square().mean().sqrt().clamp(min=1e-30)
        for what, dim in (("left", m), ("right", n)):
            state[what] = torch.eye(dim, device=g.device) * value
            state[f"{what}_basis"] = torch.eye(dim, device=g.device)
    state["left_eigenvalues"] = value.repeat(m)
    state["right_eigenvalues"] = value.repeat(n)


def _clamped(eigenvalues: Tensor, dim: int) -> Tensor:
    return eigenvalues.rsqrt().clamp(max=largest_amplification(dim))
