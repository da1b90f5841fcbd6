"""Eigenbases and inverse roots of symmetric positive factors, batched over blocks, in float32.

eigh and QR suit CPUs; on CUDA both are loops over the batch, so `newton_inverse_root` uses matmuls
only. Read by sides.py and reference.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

STRIP = 64
"""Rows a strip of a triangular product; smaller strips lose more than they save."""


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Plain float32 matmuls inside: factor products in TF32 lose the small eigenvalues."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def largest_amplification(dim: int) -> int:
    """Clamp of 1/sqrt(l) for one factor (O1 step 3)."""
    return max(10, min(dim, 4000))


def sorted_eigh(s: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues descending [K, d], eigenvectors as columns [K, d, d]) of symmetric s [K, d, d].

    Where LAPACK fails to converge in float32 the work is done again in float64.
    """
    try:
        values, vectors = torch.linalg.eigh(s)
    except torch.linalg.LinAlgError:
        values, vectors = torch.linalg.eigh(s.double().cpu())
        values, vectors = (x.to(s.device, s.dtype) for x in (values, vectors))
    return values.flip(-1), vectors.flip(-1)


def power_step(s: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration on symmetric s [K, d, d]: (Q, Q^T s Q), where s = Q R.

    Of Q^T s Q = R Q at least the lower triangle is right: on CPUs only that is computed, strip by
    strip, from the triangle R, a sixth of a full product.
    """
    if s.device.type != "cpu":
        q, r = torch.linalg.qr(s)
        return q, r @ q
    # s is its own transpose, and the transpose has the layout LAPACK wants. `linalg.qr` would copy
    # R out besides.
    packed, tau = torch.geqrf(s.mT)
    q = torch.linalg.householder_product(packed, tau)
    turned, dim = torch.empty_like(s), s.shape[-1]
    for a in range(0, dim, STRIP):
        end = min(a + STRIP, dim)
        rows = packed[..., a:end, a:].clone()
        rows[..., : end - a].triu_()
        turned[..., a:end, :end] = rows @ q[..., a:, :end]
    return q, turned


def inverse_power(
    eigenvalues: Tensor, *, power: float, eps: float, true_dim: Tensor | int
) -> Tensor:
    """l^-power [K, d], with a ridge of eps * mean(l) and amplification clamped.

    The clamp of O1 (on 1/sqrt(l)) is taken relative to the mean eigenvalue, so that the result
    scales with the factor; blocks whose factor is zero give 0. `true_dim` leaves padding out of
    the mean.
    """
    positive = eigenvalues.clamp(min=0)
    mean = positive.sum(-1, keepdim=True) / true_dim
    ceiling = largest_amplification(eigenvalues.shape[-1])
    damped = torch.maximum(positive + eps * mean if eps else positive, mean / ceiling**2)
    root = damped.rsqrt() if power == 0.5 else damped**-power
    return root.masked_fill_(mean <= 0, 0.0)


def newton_inverse_root(s: Tensor, *, power: float, eps: float, steps: int = 40) -> Tensor:
    """s^-1/2 or s^-1/4 of symmetric positive s [K, d, d] by coupled Newton-Schulz: matmuls only.

    The ridge is (eps + 1/ceiling^2) * mean eigenvalue, which bounds the condition as the clamp of
    `inverse_power` does. A zero block gives zero. Stops when all blocks have converged to float32.
    Raises ValueError for a power other than 1/2 and 1/4.
    """
    if power not in (0.5, 0.25):
        raise ValueError(f"power is {power}; 0.5 or 0.25 was expected")
    dim = s.shape[-1]
    mean = s.diagonal(dim1=-2, dim2=-1).mean(-1).view(-1, 1, 1)
    eye = torch.eye(dim, dtype=s.dtype, device=s.device)
    ridge = (eps + largest_amplification(dim) ** -2) * mean
    safe = torch.where(mean > 0, s + ridge * eye, eye)
    root, inverse = _coupled(safe, eye, steps)
    if power == 0.25:
        inverse = _coupled((root + root.mT) / 2, eye, steps)[1]
    return torch.where(mean > 0, (inverse + inverse.mT) / 2, 0.0)


def _coupled(s: Tensor, eye: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """(s^1/2, s^-1/2): Y <- Y (3I - ZY)/2, Z <- (3I - ZY) Z/2 from Y = s/c, Z = I."""
    # The largest absolute row sum bounds the largest eigenvalue, often far below the trace.
    c = s.abs().sum(-1).amax(-1).view(-1, 1, 1)
    y, z = s / c, eye.expand_as(s)
    tolerance = 2e-6 * math.sqrt(s.shape[-1])
    for _ in range(steps):
        residual = eye - z @ y
        if residual.square().sum((-2, -1)).amax().sqrt() < tolerance * math.sqrt(s.shape[-1]):
            break
        half = eye + residual / 2
        y, z = y @ half, half @ z
    return y * c.sqrt(), z / c.sqrt()
