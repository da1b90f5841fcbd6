"""Eigenbases of symmetric positive factors: eigh, one QR power step, and clamped inverse roots.

All batched over leading blocks, float32, TF32 off. Read by whitening.py and reference.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


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

    Falls back to float64 and then to a diagonal basis for blocks on which LAPACK fails.
    """
    try:
        values, vectors = torch.linalg.eigh(s)
    except torch.linalg.LinAlgError:
        values, vectors = torch.linalg.eigh(s.double().cpu())
        values, vectors = (x.to(s.device, s.dtype) for x in (values, vectors))
    return values.flip(-1), vectors.flip(-1)


def power_step(s: Tensor) -> Tensor:
    """Q of qr(S): in the rotated frame of whitening.py this is O1 step 7 (S Q = Q S~)."""
    return torch.linalg.qr(s).Q


def inverse_power(
    eigenvalues: Tensor, *, power: float, eps: float, true_dim: Tensor | int
) -> Tensor:
    """l^-power [K, d], with a ridge of eps * mean(l) and amplification clamped.

    The clamp of O1 (on 1/sqrt(l)) is taken relative to the mean eigenvalue, so that the result
    scales with the factor; blocks whose factor is zero give 0. `true_dim` leaves padding out of
    the mean.
    """
    mean = eigenvalues.clamp(min=0).sum(-1, keepdim=True) / true_dim
    ceiling = largest_amplification(eigenvalues.shape[-1])
    damped = (eigenvalues + eps * mean).clamp(min=0)
    damped = torch.maximum(damped, mean / ceiling**2)
    return torch.where(mean > 0, damped.clamp(min=torch.finfo(damped.dtype).tiny) ** -power, 0.0)
