"""How much each sublayer adds to the stream, and which ones a model could do without.

At y = a x + b f(norm(x)) a sublayer's share is |b f| / |x| of a token, the norms over its channels
(F5). Read by `pruning.py`, `trials.py` and `convert`, which orders skips by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import unwrapped
from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.model import Connection, Transformer, is_absent
from skipless.quant import evaluation_mode, run_batch
from skipless.surgery.batches import real_tokens
from skipless.surgery.checking import check_batches, check_finite
from skipless.surgery.patching import CONSTANT_KINDS
from skipless.surgery.records import connections
from skipless.surgery.stacks import find_stacks

__all__ = ["Share", "candidates", "layer_names", "measure_shares", "shares"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """|b f| / |x| of one sublayer."""

    mean: float
    """Over all tokens."""
    largest: float


def shares(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Largest |b f| / |x| over all tokens at every connection, smallest first.

    A stream weight counts as part of x: the share is |y - a x| / |x|. Raises UserError for a
    model without connections.
    """
    model, batches = unwrapped(model), list(as_list(batches))
    named = candidates(model)
    check_batches(model, batches)
    check_finite(model)
    found = measure_shares(model, named, batches)
    return {name: share.largest for name, share in found.items()}


def candidates(model: nn.Module) -> dict[str, Connection]:
    """Connections with a skip to fall back on, by dotted name.

    Raises UserError for a model without connections, for weights that depend on the token, and
    where nothing can be dropped.
    """
    if isinstance(model, Transformer):
        named = {n: m for n, m in model.named_modules() if isinstance(m, Connection)}
    else:
        named = connections(model)
    if not named:
        raise UserError(
            f"{type(model).__name__} has no connections; patch(model, 'residual') first"
        )
    for name, module in named.items():
        if module.config.kind not in CONSTANT_KINDS:
            raise UserError(
                f"{name} is {module.config.kind}: its weights depend on the token, and prune "
                "compares constant ones only"
            )
    found = {
        name: module for name, module in named.items()
        if _falls_back(module) and not is_absent(module.config)
    }  # fmt: skip
    if not found:
        raise UserError(
            f"{type(model).__name__} has no sublayer to drop: none of its {len(named)} connections "
            "has a skip to fall back on, or all are dropped" + _unmarked(model, named)
        )
    return found


def _unmarked(model: nn.Module, named: Mapping[str, Connection]) -> str:
    """What to do where the unpatched sublayers of a patched model are the ones that could go."""
    present = set() if isinstance(model, Transformer) else set(layer_names(model)) - set(named)
    if not present:
        return ""
    return (
        f"; the other {len(present)} sublayers are not patched: mark them with patch(model, "
        "'residual', sites=..., layers=...)"
    )


def _falls_back(module: Connection) -> bool:
    """Whether the stream passes: not C2, and not C7 once it has become C2."""
    if module.config.kind == "anneal":
        return bool((module.gains()["a"] != 0).all())
    return module.config.kind != "none" and (module.config.kind, module.config.a) != ("fixed", 0)


def measure_shares(
    model: nn.Module, named: Mapping[str, Connection], batches: Iterable[Any]
) -> dict[str, Share]:
    """|b f| / |x| over all tokens at every connection of `named`, smallest maximum first.

    A stream weight counts as part of x: the share is |y - a x| / |x|. Padding is no token.
    """
    sums = dict.fromkeys(named, 0.0)
    counts = dict.fromkeys(named, 0)
    largest = dict.fromkeys(named, 0.0)

    def watch(name: str):
        def hook(module: Connection, args: tuple, out: Tensor) -> None:
            stream, branch = args[0].float(), args[1].float()
            b = _branch_weight(module).to(branch)
            ratio = (b * branch).norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)
            real = real_tokens(batch, branch)
            ratio = ratio if real is None else ratio[real]
            sums[name] += float(ratio.sum())
            counts[name] += ratio.numel()
            largest[name] = max(largest[name], float(ratio.max()))

        return hook

    with ExitStack() as stack:
        for name, module in named.items():
            handle = module.register_forward_hook(watch(name))
            stack.callback(handle.remove)
        with evaluation_mode(model):
            for batch in batches:
                run_batch(model, batch)
    found = {
        name: Share(mean=sums[name] / counts[name], largest=largest[name])
        for name in named if counts[name]
    }  # fmt: skip
    unseen = sorted(named.keys() - found.keys())
    if unseen:
        raise UserError(
            f"{unseen[0]} was not reached by any batch; give batches that use every part of the "
            "model"
        )
    return dict(sorted(found.items(), key=lambda item: item[1].largest))


def _branch_weight(module: Connection) -> Tensor:
    fixed = module.config.b if module.config.kind == "fixed" else 1.0
    return module.gains().get("b", torch.tensor([fixed]))


def layer_names(model: nn.Module) -> dict[str, str]:
    """Name of the layer that every sublayer stands in, by the sublayer's connection; those that
    were dropped before are left out."""
    if isinstance(model, Transformer):
        named = (n for n, m in model.named_modules() if isinstance(m, Connection))
        return {name: name.rpartition(".")[0] for name in named}
    gone = {name for name, module in connections(model).items() if is_absent(module.config)}
    return {
        layer.path(join): layer.name
        for stack in find_stacks(model)
        for layer in stack.layers
        for join in layer.joins
        if layer.path(join) not in gone
    }
