"""Skips with a weight that can be set: opened, ordered, closed for good; and what it costs to
remove them without training, the control of every conversion.

    curves = untrained_curves(model, held_out)      # {"attention": ..., "mlp": ..., "all": ...}

Read by `converting.py`, `stages.py` and `folders.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from skipless.compiled import unwrapped
from skipless.config import ConnectionConfig
from skipless.evaluate.losses import as_list
from skipless.log import progress
from skipless.model import Connection
from skipless.surgery.checking import check_batches, check_finite
from skipless.surgery.conversion.distilling import Loss, Yardstick
from skipless.surgery.conversion.results import Untrained
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.surgery.patching import patch, patch_as, unpatch
from skipless.surgery.records import connections, record
from skipless.surgery.slimming.shares import shares
from skipless.surgery.stacks import SUBLAYERS, find_stacks

__all__ = [
    "close_joins", "count_skips", "open_joins", "ordered", "removal_curve", "set_joins",
    "untrained_curves",
]  # fmt: skip

Joins = Mapping[str, Connection]
Measure = Callable[[nn.Module], tuple[float, float, float | None]]


def open_joins(model: nn.Module, config: ConversionConfig) -> dict[str, Connection]:
    """Give every chosen skip a weight that can be set: joins of kind anneal, with a = 1 at first.

    Returns the connections by dotted name, in the order of computation. Raises UserError as
    `patch` does: for a site that is patched already, and for whatever matches nothing.
    """
    before = connections(model)
    sites = SUBLAYERS if set(config.sites) == set(SUBLAYERS) else config.sites
    annealed = ConnectionConfig(kind="anneal", anneal_fraction=config.anneal_fraction)
    patch(
        model, annealed, sites=sites, layers=config.layers or None, stacks=config.stacks or None
    )  # fmt: skip
    return {name: join for name, join in connections(model).items() if name not in before}


def count_skips(model: nn.Module) -> tuple[int, int]:
    """(places that have a skip in the unpatched model, how many of them have kind none)."""
    total = sum(len(layer.joins) for stack in find_stacks(model) for layer in stack.layers)
    return total, sum(join.config.kind == "none" for join in connections(model).values())


def ordered(
    model: nn.Module, joins: Joins, order: str, batches: Sequence[Any], measure: Measure
) -> list[str]:
    """The names in the order of their going (ConversionConfig.order)."""
    names = list(joins)
    if order == "last-first":
        return names[::-1]
    if order == "by-share":
        found = shares(model, batches)
        return sorted(names, key=lambda name: -found[name])
    if order == "by-loss":
        alone = {}
        with progress("removing every skip alone", len(names), unit="skips") as advance:
            for name in names:
                set_joins(joins, [name], 1.0)
                alone[name] = measure(model)[1]
                set_joins(joins, [name], 0.0)
                advance(note=f"{name} {alone[name]:+.3f}")
        return sorted(names, key=alone.__getitem__)
    return names


def removal_curve(
    model: nn.Module,
    joins: Joins,
    names: Sequence[str],
    counts: Iterable[int],
    measure: Measure,
    total: int,
    already: int = 0,
) -> tuple[Untrained, ...]:
    """The loss with the first n of `names` gone, for each n of `counts`, without training.

    All skips stand again afterwards.
    """
    rows, points = [], sorted(set(counts))
    try:
        with progress("removing skips without training", len(points), unit="points") as advance:
            for count in points:
                set_joins(joins, names[:count], 1.0)
                loss, increase, _ = measure(model)
                gone = already + count
                rows.append(
                    Untrained(num_removed=gone, share=gone / total, loss=loss, increase=increase)
                )
                advance(note=f"{count}: {increase:+.3f}")
    finally:
        set_joins(joins, names, 0.0)
    return tuple(rows)


def untrained_curves(
    model: nn.Module,
    held_out: Any,
    config: ConversionConfig | None = None,
    *,
    points: int = 10,
    loss: Loss | None = None,
) -> dict[str, tuple[Untrained, ...]]:
    """What it costs to remove skips without training, for each kind of site and for all of them.

    `held_out` as `skipless.evaluate.loss` takes it; the sites, layers, stacks and order of `config`
    (from the last layer on by default); about `points` numbers of skips a curve, each a pass over
    the held-out text. `loss` measures what is no causal language model. The model is afterwards
    what it was. Raises UserError as `convert` does.
    """
    config, model = config or ConversionConfig(), unwrapped(model)
    batches = list(as_list(held_out))
    check_batches(model, batches)
    check_finite(model)
    measure = Yardstick(model, batches, loss)
    total, already = count_skips(model)
    before = measure(model)[0]
    start = Untrained(num_removed=already, share=already / total, loss=before, increase=0.0)
    curves: dict[str, tuple[Untrained, ...]] = {}
    for name, sites in _choices(model, config.sites).items():
        joins = open_joins(model, dataclasses.replace(config, sites=sites))
        try:
            names = ordered(model, joins, config.order, batches, measure)
            counts = {max(1, round(len(names) * (i + 1) / points)) for i in range(points)}
            rows = removal_curve(model, joins, names, counts, measure, total, already)
        finally:
            close_joins(model, joins, ())
        curves[name] = (start, *rows)
    return curves


def close_joins(model: nn.Module, joins: Joins, removed: Iterable[str]) -> None:
    """Take out what `open_joins` put in; the skips of `removed` are gone for good (kind none)."""
    kept = {name: join for name, join in connections(model).items() if name not in joins}
    gone = list(removed)
    none = [{"connection": {"kind": "none"}, "at": gone}] if gone else []
    rows = [{**row, "at": [n for n in row["at"] if n in kept]} for row in record(model)]
    unpatch(model)
    patch_as(model, [row for row in rows if row["at"]] + none)
    for name, join in kept.items():  # its gains are what they were
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, join)


def set_joins(joins: Joins, names: Iterable[str], progress: float) -> None:
    """Tell the connections `names` the share of their annealing that is done, in [0, 1]."""
    for name in names:
        joins[name].set_training_progress(progress)


def _choices(model: nn.Module, sites: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Every kind of site alone, then all together; those that the model has not are left out, but
    not when one was named, which is a mistake to be told."""
    present = {j.sublayer for stack in find_stacks(model) for la in stack.layers for j in la.joins}
    if set(sites) == set(SUBLAYERS):
        sites = tuple(site for site in SUBLAYERS if site in present)
    alone: dict[str, tuple[str, ...]] = {site: (site,) for site in sites}
    return alone | ({"all": sites} if len(sites) > 1 else {})
