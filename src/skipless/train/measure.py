"""Measurements at a step: held-out loss, and what happens inside the model.

Both run in eval mode without gradients on fixed held-out batches, so that rows of different steps
compare. Read by loop.py.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.config import ProbeConfig, RunConfig
from skipless.data import PreparedData, open_batches
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.probes import Probe, gradient_norms, isometry_drift
from skipless.sharded import full
from skipless.train.distributed import World, reshard
from skipless.train.precision import autocast

Batch = tuple[Tensor, Tensor]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; training mode and sharding are restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        reshard(model)
        model.train(training)


def held_out_loss(
    model: nn.Module,
    batches: list[Batch],
    world: World,
    *,
    precision: str = "fp32",
    check: Callable[[], None] = lambda: None,
) -> float:
    """Mean cross-entropy in nats over all labels of `batches` ([B, T] pairs), in float64.

    Batches are dealt out over the processes; a rank left without one in the last round repeats a
    batch with weight 0, because sharded models need every rank in every forward pass. `check` is
    called between batches and may raise. Raises UserError for no batches.
    """
    if not batches:
        raise UserError("there are no held-out batches; raise train.eval_tokens or hold out more")
    nats = num_tokens = 0.0
    with evaluating(model):
        for start in range(0, len(batches), world.size):
            check()
            mine = start + world.rank
            ids, labels = batches[min(mine, len(batches) - 1)]
            with autocast(precision, world.device):
                loss = model(ids.to(world.device), labels=labels.to(world.device)).loss
            count = int((labels != -100).sum()) if mine < len(batches) else 0
            nats += float(loss) * count
            num_tokens += count
    nats, num_tokens = world.total(nats, num_tokens)
    return nats / num_tokens


def num_labels(batches: list[Batch]) -> int:
    """Tokens, or passages of a classifier, that the loss on `batches` is the mean over."""
    return sum(int((labels != -100).sum()) for _, labels in batches)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes allocated on a CUDA device so far, elsewhere the peak resident size of this
    process; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # Linux; ru_maxrss there is at least the parent's
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):  # Windows has no such module
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


def bits_per_byte(nats: float, bytes_per_token: float) -> float:
    """Loss in nats per token as bits per byte of text."""
    return nats / math.log(2) / bytes_per_token


def probe_row(
    model: Transformer,
    batches: list[Batch],
    config: ProbeConfig,
    world: World,
    *,
    step: int,
    precision: str = "fp32",
    pending: dict[str, Any],
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One row of probes.jsonl: statistics over `batches` plus what the step itself left.

    `pending` holds what only the training step before could tell: gradient_norms, isometry_drift
    (O4: by how much the step moved each matrix off) and the optimiser's other numbers.
    isometry_error is how far the weights themselves are from scaled isometries. Every rank runs
    the same batches, so sharded and unsharded runs give the same row.
    """
    with evaluating(model), Probe(model, stats=config.stats) as probe:
        for ids, labels in batches:
            check()
            with autocast(precision, world.device):
                model(ids.to(world.device), labels=labels.to(world.device))
    return {
        "step": step,
        "sites": probe.table(),
        "geometry": probe.geometry() if "geometry" in config.stats else [],
        "attention": probe.attention() if "attention" in config.stats else [],
        **pending,
        "isometry_error": isometry_drift(model),
        "gains": {name: plain(value) for name, value in model.gains().items()},
    }


def trace(model: Transformer, step: int, *, every: int) -> dict[str, Any]:
    """What `probe.trace_every` adds to a row of metrics.jsonl, between backward and clipping:
    gradient norm by layer, and each gain the gradient was taken at, of channels the mean |gain|.

    Empty where `step` (from 1) is neither the first nor a multiple of `every`. Every rank calls.
    """
    if not every or (step > 1 and step % every):
        return {}
    gains = {
        name: plain(value.float().abs().mean() if value.numel() > 1 else value.float().sum())
        for name, value in model.gains().items()
    }
    return {"gradient_norms": gradient_norms(model), "gains": gains}


def measure_sites(
    model: Transformer,
    config: RunConfig,
    data: PreparedData,
    *,
    final: bool = False,
    step: int | None = None,
) -> dict[str, Any]:
    """One row of probes.jsonl for a model at rest (no gradient norms).

    `step` is that of the weights, None the last. Uses config.probe.final_tokens held-out tokens if
    `final` (and then says what it was measured from), else config.probe.num_tokens.
    """
    num_tokens = config.probe.final_tokens if final else config.probe.num_tokens
    size = config.train.micro_batch_size or config.train.batch_size
    batches = open_batches(config, data, "held_out", size, num_tokens)
    world = World(device=next(model.parameters()).device)
    pending: dict[str, Any] = {"gradient_norms": {}, **step_numbers([])}
    step = config.train.num_steps if step is None else step
    row = probe_row(model, batches, config.probe, world, step=step, pending=pending)
    return {**row, **probe_origin(config.probe, step, num_tokens)} if final else row


def probe_origin(config: ProbeConfig, step: int, num_tokens: int) -> dict[str, Any]:
    """What goes into probe.json beside a row: what it was measured from."""
    origin = {"step": step, "num_tokens": num_tokens, "stats": list(config.stats)}
    return {"measured": origin}


def step_numbers(metrics: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The optimiser's `metrics()` of every rank, joined and parted by what the reader looks for.

    Returns {"isometry_drift": {parameter: value}, "optimizer": {name: value}}.
    """
    drift, others = {}, {}
    for name, value in (item for part in metrics for item in part.items()):
        kind, _, parameter = name.partition("/")
        if kind == "isometry_drift":
            drift[parameter] = value
        else:
            others[name] = value
    return {"isometry_drift": drift, "optimizer": others}


def plain(value: Any) -> Any:
    """A tensor as a number or nested list of numbers; a sharded one is gathered first."""
    if isinstance(value, Tensor):
        return full(value.detach()).tolist()
    return value
