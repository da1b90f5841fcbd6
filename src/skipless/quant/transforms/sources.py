"""Where a tensor comes from: a module into which a factor per channel can be folded, by test.

A factor in front of a layer is free if a module before it can carry it: the norm in front, or a
linear layer with only elementwise functions or the mixing of tokens between (up -> down, V -> O).
`find_source` takes the candidates of a group (`transforms.tracing`) and *tests* each: its output is
multiplied by random positive factors c. If the readers' input then is the old one times c, and the
model's outputs are the old ones once the readers divide by c, the fold is exact: GELU fails, ReLU
and the ungated half of SwiGLU pass, as does a norm whose only readers these are; a norm that is
also the stream (post-norm) fails. Input channel j may be output channel m(j): grouped queries
repeat heads, and fused projections hold V in a slice.

The test is a proof on one batch, not for all inputs: a branch that this batch does not take is not
seen. Layers that run more than once in a pass, or share their weight, are never folded.
Read by `transforms.session`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.replacing import replace_input
from skipless.quant.transforms.tracing import Group, rows_of
from skipless.sites import first_tensor, is_linear, linear_widths


@dataclass(kw_only=True)
class Source:
    """A module whose output is the tensor, up to a function that keeps positive factors."""

    name: str
    channels: Tensor
    """int64 [width]: channel j of the tensor is channel channels[j] of the module's output."""
    head: int | None = field(default=None)
    """Channels of one head where heads are repeated (grouped queries)."""


class _Stop(Exception):
    """The forward pass has shown what it was run for."""


def find_source(model: nn.Module, group: Group, batch: Any) -> Source | None:
    """The module into which factors of the group's tensor can be folded, None where none is.

    `batch` is the one that `read_groups` saw. A few forward passes.
    """
    if group.fixed:
        return None
    with evaluation_mode(model):
        reference = all_outputs(run_batch(model, batch))
        for name in group.candidates:
            module = model.get_submodule(name)
            for start, width in _slices(module, group.width):
                factors = _factors(width, module)
                found = _channels(model, group, batch, name, start, factors)
                if found is None:
                    continue
                channels, head = found
                with (
                    _multiplied(module, _inside(module, start, factors)),
                    _divided(model, group.names, factors[channels]),
                ):
                    changed = all_outputs(run_batch(model, batch))
                if nearly_equal(reference, changed):
                    return Source(name=name, channels=channels + start, head=head)
    return None


def rotates_in_blocks(
    model: nn.Module, group: Group, source: Source, batch: Any, blocks: list[int]
) -> int | None:
    """The first of `blocks` for which rotating every so many neighbours of the source's output
    rotates the group's tensor in the same way, as value heads do; None where none does."""
    first, width = int(source.channels.min()), int(source.channels.unique().numel())
    module, now = model.get_submodule(source.name), _input_of(model, group, batch)
    if now is None:
        return None
    generator = torch.Generator().manual_seed(0)
    for size in blocks:
        if width % size or group.width % size:
            continue
        drawn = torch.randn(size, size, dtype=torch.float32, device="cpu", generator=generator)
        turn = torch.linalg.qr(drawn).Q.to(now)

        def turned(x: Tensor, turn: Tensor = turn, size: int = size) -> Tensor:
            return (x.unflatten(-1, (-1, size)) @ turn).flatten(-2)

        def hook(module: nn.Module, args: Any, out: Tensor, turned: Callable = turned) -> Tensor:
            out = out.clone()
            out[..., first : first + width] = turned(out[..., first : first + width])
            return out

        handle = module.register_forward_hook(hook)
        try:
            seen = _input_of(model, group, batch)
        finally:
            handle.remove()
        if seen is not None and nearly_equal([turned(now)], [seen]):
            return size
    return None


def _width_of(module: nn.Module) -> int:
    return linear_widths(module)[1] if is_linear(module) else module.weight.numel()  # type: ignore


def _slices(module: nn.Module, wanted: int) -> Iterator[tuple[int, int]]:
    """(start, width) of the parts of a module's output that the tensor may stem from."""
    width = _width_of(module)
    if width == wanted or (is_linear(module) and wanted % width == 0):
        yield 0, width
    if is_linear(module) and width > wanted:
        if width % wanted == 0:  # fused projections; V and up come last
            yield from ((start, wanted) for start in range(width - wanted, -1, -wanted))
        rest = (width - wanted) // 2  # q as wide as the tensor, then k and v
        if 2 * rest == width - wanted and wanted % rest == 0 and rest != wanted:
            yield width - rest, rest


def _factors(width: int, module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(width)
    drawn = torch.rand(width, dtype=torch.float32, device="cpu", generator=generator)
    return torch.exp2(4 * drawn - 2).to(weight)  # 1/4 to 4


def _inside(module: nn.Module, start: int, factors: Tensor) -> Tensor:
    whole = factors.new_ones(_width_of(module))
    whole[start : start + len(factors)] = factors
    return whole


def _channels(
    model: nn.Module, group: Group, batch: Any, name: str, start: int, factors: Tensor
) -> tuple[Tensor, int | None] | None:
    """The map of channels under which factors at `name` reach the readers, None if they do not."""
    module = model.get_submodule(name)
    width, index = len(factors), torch.arange(group.width, device=factors.device)
    if name == group.direct and width == group.width:
        return index, None
    with _multiplied(module, _inside(module, start, factors)):
        seen = _input_of(model, group, batch)
    if seen is None or seen.shape != group.sample.shape:
        return None
    copies = group.width // width
    heads = [width] if copies == 1 else [n for n in range(1, width + 1) if width % n == 0]
    for head in heads:
        channels = index // (head * copies) * head + index % head
        if _channelwise_equal(group.sample * factors[channels], seen):
            return channels, None if copies == 1 else head
    return None


def _input_of(model: nn.Module, group: Group, batch: Any) -> Tensor | None:
    """What the first reader gets; the pass ends there."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = first_tensor((args, kwargs))
        if x is not None:
            seen.append(rows_of(x).clone())
        raise _Stop

    handle = model.get_submodule(group.names[0]).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        run_batch(model, batch)
    except _Stop:
        pass
    finally:
        handle.remove()
    return seen[0] if seen else None


@contextmanager
def _multiplied(module: nn.Module, factors: Tensor) -> Iterator[None]:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * factors

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _divided(model: nn.Module, names: tuple[str, ...], factors: Tensor) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        return replace_input(args, kwargs, lambda x: x / factors)

    handles = [
        model.get_submodule(n).register_forward_pre_hook(hook, with_kwargs=True) for n in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def all_outputs(value: Any) -> list[Tensor]:
    """All floating-point tensors in what a model returns (tuples, dicts, dataclasses)."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = [getattr(value, item.name) for item in dataclasses.fields(value)]
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, (tuple, list, Mapping)):
        return []
    return [tensor for item in items for tensor in all_outputs(item)]


def _tolerance(x: Tensor) -> float:
    return 1e-3 if x.dtype in (torch.float32, torch.float64) else 3e-2


def nearly_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of outputs are the same up to the rounding of their dtype."""
    if len(a) != len(b) or not a:
        return False
    return all(
        x.shape == y.shape
        and bool(torch.isfinite(y).all())
        and float((x - y).float().norm()) <= _tolerance(x) * float(x.float().norm()) + 1e-12
        for x, y in zip(a, b, strict=True)
    )


def _channelwise_equal(a: Tensor, b: Tensor) -> bool:
    """Every channel by itself, so that one function that is nearly linear on most does not pass."""
    error, size = (a - b).float().norm(dim=0), a.float().norm(dim=0)
    return bool((error <= _tolerance(a) * size + 1e-5 * size.mean()).all())
