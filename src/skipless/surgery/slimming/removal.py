"""Sublayers and whole layers taken out of a model, and what is left of it in numbers.

Our Transformer: a block without the sublayer, or no block (`Block.drop`). Patched Hugging Face
models: a layer of which nothing is left goes, where the model has one stack of layers of one type;
single sublayers as `dropping.py` can. Read by `pruning.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig
from skipless.model import IDENTITY, Transformer, build_connection, is_absent
from skipless.quant import evaluation_mode, run_batch
from skipless.surgery.dropping import drop_modules, layer_types, number_caches
from skipless.surgery.records import connections, refresh_record
from skipless.surgery.stacks import find_stacks

__all__ = ["Size", "remove", "size_of"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a model costs to hold."""

    num_parameters: int
    """Shared ones once."""
    cache_bytes: int | None
    """Of keys and values, a token; None for a model that keeps none."""


def size_of(model: nn.Module, batch: Any) -> Size:
    """Parameters, and bytes of cache that a token of text takes; of a Hugging Face model found by
    running `batch`."""
    count = sum(p.numel() for p in model.parameters())
    own = isinstance(model, Transformer)
    found = _own_cache_bytes(model) if own else _measured_cache_bytes(model, batch)
    return Size(num_parameters=count, cache_bytes=found)


def remove(model: nn.Module, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Take out the sublayers of these connections, in place; returns the names of the layers that
    are gone, and of the connections whose sublayers are still computed and then multiplied by 0."""
    names = list(names)
    if isinstance(model, Transformer):
        return _remove_own(model, names), ()
    named = connections(model)
    for name in names:
        old = named[name]
        parent, _, attribute = name.rpartition(".")
        identity = build_connection(IDENTITY, old.hidden_size).train(old.training)
        setattr(model.get_submodule(parent), attribute, identity)
    return _remove_patched(model, names)


def _own_cache_bytes(model: Transformer) -> int | None:
    config = model.config
    if not config.causal or config.num_labels is not None:
        return None
    entry = 2 * config.key_value_heads * config.head_dim * model.embed_tokens.weight.element_size()
    return entry * sum(block.self_attn is not None for block in model.blocks)


def _measured_cache_bytes(model: nn.Module, batch: Any) -> int | None:
    """As found in the cache after `batch`; None where the model keeps none."""
    if not getattr(getattr(model, "config", None), "use_cache", False):
        return None
    if isinstance(batch, (tuple, list)):
        batch = batch[0]
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    with evaluation_mode(model):
        out: Any = run_batch(model, {**inputs, "use_cache": True})
    cache: Any = getattr(out, "cache", None)
    cache = getattr(out, "past_key_values", None) if cache is None else cache
    cache = getattr(cache, "self_attention_cache", cache)  # a text grows in this one alone
    tensors = [
        tensor
        for layer in getattr(cache, "layers", ())
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor) and tensor.numel()
    ]
    return sum(t.nbytes // (t.shape[0] * t.shape[2]) for t in tensors)


def _remove_own(model: Transformer, names: list[str]) -> tuple[str, ...]:
    config = model.config
    dropped = {(layer, side) for layer, side in map(_place, names)}
    joins = [
        {
            side: IDENTITY if (layer, side) in dropped else config.connection_at(layer, side)
            for side in ("attention", "mlp")
        }
        for layer in range(config.num_hidden_layers)
    ]
    for layer, block in enumerate(model.blocks):
        for side in ("attention", "mlp"):
            if (layer, side) in dropped:
                block.drop(side)
    gone = [i for i, pair in enumerate(joins) if all(map(is_absent, pair.values()))]
    placed = config.norm_placement != "post"  # a norm behind the join still acts on the stream
    indexed = config.temperature.kind == "constant" and config.temperature.beta != 1
    if not placed or indexed:  # beta^-l counts layers; fold the temperature first (F6)
        gone = []
    stay = [i for i in range(len(joins)) if i not in gone]
    model.layers = nn.ModuleList(model.layers[i] for i in stay)
    for index, block in enumerate(model.blocks):
        block.place(index, config.causal)
    model.config = dataclasses.replace(
        config, num_hidden_layers=len(stay),
        connection_overrides=_rules([joins[i] for i in stay], config),
    )  # fmt: skip
    return tuple(f"layers.{i}" for i in gone)


def _place(name: str) -> tuple[int, str]:
    """Layer and sublayer of "layers.3.mlp_connection"."""
    _, layer, attribute = name.split(".")
    return int(layer), attribute.removesuffix("_connection")


def _rules(
    joins: list[dict[Any, ConnectionConfig]], config: ModelConfig
) -> tuple[ConnectionOverride, ...]:
    groups: dict[tuple[ConnectionConfig, Any], list[int]] = {}
    for layer, pair in enumerate(joins):
        for side, connection in pair.items():
            if connection != config.connection:
                groups.setdefault((connection, side), []).append(layer)
    return tuple(
        ConnectionOverride(connection=connection, layers=tuple(layers), sublayer=side)
        for (connection, side), layers in groups.items()
    )


def _remove_patched(model: nn.Module, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    stacks = find_stacks(model)
    named = connections(model)
    config: Any = model.config  # one of transformers' classes, or nn.Module would say Tensor
    removed = []
    # a scale by the layer's number is set when a layer is built, so the number must not change
    numbered = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    whole = len(stacks) == 1 and len(layer_types(model)) == 1 and not numbered
    if whole and hasattr(config, "num_hidden_layers"):
        for layer in stacks[0].layers:
            found = [named.get(layer.path(join)) for join in layer.joins]
            behind = any(join.owner for join in layer.joins)  # BERT norms the stream after a join
            if not behind and all(c is not None and is_absent(c.config) for c in found):
                removed.append(layer)
    if removed:
        stack = stacks[0]
        parent, _, attribute = stack.name.rpartition(".")
        stay = [layer for layer in stack.layers if layer not in removed]
        setattr(
            model.get_submodule(parent), attribute, nn.ModuleList(layer.module for layer in stay)
        )
        _cut_lists(config, len(stack.layers), [layer.index for layer in stay])
        renamed = {old.name: f"{stack.name}.{new}" for new, old in enumerate(stay)}
        number_caches(find_stacks(model)[0])
    else:
        renamed = {layer.name: layer.name for stack in stacks for layer in stack.layers}
    left = {
        renamed[layer.name] + layer.path(join)[len(layer.name) :]: layer.path(join)
        for stack in stacks
        for layer in stack.layers
        for join in layer.joins
        if layer.name in renamed and layer.path(join) in names
    }
    gone = drop_modules(model, left)
    refresh_record(model)
    still = tuple(old for new, old in left.items() if new not in gone)
    return tuple(layer.name for layer in removed), still


def _cut_lists(config: Any, count: int, stay: list[int]) -> None:
    """Keep the entries of the layers that stay in what the config lists by layer (layer_types)."""
    config.num_hidden_layers = len(stay)
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[i] for i in stay])
