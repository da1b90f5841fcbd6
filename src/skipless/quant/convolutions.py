"""Convolutions as quantisation sees them: kernels as matrices, inputs as sites (Q1, Q2).

A kernel [out, in, *k] is the matrix [out, in * k] that meets the patches of the input: one scale,
one an output channel, or one for n neighbours of a row. A kernel sums over positions, so that a
scale a token could not be taken out of the sum; `-a:token` is one scale an example here.
Read by `quant.targets`, `quant.weights` and `quant.activations`.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from skipless.sites import Site, block_names

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` is nn.Conv1d, 2d or 3d with a weight of its own (not computed from others,
    as `weight_norm` does). Transposed ones are not: their weight is [in, out, *k]."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return isinstance(module, kinds) and "weight" in module._parameters


def convolution_sites(model: nn.Module) -> list[Site]:
    """The inputs of all convolutions, of the kind of linear layers' inputs.

    `layer` is the number of the block around, None outside the blocks.
    """
    blocks = block_names(model)
    found = []
    for name, module in model.named_modules():
        if not is_convolution(module):
            continue
        inside = any(name.startswith(f"{block}.") for block in blocks)
        number = _NUMBER.search(name) if inside else None
        found.append(
            Site(
                name=f"{name}:input", module=name, direction="input", kind="linear_input",
                layer=int(number[1]) if number else None,
            )
        )  # fmt: skip
    return found


def example_dims(module: nn.Module) -> int | None:
    """Dimensions of one example, channels included; None for what is no convolution."""
    if not is_convolution(module):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.dim() - 1


def by_example(x: Tensor, dims: int) -> Tensor:
    """`x` as [examples, values], one row where there is no batch dimension."""
    return x.flatten(1) if x.dim() > dims else x.reshape(1, -1)
