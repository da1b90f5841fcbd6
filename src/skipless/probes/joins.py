"""Finding joins at run time: which module calls give (x, F, y) for geometry.py (S7, S8).

- A connection module is called as connection(stream, branch, ...) -> new stream: the join itself.
- A block of a foreign model hides its joins. Its input x, its output y and the outputs F_1..F_k of
  its sublayers are caught; where y = x + F_1 + ... + F_k holds in numbers (pre-norm blocks, also
  parallel ones), each F_i gives a join with the stream before it. Where it does not (post-norm
  blocks), the block is one join with F = y - x.

Read by probe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.sites import Site, first_tensor

Emit = Callable[[tuple[str, int | None, str | None], Tensor, Tensor, Tensor], None]
"""((module, layer, sublayer), x, F, y) -> None, once for every join seen."""


def watch_joins(model: nn.Module, sites: Iterable[Site], emit: Emit) -> list[Any]:
    """Hook every join of `model` that its stream sites lead to; returns the hook handles."""
    sites = list(sites)
    modules = dict(model.named_modules())
    handles: list[Any] = []
    for site in sites:
        if site.kind != "stream" or site.direction != "output":
            continue
        inside = [
            other for other in sites
            if other.module.startswith(site.module + ".")
            and other.kind == "sublayer_output" and other.direction == "output"
        ]  # fmt: skip
        module = modules[site.module]
        if inside or any(other.module.startswith(site.module + ".") for other in sites):
            handles += _watch_block(module, site, inside, modules, emit)
        else:
            handles.append(_watch_connection(module, site, emit))
    return handles


def _watch_connection(module: nn.Module, site: Site, emit: Emit) -> Any:
    def hook(_: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        y = first_tensor(result)
        if y is None:
            return
        both = [
            value for value in (*args, *kwargs.values())
            if isinstance(value, Tensor) and value.shape == y.shape
        ]  # fmt: skip
        if len(both) >= 2:
            emit((site.module, site.layer, site.sublayer), both[0], both[1], y)

    return module.register_forward_hook(hook, with_kwargs=True)


def _watch_block(
    module: nn.Module, site: Site, inside: list[Site], modules: dict[str, nn.Module], emit: Emit
) -> list[Any]:
    caught: dict[str, Any] = {"x": None, "branches": []}

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        caught["x"], caught["branches"] = first_tensor([args, kwargs]), []

    def inner(sublayer: Site) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple, result: Any) -> None:
            caught["branches"].append((sublayer, first_tensor(result)))

        return hook

    def after(_: nn.Module, __: tuple, result: Any) -> None:
        x, y, branches = caught["x"], first_tensor(result), caught["branches"]
        caught["x"], caught["branches"] = None, []
        if x is None or y is None or x.shape != y.shape:
            return
        steps = _additive(x, y, branches)
        if steps is None:
            emit((site.module, site.layer, None), x, y - x, y)
            return
        for sublayer, branch, stream, new in steps:
            emit((sublayer.module, site.layer, sublayer.sublayer), stream, branch, new)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        *(modules[s.module].register_forward_hook(inner(s)) for s in inside),
        module.register_forward_hook(after),
    ]


def _additive(
    x: Tensor, y: Tensor, branches: list[tuple[Site, Tensor | None]]
) -> list[tuple[Site, Tensor, Tensor, Tensor]] | None:
    """(site, F, stream before, stream after) of each branch if they add up to y, else None."""
    if not branches:
        return None
    steps, stream = [], x
    for site, branch in branches:
        if branch is None or branch.shape != x.shape:
            return None
        new = stream + branch
        steps.append((site, branch, stream, new))
        stream = new
    # Rounding of one addition in the stream's own type, with room for another order of addition.
    tolerance = 64 * torch.finfo(y.dtype).eps * float(y.detach().abs().amax())
    if not float((stream - y).detach().abs().amax()) <= tolerance:
        return None
    steps[-1] = (*steps[-1][:3], y)
    return steps
