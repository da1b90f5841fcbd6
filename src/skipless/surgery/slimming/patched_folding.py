"""`fold` of a patched Hugging Face model: gains and norm gains into the weights beside them."""

from __future__ import annotations

from typing import Any

from torch import nn

from skipless.errors import UserError
from skipless.surgery.patching import patch, unpatch
from skipless.surgery.records import connections
from skipless.surgery.slimming.scaling import Tally, join_weights, scale_output
from skipless.surgery.stacks import find_stacks
from skipless.surgery.tracing import trace

__all__ = ["fold_patched"]


def fold_patched(model: nn.Module, batch: Any, tally: Tally, norm_gains: bool) -> nn.Module:
    """A patched Hugging Face model without its patch, its stream carried as x / c (F3).

    Changes `model`, and runs `batch` through it to see which linear layers are meant. Raises
    UserError where no weight can hold a join's weights, or a plain class has no place for them.
    """
    patched = connections(model)
    if not patched:
        raise UserError(
            f"{type(model).__name__} is not patched, so there is no gain to fold; fold takes "
            "patched Hugging Face models and our Transformer"
        )
    for stack in find_stacks(model):
        for layer in stack.layers:
            for join in layer.joins:
                if layer.path(join) not in patched:
                    patch(model, "residual", sites=join.sublayer, layers=layer.index,
                          stacks=stack.name)  # fmt: skip
    found = connections(model)
    seen = trace(model, found, batch)
    for stack in find_stacks(model):
        carried = 1.0
        for layer in stack.layers:
            for join in layer.joins:
                name = layer.path(join)
                a, b = join_weights(name, found[name])
                if a == 0:
                    raise UserError(
                        f"{name} has no skip, which a plain {type(model).__name__} cannot express; "
                        "only sublayers with a skip fold into it"
                    )
                if name not in seen.outputs:
                    raise UserError(
                        f"{name}: the branch is not the output of a linear layer that was reached "
                        "(experts, a norm behind it, or another model part), so its gain cannot "
                        "be folded"
                    )
                carried *= a
                scale_output(seen.outputs[name], b / carried)
                if join.owner:  # a norm follows the join, and takes the factor out
                    carried = 1.0
                tally.joined(found[name])
    if norm_gains:
        for name, norm, readers in seen.norms:
            tally.norm(name, norm, readers)
    return unpatch(model)
