"""Maps between Gaussians (U2): by Cholesky factors, and by optimal transport.

eigh's own backward divides by differences of eigenvalues, which are 0 in a covariance shrunk to
the identity; the square roots here use the divided differences in closed form instead. Read by
`aligners.py`. Legend: B batch, D width; matrices act on row vectors, e M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipless import fallback


class _SymmetricPower(torch.autograd.Function):
    """S^(1/2) or S^(-1/2) of symmetric positive definite matrices [B, D, D].

    The derivative is V [(V^T dS V) * K] V^T, K_ij = (f(l_i) - f(l_j)) / (l_i - l_j): for the root
    1 / (r_i + r_j), for the inverse root -1 / (r_i r_j (r_i + r_j)), with r = sqrt(l).
    """

    @staticmethod
    def forward(ctx, matrix: Tensor, inverse: bool) -> Tensor:
        values, vectors = fallback.eigh((matrix + matrix.mT) / 2)
        tiny = torch.finfo(matrix.dtype).eps * values[:, -1:].clamp(min=1e-30)
        roots = values.maximum(tiny).sqrt()
        ctx.save_for_backward(roots, vectors)
        ctx.inverse = inverse
        return (vectors * (1 / roots if inverse else roots)[:, None, :]) @ vectors.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        roots, vectors = ctx.saved_tensors
        kernel = 1 / (roots[:, :, None] + roots[:, None, :])
        if ctx.inverse:
            kernel = -kernel / (roots[:, :, None] * roots[:, None, :])
        inner = vectors.mT @ ((grad + grad.mT) / 2) @ vectors
        return vectors @ (inner * kernel) @ vectors.mT, None


def symmetric_root(matrix: Tensor, *, inverse: bool = False) -> Tensor:
    """S^(1/2), or S^(-1/2), of symmetric positive definite [B, D, D]."""
    return _SymmetricPower.apply(matrix, inverse)


def bures_map(target: Tensor, source: Tensor) -> Tensor:
    """M = S_f^(-1/2) (S_f^(1/2) S_x S_f^(1/2))^(1/2) S_f^(-1/2), the optimal transport from
    N(0, source) to N(0, target); symmetric, [B, D, D]."""
    root, inverse = symmetric_root(source), symmetric_root(source, inverse=True)
    return inverse @ symmetric_root(root @ target @ root) @ inverse


def cholesky_map(target: Tensor, source: Tensor) -> Tensor:
    """M = L_f^-T L_x^T: whitens by the source's own factor, colours by the target's, [B, D, D]."""
    factor_x, factor_f = torch.linalg.cholesky(target), torch.linalg.cholesky(source)
    return torch.linalg.solve_triangular(factor_f.mT, factor_x.mT, upper=True)
