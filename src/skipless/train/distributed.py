"""One process or many: the same loop. What differs is here, in the order a run meets it.

    start      read torchrun's environment, open gloo (CPU) or nccl (CUDA)
    first      rank 0 does a thing on disk, the others wait and learn of its errors
    parallelise  activation checkpointing, then torch.compile, then FSDP2, each block by block
    gather     a sharded tensor as a whole one, for the file that others read

FSDP2 (`fully_shard`) shards parameters, gradients and optimiser state over all processes: block by
block, so that one block's weights are whole at a time, and the rest (embedding, final norm, head)
as one root group. Gradients are averaged over ranks by FSDP; the loop scales its loss accordingly.
Reduced precision is autocast (see precision.py), so weights travel between processes in fp32 and
one process and many compute the same. Read by loop.py, checkpoint.py and measure.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from skipless.config import TrainConfig
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.sharded import full

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """True for the one process that writes logs."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    def total(self, *values: float) -> list[float]:
        """Sum each value over all processes, in float64."""
        if not self.is_distributed:
            return [float(v) for v in values]
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return summed.tolist()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in rank order (small picklable things only)."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only; every rank gets its result, or its exception."""
        if not self.is_distributed:
            return action()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = action()
            except Exception as error:  # told to all ranks, raised below
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run `action` on the first process of each machine, then on its others.

        For work that leaves its result on a disk where the others then find it.
        """
        result = self.agree(lambda: action() if self.local_rank == 0 else None)
        return self.agree(lambda: result if self.local_rank == 0 else action())

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank; if it failed anywhere, raise the first failure everywhere."""
        result = error = None
        try:
            result = action()
        except Exception as caught:  # told to all ranks, raised below
            error = caught
        for failure in self.gather(error):
            if failure is not None:
                raise failure
        return result


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; "auto" takes cuda, then mps, then cpu. Raises UserError."""
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"train.device is {name!r}; use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("train.device is 'cuda' but torch sees no CUDA device; use cpu or auto")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("train.device is 'mps' but torch sees no such device; use cpu or auto")
    return device


@contextlib.contextmanager
def start(config: TrainConfig) -> Iterator[World]:
    """Join the processes that torchrun started (its environment variables), or be alone.

    Leaves the process group as found: one opened here is closed at the end. Raises UserError when
    the sequences of a batch cannot be dealt out evenly.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.batch_size % size:
        raise UserError(
            f"train.batch_size {config.batch_size} does not divide over {size} processes; "
            f"choose a multiple of {size}"
        )
    device = choose_device(config.device, local_rank)
    if size == 1:
        yield World(device=device)
        return
    if device.type == "mps":
        raise UserError("several processes need cpu or cuda, not mps; set --train.device cpu")
    opened = not dist.is_initialized()
    if opened:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(
            rank=dist.get_rank(), size=dist.get_world_size(), local_rank=local_rank, device=device
        )
    finally:
        if opened:
            # Sharded modules sit in reference cycles and hold the group; a group that is still held
            # when the interpreter exits can abort the process.
            gc.collect()
            dist.destroy_process_group()


def parallelise(model: Transformer, config: TrainConfig, world: World) -> None:
    """Prepare `model` in place for training: recompute, compile, shard.

    `model.layer_list` names the blocks. Module and parameter names stay as they are, so that
    probes, checkpoints and role routing see the same model whatever the settings.
    """
    blocks = list(model.layer_list)
    if config.activation_checkpointing:
        for block in blocks:
            # An instance attribute and not a wrapper module: a wrapper would rename parameters.
            block.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
            )
    if config.compile:
        for block in blocks:
            block.compile()
    if world.is_distributed:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def average_gradients(model: nn.Module, on: bool) -> None:
    """Whether the next backward pass of a sharded model averages its gradients over ranks."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule), "`parallelise` shards the model of several processes"
    model.set_requires_gradient_sync(on)


def reshard(model: nn.Module) -> None:
    """Give whole weights back, so that parameters are the sharded ones the optimiser knows.

    FSDP keeps the root group whole after a forward pass, for the backward pass that evaluation
    never makes.
    """
    for module in model.modules():
        give_back: Callable[[], None] | None = getattr(module, "reshard", None)
        if give_back is not None:
            give_back()


def drop_compiled(model: nn.Module) -> None:
    """Undo `torch.compile` of the blocks."""
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl = None


def clip(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients so that their total norm is at most `max_norm` (None: leave them).

    Returns the norm before. Sharded gradients count over all processes. A non-finite norm changes
    nothing: the loop stops on it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = nn.utils.get_total_norm(gradients)
    norm = float(whole(total))
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        # The factor is a plain number, which sharded and whole gradients both take.
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm


def whole(tensor: Tensor) -> Tensor:
    """The unsharded tensor, detached. All ranks must call it for a sharded one."""
    return full(tensor.detach())
