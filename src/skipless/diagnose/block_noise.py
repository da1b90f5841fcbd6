"""What quantising a block does to the stream that it hands on, every block at once (S3).

For block l, alone quantised and given its exact inputs, with y its output and y' the quantised one:

    noise_l = mean over tokens of |y' - y|^2 / |y|^2

The output holds the stream and the branches joined to it, so that noise of a branch that is small
beside the stream counts little, whatever the branch's own ratio is; and noise at an input counts as
it comes out of the layers that read it. Two passes serve all blocks: one in full precision keeps
what every block is given and returns, the second is quantised everywhere and hands every block its
exact inputs. Of a model that is read layer by layer each block runs twice in a row instead. What
the rest of the model does with the noise is left out.
Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skipless.diagnose.streaming import is_streamed
from skipless.errors import UserError
from skipless.probes.passes import ForwardPass
from skipless.quant import Scheme, evaluation_mode, paused, quantized, run_batch
from skipless.sites import block_names, find_sites, first_tensor


def block_noise(
    model: nn.Module, scheme: Scheme, batches: Sequence[Any], scope: str, options: dict[str, Any]
) -> dict[int, float]:
    """{layer: noise_l}, blocks of one number in several stacks added; {} without blocks.

    Padding and tokens of zeros are left out. `options` go to `quantize`. Raises UserError as
    `quantize` does, and for a block that returns no floating tensor.
    """
    layers = _layers(model)
    sums: dict[str, Tensor] = {name: torch.zeros(2, dtype=torch.float64) for name in layers}
    if not layers:
        return {}
    if is_streamed(model):
        if options:
            raise UserError(f"{scheme} needs a calibration, a pass with all weights quantised")
        return _streamed_noise(model, scheme, batches, scope, layers)
    with quantized(model, scheme, scope, **options), evaluation_mode(model):
        for batch in batches:
            one = _Passes(model, list(layers))
            with paused(model):
                one.record(batch)
            for name, found in one.compare(batch).items():
                sums[name] += found
    noise: dict[int, float] = {}
    for name, (ratio, count) in ((name, each.tolist()) for name, each in sums.items()):
        if count:
            noise[layers[name]] = noise.get(layers[name], 0.0) + ratio / count
    return noise


def _streamed_noise(
    model: nn.Module, scheme: Scheme, batches: Sequence[Any], scope: str, layers: dict[str, int]
) -> dict[int, float]:
    """The same while the blocks come from disk: each runs exactly, then quantised."""
    if len(set(layers.values())) < len(layers):
        raise UserError(
            "blocks of one number in several stacks are quantised together, and here only one of "
            "them is in memory"
        )
    modules, sums = dict(model.named_modules()), {}
    running, inside = ForwardPass(), False

    def start(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal running
        running = ForwardPass.start(module, args, kwargs)

    def again(name: str, args: tuple, kwargs: dict, output: Any) -> None:
        nonlocal inside
        if inside:
            return
        inside, exact = True, _output(name, output)
        try:
            with quantized(model, scheme, scope, layers=[layers[name]]):
                y = _output(name, modules[name](*args, **kwargs))
        finally:
            inside = False
        sums[name] = sums.get(name, 0) + _ratios(y, exact, running)

    handles = [model.register_forward_pre_hook(start, with_kwargs=True)]
    for name in layers:
        handles.append(modules[name].register_forward_hook(
            lambda _, args, kwargs, output, name=name: again(name, args, kwargs, output),
            with_kwargs=True,
        ))  # fmt: skip
    try:
        with evaluation_mode(model):
            for batch in batches:
                run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {layers[name]: float(found[0] / found[1]) for name, found in sums.items() if found[1]}


def _output(name: str, output: Any) -> Tensor:
    y = first_tensor(output)
    if y is None or not y.is_floating_point():
        raise UserError(
            f"the block {name} returns no floating-point tensor, so that its noise cannot be "
            "measured"
        )
    return y


def _ratios(y: Tensor, exact: Tensor, running: ForwardPass) -> Tensor:
    """[sum over tokens of noise over energy, number of tokens], float64."""
    noise, energy = _square(y - exact), _square(exact)
    keep = energy > 0
    mask = running.mask_for(exact)
    if mask is not None:
        keep &= mask.to(keep.device)
    ratio = noise[keep] / energy[keep]
    return torch.stack([ratio.sum(), keep.sum().to(ratio)]).cpu()


def _layers(model: nn.Module) -> dict[str, int]:
    """{block: its number}, of those that have one."""
    sites = find_sites(model)
    found = {}
    for block in block_names(model):
        inside = (s.layer for s in sites if s.module == block or s.module.startswith(block + "."))
        number = next((layer for layer in inside if layer is not None), None)
        if number is not None:
            found[block] = number
    return found


class _Passes:
    """One batch through the model twice: recorded, then with the recorded inputs."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        modules = dict(model.named_modules())
        self.model, self.blocks = model, {name: modules[name] for name in names}
        self.inputs: dict[str, list[tuple[tuple, dict]]] = {name: [] for name in names}
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in names}
        self.calls = dict.fromkeys(names, 0)
        self.sums = {name: torch.zeros(2, dtype=torch.float64) for name in names}
        self.running = ForwardPass()

    def record(self, batch: Any) -> None:
        """Keep copies of what every call of every block is given and returns."""

        def before(name: str, args: tuple, kwargs: dict) -> None:
            self.inputs[name].append((self._copy(args), self._copy(kwargs)))

        def after(name: str, output: Any) -> None:
            self.outputs[name].append(self._copy(_output(name, output)))

        self._run(batch, before, after)

    def compare(self, batch: Any) -> dict[str, Tensor]:
        """{block: [sum over tokens of noise over energy, number of tokens]}, float64."""

        def before(name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            exact, named = self.inputs[name][self.calls[name]]
            return _exchanged(args, exact), _exchanged(kwargs, named)

        def after(name: str, output: Any) -> None:
            exact = self.outputs[name][self.calls[name]]
            self.calls[name] += 1
            self.sums[name] += _ratios(_output(name, output), exact, self.running)

        self._run(batch, before, after)
        return self.sums

    def _run(self, batch: Any, before: Any, after: Any) -> None:
        def start(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.running = ForwardPass.start(module, args, kwargs)

        # First of all hooks, so that the quantiser's see the exact inputs.
        handles = [self.model.register_forward_pre_hook(start, with_kwargs=True, prepend=True)]
        for name, block in self.blocks.items():
            handles.append(block.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs),
                with_kwargs=True, prepend=True,
            ))  # fmt: skip
            handles.append(block.register_forward_hook(
                lambda _, __, output, name=name: after(name, output)
            ))  # fmt: skip
        try:
            run_batch(self.model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _copy(self, value: Any) -> Any:
        """Floating tensors copied, each once a pass, since a model may change them in place."""
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                return None
            return self.running.remember(value, "copy", value.clone)
        if isinstance(value, (tuple, list)):
            return [self._copy(item) for item in value]
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        return None


def _exchanged(value: Any, exact: Any) -> Any:
    """`value` with the floating tensors that were recorded; caches and numbers stay."""
    if isinstance(value, Tensor):
        same = isinstance(exact, Tensor) and exact.shape == value.shape
        return exact.clone() if same else value
    if type(value) in (tuple, list) and isinstance(exact, list) and len(value) == len(exact):
        return type(value)(_exchanged(*pair) for pair in zip(value, exact, strict=True))
    if type(value) is dict and isinstance(exact, dict):
        return {key: _exchanged(item, exact.get(key)) for key, item in value.items()}
    return value


def _square(x: Tensor) -> Tensor:
    x = x.cpu() if x.device.type == "mps" else x
    return x.double().square().sum(-1)
