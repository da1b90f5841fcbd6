"""Eigenbases and inverse roots of symmetric positive factors, batched over blocks, in float32.

eigh and QR suit CPUs; on CUDA both are loops over the batch, so `jacobi_step` (eigenbases) and
`newton_inverse_root` use matmuls only. Read by sides.py and reference.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from skipless import fallback

STRIP = 64
"""Rows a strip of a triangular product; smaller strips lose more than they save."""

DAMPING = 1.0
"""Of Jacobi angles. From 0.35 to 2 the error after two or three sweeps is least near 1 and flat."""
SMALLEST_CORRELATION = 1e-4
"""Correlations far below it are rounding, and turn nothing."""
POLAR_START = (0.99681237, -0.43513909, 0.14768749)
"""a + b g + c g^2 = (1 + g)^-1/2 within 0.0032 for g in [0, 1] (minimax, by linear programming)."""


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Plain float32 matmuls inside: factor products in TF32 lose the small eigenvalues."""
    if not torch.cuda.is_available():
        yield
        return
    # What `set_float32_matmul_precision` set shows here too; its own getter raises where somebody
    # has set this.
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if before in ("none", "ieee"):
        yield
        return
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def largest_amplification(dim: int) -> int:
    """Clamp of 1/sqrt(l) for one factor (O1 step 3)."""
    return max(10, min(dim, 4000))


def sorted_eigh(s: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues descending [K, d], eigenvectors as columns [K, d, d]) of symmetric s [K, d, d].

    Where LAPACK fails to converge in float32 the work is done again in float64.
    """
    try:
        values, vectors = fallback.eigh(s)
    except torch.linalg.LinAlgError:
        values, vectors = torch.linalg.eigh(s.cpu().double())
        values, vectors = (x.to(s.device, s.dtype) for x in (values, vectors))
    return values.flip(-1), vectors.flip(-1)


def power_step(s: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration on symmetric s [K, d, d]: (Q, Q^T s Q), where s = Q R.

    Of Q^T s Q = R Q at least the lower triangle is right: on CPUs only that is computed, strip by
    strip, from the triangle R, a sixth of a full product.
    """
    if s.device.type != "cpu":
        q, r = fallback.qr(s)
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


def jacobi_step(s: Tensor, sweeps: int = 1) -> tuple[Tensor, Tensor]:
    """(Q, Q^T s Q) of symmetric positive s [K, d, d], less off the diagonal: matmuls only.

    A sweep of Jacobi rotations, all pairs at once: Q is the orthogonal polar factor of I + X, with
    X skew from `jacobi_angles`. Nothing is read back by the host. A zero matrix gives the identity;
    zero rows (padding) are left alone. Pairs keep their places: no columns are swapped.
    """
    turn = _nearest_orthogonal(jacobi_angles(s))
    turned = turn.mT @ s @ turn
    for _ in range(sweeps - 1):
        q = _nearest_orthogonal(jacobi_angles(turned))
        turn, turned = turn @ q, q.mT @ turned @ q
    return turn, turned


def in_descending_order(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of q and rows and columns of s [K, d, d] with the diagonal of s descending, as
    `sorted_eigh` has them: a QR power step expects that order. Equal values keep theirs."""
    order = s.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    columns = order.unsqueeze(-2).expand_as(s)
    return q.gather(-1, columns), s.gather(-1, columns).gather(-2, columns.mT)


def jacobi_angles(s: Tensor) -> Tensor:
    """Skew X [K, d, d], tangents of the rotations that take s [K, d, d] towards a diagonal.

    With correlations C = s / sqrt(l_i l_j) and gaps r = (l_j - l_i) / sqrt(l_i l_j), l = diag(s),

        X_ij = C_ij sign(r_ij) / sqrt(r_ij^2 + DAMPING^2 max_k(c_i, c_j) + SMALLEST^2),

    c_i the sum of C_ij^2 over j != i. Of one pair alone, X = C / r is first-order Jacobi; its sign
    means the smaller of the two rotations (at most 45 degrees). The damping is what the row holds
    off the diagonal, so rows of X stay below 1 / DAMPING where eigenvalues cluster, and it fades
    as fast as the error it guards. Eigenvalues below `inverse_power`'s clamp count as the clamp.
    """
    diagonal = s.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    mean = torch.where(mean > 0, mean, 1.0)
    values = diagonal / mean
    scale = values.clamp(min=largest_amplification(s.shape[-1]) ** -2).rsqrt()
    both = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    c = s / mean.unsqueeze(-1) * both
    c = c - torch.diag_embed(c.diagonal(dim1=-2, dim2=-1))
    at = torch.arange(s.shape[-1], device=s.device, dtype=s.dtype)
    order = at - at.unsqueeze(-1)
    # Of equal eigenvalues the order decides the sign, so that X stays skew.
    gap = (values.unsqueeze(-2) - values.unsqueeze(-1)) * both + 1e-12 * order
    rows = c.square().sum(-1)
    rows = torch.maximum(rows.unsqueeze(-1), rows.unsqueeze(-2))
    damping = gap.square() + DAMPING**2 * rows + SMALLEST_CORRELATION**2
    x = c * gap.sign() * damping.rsqrt()
    return (x - x.mT) / 2


def _nearest_orthogonal(x: Tensor) -> Tensor:
    """The orthogonal polar factor of I + x, x [K, d, d] skew, first scaled to a norm below 1.

    (I + x)(I + g)^-1/2 with g = x^T x, at first by the best quadratic in g on [0, 1] (to 0.0032),
    then by one Newton-Schulz step of fifth order (to rounding): six products.
    """
    g = -(x @ x)
    g2 = g @ g
    # A bound of the norm that is at most d^(1/8) too large: of g^2, the Frobenius norm.
    size = g2.square().sum((-2, -1), keepdim=True) ** 0.125
    by = 1 / size.clamp(min=1.0)
    a, b, c = POLAR_START
    p = b * by**2 * g + c * by**4 * g2
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    q = p + by * (x @ p)
    r = -(q.mT @ q)
    r.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return q + q @ (r / 2 + 0.375 * (r @ r))


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
