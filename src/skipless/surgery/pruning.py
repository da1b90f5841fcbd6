"""`prune`: leave out the sublayers that hardly change the stream. Not exact, so it reports the loss
before and after (F5).

At y = a x + b f(norm(x)) a sublayer's share is |b f| / |x| of a token, the norms over its channels.
Where the largest share over all tokens stays below the tolerance, the sublayer becomes the identity
(y = x); a layer of which nothing is left is taken out of the model, so that it costs neither time
nor parameters nor cache. A sublayer left out alone is still computed and then multiplied by 0.
Works in place, on our Transformer and on patched Hugging Face models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipless.config import ConnectionConfig, ConnectionOverride
from skipless.errors import UserError
from skipless.evaluate import loss as language_loss
from skipless.log import console
from skipless.model import Connection, Transformer, build_connection
from skipless.quant import evaluation_mode, run_batch
from skipless.surgery.adapters import find_stacks
from skipless.surgery.patching import CONSTANT_KINDS
from skipless.surgery.records import connections, refresh_record

__all__ = ["Pruned", "prune", "shares"]

_CACHE_INDEX = "layer_idx"
"""By which transformers' cache addresses a layer."""
IDENTITY = ConnectionConfig(kind="fixed", a=1.0, b=0.0)
"""The join of a sublayer that was left out."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What `prune` did."""

    shares: dict[str, float]
    """Largest |b f| / |x| of every connection before pruning, smallest first."""
    dropped: tuple[str, ...]
    """Connections that became the identity, under their names before."""
    removed_layers: tuple[str, ...]
    """Layers that are gone, under their names before."""
    loss_before: float
    loss_after: float

    def describe(self) -> str:
        """One line of counts and losses."""
        return (
            f"dropped {len(self.dropped)} of {len(self.shares)} sublayers, removed "
            f"{len(self.removed_layers)} layers: loss {self.loss_before:.5f} -> "
            f"{self.loss_after:.5f} ({self.loss_after - self.loss_before:+.5f})"
        )


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    tolerance: float = 1e-3,
    *,
    loss: Callable[[nn.Module, list[Any]], float] | None = None,
) -> Pruned:
    """Drop every sublayer whose |b f| / |x| stays below `tolerance` on `batches` (F5).

    `batches` as `skipless.evaluate.loss` takes them; they are read three times. `loss` measures a
    model that is no language model. Prints and returns what was dropped and the loss before and
    after. Raises UserError when nothing is below the tolerance, when everything is, and for a
    sublayer below it that has no skip to fall back on.
    """
    if not tolerance > 0:
        raise UserError(f"tolerance is {tolerance}; a positive share of the stream was expected")
    batches = list(batches)
    if not batches:
        raise UserError("no batch to measure the sublayers on; pass at least one")
    measure = loss or (lambda m, b: language_loss(m, b).nats)
    found = shares(model, batches)
    named = _connections(model)
    small = [name for name, share in found.items() if share < tolerance]
    if not small:
        name, share = next(iter(found.items()))
        raise UserError(
            f"no sublayer stays below {tolerance:g}; the smallest is {name} with {share:.3g}"
        )
    if len(small) == len(named):
        raise UserError(f"every sublayer stays below {tolerance:g}; nothing would be left")
    before = measure(model, batches)
    for name in small:
        module = named[name]
        identity = build_connection(IDENTITY, module.hidden_size).train(module.training)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, identity)
    removed = _remove_own(model) if isinstance(model, Transformer) else _remove_patched(model)
    pruned = Pruned(
        shares=found, dropped=tuple(small), removed_layers=tuple(removed), loss_before=before,
        loss_after=measure(model, batches),
    )  # fmt: skip
    console.print(pruned.describe(), highlight=False, markup=False)
    return pruned


def shares(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Largest |b f| / |x| over all tokens at every connection, smallest first.

    A stream weight counts as part of x: the share is |y - a x| / |x|. Raises UserError for a
    model without connections.
    """
    found: dict[str, float] = {}

    def watch(name: str):
        def hook(module: Connection, args: tuple, out: Tensor) -> None:
            stream, branch = args[0].float(), args[1].float()
            b = _branch_weight(module).to(branch)
            ratio = (b * branch).norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)
            found[name] = max(found.get(name, 0.0), float(ratio.max()))

        return hook

    named = _connections(model)
    handles = [m.register_forward_hook(watch(name)) for name, m in named.items()]
    try:
        with evaluation_mode(model):
            for batch in batches:
                run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _branch_weight(module: Connection) -> Tensor:
    fixed = module.config.b if module.config.kind == "fixed" else 1.0
    return module.gains().get("b", torch.tensor([fixed]))


def _connections(model: nn.Module) -> dict[str, Connection]:
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
    candidates = {
        name: module for name, module in named.items()
        if module.config.kind != "none" and module.config != IDENTITY
    }  # fmt: skip
    if not candidates:
        raise UserError(
            f"{type(model).__name__} has no sublayer to drop: none of them has a skip to fall back "
            "on, or all are dropped"
        )
    return candidates


def _remove_own(model: Transformer) -> list[str]:
    """Bring the config up to date and take out layers of identities only."""
    config = model.config
    joins = [(b.attention_connection.config, b.mlp_connection.config) for b in model.blocks]
    gone = [i for i, pair in enumerate(joins) if pair == (IDENTITY, IDENTITY)]
    placed = config.norm_placement != "post"  # a norm behind the join still acts on the stream
    indexed = config.temperature.kind == "constant" and config.temperature.beta != 1
    if not placed or indexed:  # beta^-l counts layers; fold the temperature first (F6)
        gone = []
    stay = [i for i in range(len(joins)) if i not in gone]
    rules = tuple(
        ConnectionOverride(connection=joins[old][side], layers=(new,), sublayer=sublayer)
        for new, old in enumerate(stay)
        for side, sublayer in enumerate(("attention", "mlp"))
        if joins[old][side] != config.connection
    )
    model.layers = nn.ModuleList(model.layers[i] for i in stay)
    for index, block in enumerate(model.blocks):
        block.self_attn.layer = index
    model.config = dataclasses.replace(
        config, num_hidden_layers=len(stay), connection_overrides=rules
    )
    return [f"layers.{i}" for i in gone]


def _remove_patched(model: nn.Module) -> list[str]:
    """Take out layers of identities only from the one stack of a Hugging Face decoder or encoder;
    models of several stacks, or with layers of several types, keep them."""
    stacks = find_stacks(model)
    named = connections(model)
    config: Any = model.config  # one of transformers' classes, or nn.Module would say Tensor
    types = set(getattr(config, "layer_types", None) or [None])
    removed = []
    if len(stacks) == 1 and len(types) == 1 and hasattr(config, "num_hidden_layers"):
        for layer in stacks[0].layers:
            found = [named.get(layer.path(join)) for join in layer.joins]
            behind = any(join.owner for join in layer.joins)  # BERT norms the stream after a join
            if not behind and all(c is not None and c.config == IDENTITY for c in found):
                removed.append(layer)
    if removed:
        parent, _, attribute = stacks[0].name.rpartition(".")
        stay = [layer.module for layer in stacks[0].layers if layer not in removed]
        setattr(model.get_submodule(parent), attribute, nn.ModuleList(stay))
        for index, module in enumerate(stay):
            for part in module.modules():
                if isinstance(getattr(part, _CACHE_INDEX, None), int):
                    setattr(part, _CACHE_INDEX, index)
        config.num_hidden_layers = len(stay)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: len(stay)]
    refresh_record(model)
    return [layer.name for layer in removed]
