"""Tensors spread over processes (DTensor, FSDP2): told apart, gathered, or taken apart.

Read by optim, probes, model and train. `torch.distributed.tensor` is never imported here: that is
slow, and not every build of torch has it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor. Where the module was never imported, none can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def full(x: Tensor) -> Tensor:
    """The whole tensor on every rank (a collective); `x` itself if it is not sharded."""
    return x.full_tensor() if is_sharded(x) else x


def local(x: Tensor) -> Tensor:
    """This rank's piece (it may be empty); `x` itself if it is not sharded."""
    return x.to_local() if is_sharded(x) else x
