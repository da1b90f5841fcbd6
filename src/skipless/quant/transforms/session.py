"""Changes of a model that leave its function as it is, and the calibration that chooses them.

A method (`smooth`, `awq`, `hadamard`, `stream`) asks a `Session` for the groups of layers that read
one tensor, for their values on the calibration batches, and to scale or rotate them:

    y = W x = (W diag(s)) (x / s) = (W R) (R^T x)

The right half goes into the module in front where tracing proves that it may (`sources`),
else into a hook that changes the input of the layers. Both can be undone: `changes` keeps the
original tensors themselves, so that `restore` brings them back bit for bit. Read by `quant.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.targets import ActivationTarget, WeightTarget
from skipless.quant.transforms.changes import Changes, Divide, InputChange
from skipless.quant.transforms.sources import Source, find_source, rotates_in_blocks
from skipless.quant.transforms.tracing import Group, read_groups, rows_of, small_batch
from skipless.sites import bias_of, first_tensor, is_linear, weight_of


class Session:
    """One quantisation being prepared: groups, calibration, changes."""

    def __init__(
        self, model: nn.Module, targets: Sequence[WeightTarget], batches: Sequence[Any] | None,
        activations: Sequence[ActivationTarget] = (),
    ) -> None:  # fmt: skip
        self.model, self.batches, self.activations = model, batches, activations
        self.targets = {name: target for target in targets for name in target.modules}
        self.changes = Changes()
        self.inputs: dict[str, InputChange] = {}
        """By name of a module (a layer, or the first block); one object for those of a group."""
        self.columns: dict[str, Tensor] = {}
        """Input channels that stay in full precision, by name of a module."""
        self.handles: list[Any] = []
        self.notes: list[str] = []
        """What the methods did, for `describe`."""
        self._groups: list[Group] | None = None
        self._sources: dict[str, Source | None] = {}

    @property
    def groups(self) -> list[Group]:
        """Groups with at least one target, in the order in which they run."""
        if self._groups is None:
            found = read_groups(self.model, self.small())
            self._groups = [g for g in found if any(name in self.targets for name in g.names)]
        return self._groups

    def needed(self) -> Sequence[Any]:
        """The calibration batches; UserError where there are none."""
        if not self.batches:
            raise UserError(
                "this method looks at activations; pass calibration=batches, at least one"
            )
        return self.batches

    @property
    def changeable(self) -> list[Group]:
        """Groups whose layers run once and have a weight of their own: what may be scaled."""
        return [group for group in self.groups if not group.fixed]

    def small(self) -> Any:
        """Two rows of the first calibration batch, to trace on."""
        return small_batch(self.needed()[0])

    def trace(self) -> None:
        """Find the groups now. Raises UserError where there is no calibration batch."""
        assert self.groups is not None

    def forget(self) -> None:
        """Trace anew: the model computes other tensors now."""
        self._groups, self._sources = None, {}

    def members(self, group: Group) -> list[str]:
        """Names of the group's layers that are to be quantised."""
        return [name for name in group.names if name in self.targets]

    def source(self, group: Group) -> Source | None:
        """Where factors of the group's tensor can be folded; only if all its readers take part."""
        key = group.names[0]
        if key not in self._sources:
            found = None
            if all(name in self.targets for name in group.names) and key not in self.inputs:
                found = find_source(self.model, group, self.small())
            self._sources[key] = found
        return self._sources[key]

    def matrix(self, name: str) -> Tensor:
        """The weight of a linear layer as float32, or float64 if it is, [out, in]."""
        module = self.model.get_submodule(name)
        weight = wide(weight_of(module))
        return weight if isinstance(module, nn.Linear) else weight.t()

    def set_matrix(self, name: str, matrix: Tensor) -> None:
        """Replace the weight of a linear layer by [out, in]."""
        module = self.model.get_submodule(name)
        value = matrix if isinstance(module, nn.Linear) else matrix.t()
        self.changes.set(module.weight, value)  # type: ignore[arg-type]

    def collect(
        self, visit: Callable[[Group, Tensor], None], groups: Iterable[Group] | None = None
    ) -> None:
        """Run all calibration batches; `visit(group, rows [n, width])` for each group and batch.

        Raises UserError, naming the layer, for values that are not finite.
        """
        wanted = list(self.groups if groups is None else groups)
        handles = []

        def watch(group: Group) -> Callable:
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                x = first_tensor((args, kwargs))
                assert x is not None, "read_groups saw a tensor here"
                rows = rows_of(x)
                if not bool(torch.isfinite(rows).all()):
                    raise UserError(
                        f"the calibration batches give NaN or infinity in front of "
                        f"{self.members(group)[0]} ({rows.dtype}); look at batches and weights, or "
                        "convert the model to float32"
                    )
                visit(group, rows)
                if group is wanted[-1] and not group.fixed:
                    raise _Enough

            return hook

        for group in wanted:  # at a layer that sees what methods and quantisers make of the tensor
            module = self.model.get_submodule(self.members(group)[0])
            handles.append(module.register_forward_pre_hook(watch(group), with_kwargs=True))
        try:
            with evaluation_mode(self.model):
                for batch in self.needed():
                    with suppress(_Enough):
                        run_batch(self.model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def change_inputs(self, group: Group, step: Callable[[Tensor], Tensor]) -> None:
        """Apply `step` to what the quantised layers of a group get, after the steps before."""
        self.change_input(self.members(group), step)

    def change_input(self, names: str | Sequence[str], step: Callable[[Tensor], Tensor]) -> None:
        """Apply `step` to the first tensor of modules that read the same one."""
        names = [names] if isinstance(names, str) else names
        change = next((self.inputs[name] for name in names if name in self.inputs), None)
        if change is None:
            change = InputChange()
            for name in names:
                self.inputs[name] = change
                module = self.model.get_submodule(name)
                handle = module.register_forward_pre_hook(
                    change.hook, prepend=True, with_kwargs=True
                )
                self.handles.append(handle)
            self.handles.append(self.model.register_forward_hook(change.forget))
        change.steps.append(step)

    def attach_first(self) -> None:
        """Let the input changes run before all other hooks, those of quantisers included."""
        for name, change in self.inputs.items():
            hooks: Any = self.model.get_submodule(name)._forward_pre_hooks  # an OrderedDict
            for key, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is change:
                    hooks.move_to_end(key, last=False)

    def scale_inputs(self, group: Group, factors: Tensor) -> bool:
        """x / s in front of a group, W diag(s) inside it. True if 1/s went into the module before.

        `factors` [width], positive; equal where one channel of the source is read several times
        (`pool`).
        """
        source = self.source(group)
        if source is not None and not self._fold(source, factors):
            source = self._sources[group.names[0]] = None
        if source is None:
            self.change_inputs(group, Divide(factors))
        for name in self.members(group):
            self.set_matrix(name, self.matrix(name) * factors)
        return source is not None

    def pool(self, group: Group, values: Tensor) -> Tensor:
        """The largest of `values` [width] over channels that are copies of one another."""
        source = self.source(group)
        if source is None or source.head is None:
            return values
        channels = source.channels - source.channels.min()
        most = values.new_zeros(int(channels.max()) + 1)
        return most.scatter_reduce(0, channels, values, "amax")[channels]

    def value_head(self, group: Group) -> tuple[Source, int] | None:
        """The linear source of a group and the size of the blocks in which it may be rotated."""
        source = self.source(group)
        if source is None or not is_linear(self.model.get_submodule(source.name)):
            return None
        width = source.channels.unique().numel()
        sizes = [n for n in range(width, 3, -1) if width % n == 0]
        if source.head is not None:
            sizes = [source.head, *sizes]
        with evaluation_mode(self.model):
            size = rotates_in_blocks(self.model, group, source, self.small(), sizes)
        return None if size is None else (source, size)

    def _fold(self, source: Source, factors: Tensor) -> bool:
        """Divide the output channels of a source by `factors`; False where a norm's gain is none
        that this knows."""
        module = self.model.get_submodule(source.name)
        bias = bias_of(module)
        if is_linear(module):
            matrix = self.matrix(source.name)
            divisor = matrix.new_ones(len(matrix))
            divisor[source.channels] = factors.to(divisor)
            self.set_matrix(source.name, matrix / divisor[:, None])
        else:
            divisor = factors
            offset = gain_offset(module)
            if offset is None:
                return False
            gain = wide(weight_of(module))
            self.changes.set(module.weight, (gain + offset) / divisor - offset)  # type: ignore
        if bias is not None:
            self.changes.set(bias, wide(bias) / divisor)  # type: ignore[arg-type]
        return True


def wide(tensor: Tensor) -> Tensor:
    """A parameter to compute with: float32, or float64 if it is; without gradient."""
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _Enough(Exception):
    """The layers that were asked about have run."""


@torch.no_grad()
def gain_offset(norm: nn.Module) -> float | None:
    """0 where a norm multiplies by its weight, 1 where by 1 + weight (Gemma), None for others."""
    gain, bias = weight_of(norm), bias_of(norm)
    original = gain.data
    x = torch.linspace(-1, 2, original.numel(), dtype=original.dtype, device=original.device)[None]
    x = x + x.square()
    shift = 0.0 if bias is None else bias.detach()
    found = None
    try:
        before = norm(x) - shift
        for offset in (0.0, 1.0):
            gain.data = (original + offset) * 2 - offset
            if torch.allclose(norm(x) - shift, before * 2, rtol=1e-2, atol=1e-4):
                found = offset
                break
    finally:
        gain.data = original
    return found
