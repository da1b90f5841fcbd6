"""Which linear layer ends each branch and which ones read each norm, found in one forward pass.

Tensors are told apart by the memory they lie in (a view or a dropout that does nothing keeps it),
and are held until the pass is over, so that no two share a place. Read by `fold` and `convert`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skipless.model import Connection
from skipless.quant import run_batch
from skipless.sites import bias_of, first_tensor, is_linear, weight_of


@dataclass(kw_only=True)
class Trace:
    """What was seen."""

    outputs: dict[str, nn.Module] = field(default_factory=dict)
    """Name of a connection -> the linear layer whose output is its branch."""
    norms: list[tuple[str, nn.Module, list[nn.Module]]] = field(default_factory=list)
    """Norms inside patched layers: name, module, and the linear layers that read it; no readers
    where something else reads it too, or the gain is not a plain factor."""


def trace(model: nn.Module, connections: dict[str, Connection], batch: Any) -> Trace:
    """Run `batch` through `model` (in eval mode) and watch."""
    held: list[Tensor] = []
    ends: dict[tuple, nn.Module] = {}
    normed: dict[tuple, str] = {}
    readers: dict[str, list[nn.Module]] = {}
    streams: set[str] = set()
    found, handles = Trace(), []
    norms = _norms(model, connections)

    def produced(module: nn.Module, args: tuple, out: Any) -> None:
        tensor = first_tensor(out)
        if tensor is not None:
            held.append(tensor)
            ends[_place(tensor)] = module

    def reads(module: nn.Module, args: tuple) -> None:
        tensor = first_tensor(args)
        name = normed.get(_place(tensor)) if tensor is not None else None
        if name is not None and module not in readers.setdefault(name, []):
            readers[name].append(module)

    def watch_norm(name: str):
        def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
            held.append(out)
            normed[_place(out)] = name

        return hook

    def watch_join(name: str):
        def hook(module: nn.Module, args: tuple) -> None:
            stream, branch = args[:2]
            held.extend((stream, branch))
            if _place(branch) in ends:
                found.outputs[name] = ends[_place(branch)]
            for tensor in (stream, branch):
                if _place(tensor) in normed:
                    streams.add(normed[_place(tensor)])

        return hook

    for name, module in connections.items():
        handles.append(module.register_forward_pre_hook(watch_join(name)))
    for name, module in norms.items():
        handles.append(module.register_forward_hook(watch_norm(name)))
    for module in model.modules():
        if is_linear(module):
            handles += [module.register_forward_hook(produced),
                        module.register_forward_pre_hook(reads)]  # fmt: skip
    try:
        run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    for name, module in norms.items():
        usable = name not in streams and _is_plain(module)
        found.norms.append((name, module, readers.get(name, []) if usable else []))
    return found


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.numel()


def _norms(model: nn.Module, connections: dict[str, Connection]) -> dict[str, nn.Module]:
    """Norms that stand beside the connections, in the same module."""
    parents = dict.fromkeys(name.rpartition(".")[0] for name in connections)
    return {
        f"{parent}.{name}": module
        for parent in parents
        for name, module in model.get_submodule(parent).named_children()
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None
    }


@torch.no_grad()
def _is_plain(norm: nn.Module) -> bool:
    """Whether the output is weight * normalised (+ bias); Gemma's is (1 + weight) * normalised."""
    gain, bias = weight_of(norm), bias_of(norm)
    weight = gain.clone()
    x = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    x = x + x.square()
    with_gain = norm(x)
    gain.fill_(1.0)
    one = norm(x)
    gain.copy_(weight)
    expected = one * weight if bias is None else (one - bias) * weight + bias
    return torch.allclose(with_gain, expected, rtol=1e-4, atol=1e-6)
