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
    """A layer runs twice in a pass or shares its weight: nothing may be folded."""
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
    held: list[Tensor] = []
    made: dict[tuple, str] = {}
    readers: dict[tuple, list[str]] = {}
    tensors: dict[tuple, Tensor] = {}
    order: list[str] = []
    calls: dict[str, int] = {}
    before: dict[tuple, list[str]] = {}
    handles = []

    def reads(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = first_tensor(args) if args else first_tensor(kwargs)
            calls[name] = calls.get(name, 0) + 1
            if x is None or calls[name] > 1:
                return
            held.append(x)
            place = _place(x)
            tensors.setdefault(place, x)
            before.setdefault(place, order[-NEAR:])
            readers.setdefault(place, []).append(name)

        return hook

    def makes(name: str, is_product: bool) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = first_tensor(output)
            if x is not None:
                held.append(x)
                made[_place(x)] = name
                if is_product:
                    order.append(name)
                else:
                    calls[name] = calls.get(name, 0) + 1

        return hook

    shared = _shared_weights(model)
    for name, module in model.named_modules():
        if is_linear(module):
            handles.append(module.register_forward_pre_hook(reads(name), with_kwargs=True))
            handles.append(module.register_forward_hook(makes(name, True)))
        elif is_norm(module):
            handles.append(module.register_forward_hook(makes(name, False)))
    try:
        with evaluation_mode(model):
            run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    blocks = block_names(model)
    groups = []
    for place, names in readers.items():
        inside = next((b for b in blocks if names[0].startswith(b + ".")), None)
        direct = made.get(place)
        near = [name for name in reversed(before[place]) if name not in names and name != direct]
        candidates = [name for name in ([direct] if direct else []) + near if calls[name] == 1]
        groups.append(
            Group(
                names=tuple(names), width=tensors[place].shape[-1], block=inside,
                candidates=tuple(name for name in candidates if name not in shared),
                direct=direct, sample=rows_of(tensors[place]).clone(),
                fixed=any(calls[name] > 1 or name in shared for name in names),
            )
        )  # fmt: skip
    return groups


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
