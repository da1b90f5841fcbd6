"""Which linear layers read one tensor, found in one hooked forward pass and never by name.

Layers that read the same tensor (q, k and v; gate and up) have to be scaled or rotated together.
Tensors are told apart by the memory they lie in (a view or a dropout that does nothing keeps it)
and are held until the pass is over, so that no two share it. `sources` then tests where a
group's tensor comes from. Read by `transforms.session`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.subclasses import has_own_forward
from skipless.sites import block_names, first_tensor, is_linear

NEAR = 4
"""So many linear layers before a tensor are tried as its source: V, K, Q and O, or up and gate."""


@dataclass(kw_only=True)
class Group:
    """Linear layers that read one tensor [..., width], in the order in which they run."""

    names: tuple[str, ...]
    width: int
    block: str | None
    """The member of the list of blocks that the first of them lies in."""
    candidates: tuple[str, ...]
    """Modules that may be the source, the likeliest first: see `find_source`."""
    direct: str | None
    """The norm or linear layer whose output is the tensor itself."""
    fixed: bool
    """A layer runs twice in a pass, shares its weight or does more with its input than multiply:
    nothing may be scaled or rotated."""
    sample: Tensor
    """The tensor on the traced batch, [rows, width]."""


def small_batch(batch: Any, size: int = 2) -> Any:
    """The first `size` rows of every tensor in a batch."""
    if isinstance(batch, Tensor):
        return batch[:size] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: small_batch(value, size) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [small_batch(value, size) for value in batch]
    return batch


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., width] as [rows, width], without gradient."""
    return x.detach().reshape(-1, x.shape[-1])


def read_groups(model: nn.Module, batch: Any) -> list[Group]:
    """The groups of all linear layers that `batch` reaches, in the order in which they run."""
    trace, handles = _Trace(), []
    for name, module in model.named_modules():
        if is_linear(module):
            handles.append(module.register_forward_pre_hook(trace.reads(name), with_kwargs=True))
            handles.append(module.register_forward_hook(trace.makes(name, is_product=True)))
        elif is_norm(module):
            handles.append(module.register_forward_hook(trace.makes(name, is_product=False)))
    try:
        with evaluation_mode(model):
            run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    blocks, bound = block_names(model), _shared_weights(model)
    bound |= {n for n, m in model.named_modules() if is_linear(m) and has_own_forward(m)}
    return [trace.group(place, blocks, bound) for place in trace.readers]


class _Trace:
    """Who read and who made which tensor in one forward pass; tensors by their `_place`."""

    def __init__(self) -> None:
        self.readers: dict[tuple, list[str]] = {}
        self._held: list[Tensor] = []
        """So that no two share a place."""
        self._made: dict[tuple, str] = {}
        self._tensors: dict[tuple, Tensor] = {}
        self._order: list[str] = []
        """Linear layers as they ended."""
        self._before: dict[tuple, list[str]] = {}
        """The last of them when the tensor was first read."""
        self._calls: dict[str, int] = {}

    def reads(self, name: str) -> Callable:
        """A pre-hook of the linear layer `name`."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = first_tensor((args, kwargs))
            self._calls[name] = self._calls.get(name, 0) + 1
            if x is None or self._calls[name] > 1:
                return
            self._held.append(x)
            place = _place(x)
            self._tensors.setdefault(place, x)
            self._before.setdefault(place, self._order[-NEAR:])
            self.readers.setdefault(place, []).append(name)

        return hook

    def makes(self, name: str, *, is_product: bool) -> Callable:
        """A hook of the linear layer or norm `name`."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = first_tensor(output)
            if x is None:
                return
            self._held.append(x)
            self._made[_place(x)] = name
            if is_product:
                self._order.append(name)
            else:
                self._calls[name] = self._calls.get(name, 0) + 1

        return hook

    def group(self, place: tuple, blocks: list[str], bound: set[str]) -> Group:
        """The layers that read the tensor of `place`; nothing in `bound` is folded into."""
        names, x = self.readers[place], self._tensors[place]
        direct = self._made.get(place)
        near = [n for n in reversed(self._before[place]) if n not in names and n != direct]
        candidates = [n for n in ([direct] if direct else []) + near if self._calls[n] == 1]
        return Group(
            names=tuple(names), width=x.shape[-1],
            block=next((block for block in blocks if names[0].startswith(block + ".")), None),
            candidates=tuple(n for n in candidates if n not in bound),
            direct=direct, sample=rows_of(x).clone(),
            fixed=any(self._calls[n] > 1 or n in bound for n in names),
        )  # fmt: skip


def is_norm(module: nn.Module) -> bool:
    """A leaf with a gain per channel and no matrix: LayerNorm, RMSNorm, whatever its name."""
    weight = getattr(module, "weight", None)
    leaf = not list(module.children())
    return leaf and isinstance(weight, Tensor) and weight.dim() == 1 and not is_linear(module)


def _shared_weights(model: nn.Module) -> set[str]:
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            users.setdefault(id(weight), []).append(name)
    return {name for names in users.values() if len(names) > 1 for name in names}


def _place(tensor: Tensor) -> tuple:
    """Equal for views of one tensor with the same channels, which a transposed one has not."""
    channels = tensor.shape[-1:], tensor.stride()[-1:]
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, *channels
