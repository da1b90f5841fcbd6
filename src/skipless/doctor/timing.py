"""Time, work and memory of one model on one batch, for two models to be compared.

Read by patient.py.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from skipless.doctor.evidence import Cost
from skipless.doctor.measuring import Batch, call
from skipless.doctor.weights import share_of_zeros, weight_bytes

NUM_TIMED = 5
"""Forward passes of which the fastest counts: what a busy machine adds is never negative."""


def cost(model: nn.Module, batch: Batch) -> Cost:
    """Work, time, memory and the time share of every operator of one forward pass.

    On CUDA the device's own time by operator, elsewhere the processor's.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        with counter:
            call(model, batch)
        seconds = min(_timed(model, batch) for _ in range(NUM_TIMED))
        operators = time_by_operator(model, batch)
    return Cost(
        seconds=seconds, flops=float(counter.get_total_flops()), zeros=share_of_zeros(model),
        saved_bytes=saved_bytes(model, batch), weight_bytes=weight_bytes(model),
        operators=operators,
    )  # fmt: skip


def time_by_operator(model: nn.Module, batch: Batch) -> tuple[tuple[str, float], ...]:
    """(operator, share of the time of one forward pass), largest first."""
    from torch.profiler import ProfilerActivity, profile

    on_cuda = _device(model).type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with torch.no_grad(), profile(activities=activities) as found:
        call(model, batch)
        _wait(model)
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    times = [(row.key.removeprefix("aten::"), float(getattr(row, key)))
             for row in found.key_averages()]  # fmt: skip
    total = sum(t for _, t in times)
    if not total:
        return ()
    shares = [(name, t / total) for name, t in times if t > 0]
    return tuple(sorted(shares, key=lambda item: -item[1]))


def saved_bytes(model: nn.Module, batch: Batch) -> int:
    """Bytes that a forward pass keeps for its backward, each storage once, weights left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor  # held, so that its address is not used again
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call(model, batch)
    del result
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def _timed(model: nn.Module, batch: Batch) -> float:
    _wait(model)
    begun = time.perf_counter()
    call(model, batch)
    _wait(model)
    return time.perf_counter() - begun


def _wait(model: nn.Module) -> None:
    if _device(model).type == "cuda":
        torch.cuda.synchronize()
    elif _device(model).type == "mps":
        torch.mps.synchronize()


def _device(model: nn.Module) -> torch.device:
    return next(iter(model.parameters()), torch.empty(0)).device
