"""Which layer breaks the model: measured one layer at a time, and as noise predicts it (S3, S9).

The prediction for a layer is the noise of its block's output (block_noise.py); for a model without
blocks the sum, over the tensors and weights that the scheme rounds there, of noise over energy,
every token (of a weight every output channel) counting alike. Neither knows what the rest of the
model does with the noise, so prediction and damage are compared by Spearman's rank correlation.
Layers of the same number in several stacks (encoder and decoder) are taken together.
Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from skipless.diagnose.damage import Damage
from skipless.diagnose.site_rows import Say
from skipless.errors import UserError
from skipless.quant import Scheme, quantized
from skipless.quant.targets import find_targets
from skipless.scheme import FULL_PRECISION, matches

VARIANTS = {
    "activations by token": {"activation_granularity": "token"},
    "weights by channel": {"weight_granularity": "channel"},
    "weights by channel, activations by token": {
        "weight_granularity": "channel", "activation_granularity": "token",
    },
    "clipped at the least squared error": {"clip": "mse"},
}  # fmt: skip
ENOUGH = 0.1
"""Leaving out layers stops where this share of the whole model's damage is left."""


def layer_sensitivity(
    damage: Damage,
    scheme: Scheme,
    scope: str,
    options: dict[str, Any],
    on_row: Callable[[dict[str, Any]], None] | None = None,
    known: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """A row a layer: layer, increase, standard_error. `known` rows are not measured again.

    Raises UserError for a model without numbered layers.
    """
    weights, _ = find_targets(damage.model, scheme, scope)
    layers = sorted({t.layer for t in weights if t.layer is not None})
    if not layers:
        raise UserError(f"{type(damage.model).__name__} has no numbered layers to take one by one")
    done = {row["layer"]: row for row in known}
    rows = []
    for layer in layers:
        row = done.get(layer)
        if row is None:
            with quantized(damage.model, scheme, scope, layers=[layer], **options):
                increase, error = damage.increase()
            row = {"layer": layer, "increase": increase, "standard_error": error}
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows


def predict(
    model: nn.Module,
    scheme: Scheme,
    scope: str,
    sites: Sequence[dict[str, Any]],
    weights: Sequence[dict[str, Any]],
) -> dict[int, float]:
    """{layer: sum of noise over energy} of what `scheme` rounds, from the rows of the report."""
    targets = find_targets(model, scheme, scope)
    noise = {row["site"]: row["token_sqnr"].get(str(scheme)) for row in sites}
    first = {row["site"]: row["tensor"] for row in sites}
    of_weight = {row["site"]: row["channel_sqnr"].get(str(scheme)) for row in weights}
    found: dict[int, float] = {}
    seen: set[tuple[int, str]] = set()
    for target in targets[1]:
        name, layer = target.site.name, target.site.layer
        if layer is None or (layer, first.get(name, name)) in seen:
            continue
        seen.add((layer, first.get(name, name)))
        found[layer] = found.get(layer, 0.0) + _ratio(noise.get(name))
    for weight in targets[0]:
        if weight.layer is not None:
            name = weight.name.removesuffix(".weight")
            found[weight.layer] = found.get(weight.layer, 0.0) + _ratio(of_weight.get(name))
    return found


def _ratio(decibels: float | None) -> float:
    return 0.0 if decibels is None or math.isnan(decibels) else 10 ** (-decibels / 10)


def alternatives(
    damage: Damage,
    scheme: Scheme,
    scope: str,
    options: dict[str, Any],
    layers: Sequence[dict[str, Any]],
    say: Say,
) -> list[dict[str, Any]]:
    """The whole model at `scheme`, at its milder forms, and without its worst layers, measured.

    Rows, `scheme` as asked first: what, scheme (with overrides), scope, exempt (layers in full
    precision), increase, standard_error, code (what to paste). A milder form that cannot be
    measured is left out. Raises UserError where `scheme` itself cannot be.
    """
    rows = [_whole(damage, "as asked", scheme, scope, options, say)]
    for what, other, where in _milder(scheme, scope):
        rows += _tried(damage, what, other, where, options, say)
    asked = rows[0]["increase"]
    order = [row["layer"] for row in sorted(layers, key=lambda r: -r["increase"])]
    number = 1
    while 2 * number <= len(order) and asked > 0:
        worst = sorted(order[:number])
        listed = f"layer{'s' * (number > 1)} {', '.join(map(str, worst))}"
        mixed = without_layers(damage.model, scheme, scope, worst)
        found = _tried(damage, f"{listed} in full precision", mixed, scope, options, say)
        rows += [row | {"exempt": worst} for row in found]
        if found and found[0]["increase"] <= ENOUGH * asked:
            break
        number *= 2
    return rows


def _milder(scheme: Scheme, scope: str) -> list[tuple[str, Scheme, str]]:
    """(in words, scheme, scope) of what rounds less."""
    forms = []
    for what, changes in VARIANTS.items():
        try:
            other = replace(scheme, **changes)
        except UserError:  # an option that this scheme excludes
            continue
        if other != scheme:
            forms.append((what, other, scope))
    if scope != "linear":
        forms.append(("inputs of linear layers only", scheme, "linear"))
    return forms


def _tried(
    damage: Damage, what: str, scheme: Scheme, scope: str, options: dict[str, Any], say: Say
) -> list[dict[str, Any]]:
    """The row of `_whole`; none where it cannot be measured."""
    try:
        return [_whole(damage, what, scheme, scope, options, say)]
    except UserError as error:
        say(f"{scheme} left out: {error}")
        return []


def _whole(
    damage: Damage,
    what: str,
    scheme: Scheme,
    scope: str,
    options: dict[str, Any],
    say: Say,
) -> dict[str, Any]:
    say(f"whole model at {scheme}, scope {scope}")
    with quantized(damage.model, scheme, scope, **options):
        increase, error = damage.increase()
    code = f'quantize(model, "{scheme}", scope="{scope}")'
    return {
        "what": what, "scheme": str(scheme), "scope": scope, "exempt": [],
        "increase": increase, "standard_error": error, "code": code,
    }  # fmt: skip


def without_layers(model: nn.Module, scheme: Scheme, scope: str, layers: Sequence[int]) -> Scheme:
    """`scheme` with overrides that leave these layers in full precision, by the names of their
    blocks, so that it can be pasted wherever a scheme is read; by the names of what is rounded
    there where no such names leave out these layers and nothing else."""
    places: list[tuple[str, int | None]] = []
    weights, activations = find_targets(model, scheme, scope)
    for weight in weights:
        places += [(name, weight.layer) for name in weight.modules]
    places += [(a.site.module, a.site.layer) for a in activations]
    inside = {name: layer for name, layer in places if layer in layers}
    blocks = {_block(name, layer) for name, layer in inside.items() if layer is not None}
    outside = [name for name, layer in places if layer not in layers]
    if any(matches(block, name) for block in blocks for name in outside):
        blocks = set(inside)
    kept = tuple(pair for pair in scheme.overrides if pair[0] not in blocks)
    new = tuple((block, FULL_PRECISION) for block in sorted(blocks, key=_natural))
    return replace(scheme, overrides=(*kept, *new))


def _block(name: str, layer: int) -> str:
    """model.layers.3 of model.layers.3.mlp.up_proj; the name where its layer does not stand."""
    words = name.partition(":")[0].split(".")
    if str(layer) not in words:
        return name
    return ".".join(words[: words.index(str(layer)) + 1])


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers.9 before layers.10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
