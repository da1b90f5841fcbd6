"""What some device has no kernels for: done on the CPU for that device, by torch for the others.

MPS has no float64, and torch 2.13 has eigh and svd for CPU and CUDA only; its QR on MPS, new since
2.10, is slower than the way to the CPU and back. What is handed in stays where it is. Read by
every room that computes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def near(x: Tensor) -> Tensor:
    """x where float64 and LAPACK, or CUDA's form of it, reach it."""
    return x.cpu() if x.device.type == "mps" else x


def double(x: Tensor) -> Tensor:
    """x in float64: on its device, or on the CPU where the device has none."""
    return near(x).double()


def eigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues ascending [..., d], eigenvectors as columns [..., d, d]) of symmetric x; of x
    only the lower triangle is read. On x's device. Raises torch.linalg.LinAlgError."""
    values, vectors = torch.linalg.eigh(near(x))
    return values.to(x.device), vectors.to(x.device)


def eigvalsh(x: Tensor) -> Tensor:
    """Eigenvalues ascending [..., d] of symmetric x, of which the lower triangle is read."""
    return torch.linalg.eigvalsh(near(x)).to(x.device)


def qr(x: Tensor) -> tuple[Tensor, Tensor]:
    """(Q, R) of x [..., m, n], reduced: Q [..., m, k], R [..., k, n], k = min(m, n)."""
    q, r = torch.linalg.qr(near(x))
    return q.to(x.device), r.to(x.device)


def svd(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(U, singular values descending, V^T) of x [..., m, n], reduced."""
    u, s, vh = torch.linalg.svd(near(x), full_matrices=False)
    return u.to(x.device), s.to(x.device), vh.to(x.device)
