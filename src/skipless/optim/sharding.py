"""Sharded parameters (DTensor, FSDP2): whole matrix in, own shard out.

A whitened or orthogonalised update needs the whole matrix. `full` gathers it (a collective: every
rank must call it), `assign` writes each rank's own piece of a whole tensor back.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor. Does not import torch.distributed: where it was never imported no
    tensor can be one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def full(x: Tensor) -> Tensor:
    """The whole tensor on every rank; `x` itself if it is not sharded."""
    return x.full_tensor() if is_sharded(x) else x


def local(x: Tensor) -> Tensor:
    """This rank's piece (it may be empty); `x` itself if it is not sharded."""
    return x.to_local() if is_sharded(x) else x


def own_piece(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's piece of `whole`, cut as `like` is. No communication."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    replicated = DTensor.from_local(
        whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return replicated.redistribute(placements=like.placements).to_local()


def decay_and_subtract(p: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    """W <- (W - lr U)(1 - lr decay) in float32, written back in W's dtype (O1 step 4)."""
    piece, target = own_piece(update, p), local(p)
    if target.numel() == 0:
        return
    if target.dtype == torch.float32:
        target.sub_(piece, alpha=lr)
        if weight_decay:
            target.mul_(1 - lr * weight_decay)
        return
    wide = target.float().sub_(piece, alpha=lr)
    target.copy_(wide.mul_(1 - lr * weight_decay))
