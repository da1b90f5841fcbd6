"""Where a NaN or an infinity came from.

Called when the loss or the gradient norm of a step is not finite, before the optimiser has touched
anything, or when an update or a held-out loss is not. The same batch runs forward once more with a
hook on every module, and the first tensor in the order of computation that is not finite is named:
a parameter, a module's output or a gradient. `refuse_non_finite` writes that down and ends the run.
Read by loop.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from skipless.compiled import run_eagerly
from skipless.errors import UserError
from skipless.rundir import CHECKPOINTS, DIAGNOSIS, RunDir
from skipless.sharded import local
from skipless.train import checkpoint
from skipless.train.distributed import World
from skipless.train.measure import Batch
from skipless.train.precision import autocast


def refuse_non_finite(
    run: RunDir,
    model: nn.Module,
    batches: list[Batch],
    world: World,
    *,
    step: int,
    numbers: dict[str, float],
    precision: str,
) -> NoReturn:
    """Write diagnosis.json and raise UserError; checkpoints stay as they are.

    `numbers` are those that are not finite, by name; none of them means weights are. Every rank
    must call it.
    """
    found = diagnose(model, batches, world, precision=precision)
    explanation = sentence(found)
    named = {name.replace(" ", "_").replace("-", "_"): str(v) for name, v in numbers.items()}
    record = {"step": step, **named, **found, "text": explanation}
    path = world.first(lambda: run.write_json(DIAGNOSIS, record))
    what = " and ".join(f"{k} {v}" for k, v in numbers.items()) or "weights that are no numbers"
    kept = world.first(lambda: checkpoint.found(run / CHECKPOINTS))
    rest = "the checkpoints before it are intact" if kept else "there is no checkpoint yet"
    raise UserError(
        f"step {step} has {what}: {explanation} (details in {path}); nothing of it was saved "
        f"and {rest}, so start anew with a lower optim.lr, more train.warmup_steps or a "
        "smaller train.max_grad_norm"
    )


def diagnose(
    model: nn.Module, batches: Iterable[Batch], world: World, *, precision: str
) -> dict[str, Any]:
    """Name the first non-finite tensor; gradients of the failed step must still be there.

    Returns {"kind": "parameter" | "activation" | "gradient" | "loss", "first": name,
    "parameters": [...], "gradients": [...]}, the same on every rank.
    """
    named = dict(model.named_parameters())
    parameters = _union(world, [n for n, p in named.items() if not _is_finite(p)])
    # Backward passes run from the head to the embedding, so the last one registered came first.
    gradients = _union(
        world, [n for n, p in named.items() if p.grad is not None and not _is_finite(p.grad)]
    )
    activations = [] if parameters else _union(world, _outputs(model, batches, world, precision))
    order = list(named)
    if parameters:
        kind, first = "parameter", min(parameters, key=order.index)
    elif activations:
        kind, first = "activation", activations[0]
    elif gradients:
        kind, first = "gradient", max(gradients, key=order.index)
    else:
        kind, first = "loss", "loss"
    return {"kind": kind, "first": first, "parameters": parameters, "gradients": gradients}


def all_finite(model: nn.Module, world: World) -> bool:
    """Whether every parameter is finite on every rank, which must all call it."""
    flags = [torch.isfinite(local(p).detach()).all() for p in model.parameters()]
    broken = int((~torch.stack(flags)).sum()) if flags else 0  # the device is waited for once
    return not any(world.total(broken))


def sentence(found: dict[str, Any]) -> str:
    """`found` in words."""
    texts = {
        "parameter": "the parameter {first} is not finite itself",
        "activation": "the first non-finite value is the output of {first}; parameters are finite",
        "gradient": "the forward pass is finite and the first non-finite gradient is {first}'s",
        "loss": "every parameter, output and gradient is finite on a second run",
    }
    return texts[found["kind"]].format(first=found["first"])


def _outputs(model: nn.Module, batches: Iterable[Batch], world: World, precision: str) -> list[str]:
    """Names of modules with non-finite outputs, in the order of computation."""
    seen: list[str] = []

    def watch(name: str):
        def hook(_module, _inputs, output) -> None:
            if not all(_is_finite(t) for t in _tensors(output)):
                seen.append(name)

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad(), run_eagerly():
            for ids, labels in batches:
                with autocast(precision, world.device):
                    model(ids.to(world.device), labels=labels.to(world.device))
                if not world.is_distributed and seen:
                    break
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _union(world: World, names: list[str]) -> list[str]:
    """The names of all ranks, each once, in order of appearance."""
    return list(dict.fromkeys(name for part in world.gather(names) for name in part))


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor).detach()).all())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []
