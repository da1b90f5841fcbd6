"""Factorisations of matrices on any device: torch's own, on the CPU for a device that has none.

torch 2.13 has eigh and svd for CPU and CUDA only, and its QR on MPS, new since 2.10, is slower than
the way to the CPU and back. What is handed in stays where it is; results come back to its device in
its dtype. Read by optim and model.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _near(x: Tensor) -> Tensor:
    """x where LAPACK, or CUDA's form of it, reaches it."""
    return x.cpu() if x.device.type == "mps" else x


def eigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues ascending [..., d], eigenvectors as columns [..., d, d]) of symmetric x; of x
    only the lower triangle is read. Raises torch.linalg.LinAlgError without convergence."""
    values, vectors = torch.linalg.eigh(_near(x))
    return values.to(x.device), vectors.to(x.device)


def eigvalsh(x: Tensor) -> Tensor:
    """Eigenvalues ascending [..., d] of symmetric x, of which the lower triangle is read."""
    return torch.linalg.eigvalsh(_near(x)).to(x.device)


def qr(x: Tensor) -> tuple[Tensor, Tensor]:
    """(Q, R) of x [..., m, n], reduced: Q [..., m, k], R [..., k, n], k = min(m, n)."""
    q, r = torch.linalg.qr(_near(x))
    return q.to(x.device), r.to(x.device)


def svd(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(U, singular values descending, V^T) of x [..., m, n], reduced."""
    u, s, vh = torch.linalg.svd(_near(x), full_matrices=False)
    return u.to(x.device), s.to(x.device), vh.to(x.device)
