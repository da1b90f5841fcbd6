"""Which layer hurts: the loss when one layer alone is quantised, or all but one.

keep="others"  one layer quantised, the others in full precision: the damage that it does by itself
keep="one"     one layer in full precision, the others quantised: the damage that is left without it

Were damages to add up, what a layer costs alone would be what keeping it gives back. They do not:
noise of one layer is amplified, absorbed or drowned by others, and the difference of the two is the
interaction. A pass takes the outputs of the blocks before the layer from the pass it is compared
with, where that gives the same loss exactly (it is tried). Read by the CLI and by whoever chooses
where to spend bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from skipless.compiled import unwrapped
from skipless.errors import UserError, check_choice
from skipless.evaluate.losses import SequenceLosses, as_list, sequence_losses
from skipless.evaluate.prefixes import Prefixes
from skipless.quant import Scheme, executed
from skipless.quant.methods import parse_methods
from skipless.quant.targets import ActivationTarget, WeightTarget, find_targets
from skipless.scheme import FULL_PRECISION

LOCAL = ("rtn", "gptq", "codebook")
"""Methods that leave every tensor outside the layers they round as it is."""


def sensitivity(
    model: nn.Module,
    scheme: Scheme | str,
    batches: Iterable[Any],
    scope: str = "block",
    *,
    keep: str = "others",
    by: str = "layer",
    method: str = "rtn",
    calibration: Iterable[Any] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Loss with one layer quantised, or with `keep` "one" all but one, a row a layer by depth.

    `by` "layer" takes whole blocks, "module" single linear layers with their inputs, also those
    outside the blocks. Keys: layer (number, or name), loss, increase (nats a token over full
    precision), standard_error (paired), num_weights, num_sites (of the layer); with "one" also
    recovered (nats that keeping the layer takes off the whole model's increase) and
    recovered_error (paired). Errors interact, so that neither adds up to the increase of the whole
    model. Raises UserError for a model without numbered layers, for a single layer that is to be
    kept, and as `loss` and `quantize` do.
    """
    check_choice("keep", keep, ("others", "one"))
    check_choice("by", by, ("layer", "module"))
    scheme, model = Scheme.parse(scheme), unwrapped(model)
    data = list(as_list(batches))
    samples = None if calibration is None else list(as_list(calibration))
    units = _units(model, scheme, scope, keep, by)
    if keep == "one" and len(units) < 2:
        raise UserError(
            f"{type(model).__name__} has one {by} to quantise, and nothing is left without it; "
            "keep='others' measures it alone"
        )
    options: dict[str, Any] = {"method": method, "calibration": samples}

    def measure() -> SequenceLosses:
        return sequence_losses(model, data)

    prefixes = Prefixes(model)
    if any(each.name not in LOCAL for each in parse_methods(method)):
        prefixes.kept = None
    if keep == "others":
        full = everything = _recorded(prefixes, measure)
    else:
        full = measure()
        with executed(model, scheme, scope, **options):
            everything = _recorded(prefixes, measure)
    rows = []
    for name, unit in units.items():
        before = prefixes.before(unit.modules)
        with executed(model, unit.scheme, scope, layers=unit.layers, **options):
            found = prefixes.replay(before, measure)
        row = {
            "layer": name,
            "loss": found.nats,
            "increase": found.nats - full.nats,
            "standard_error": found.standard_error(full),
            "num_weights": len(unit.weights),
            "num_sites": len(unit.sites),
        }
        if keep == "one":
            row["recovered"] = everything.nats - found.nats
            row["recovered_error"] = found.standard_error(everything)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows


def _recorded(prefixes: Prefixes, measure: Callable[[], SequenceLosses]) -> SequenceLosses:
    """`measure` of a whole pass, whose outputs are kept if giving them back gives the same."""
    found = prefixes.record(measure)
    if prefixes.kept is not None:
        again = prefixes.replay(list(prefixes.kept)[:-1], measure)
        if again.nats != found.nats:
            prefixes.kept = None
    return found


@dataclass(kw_only=True)
class _Unit:
    """What is taken apart at once."""

    weights: list[WeightTarget]
    sites: list[ActivationTarget]
    modules: list[str]
    """Names of all modules that are touched."""
    layers: set[int | None] | None = None
    """For a whole layer the layers to quantise,"""
    scheme: Scheme
    """and for a module the scheme that leaves out the others, or it."""


def _units(
    model: nn.Module, scheme: Scheme, scope: str, keep: str, by: str
) -> dict[int | str, _Unit]:
    weights, sites = find_targets(model, scheme, scope)
    units: dict[int | str, _Unit] = {}
    if by == "module":
        for target in weights:
            names = target.modules
            if not names[0]:
                raise UserError("the model is a single linear layer; there is nothing beside it")
            inputs = [s for s in sites if s.site.module in names and s.site.kind == "linear_input"]
            apart = _all_but(scheme, names) if keep == "one" else _alone(scheme, target)
            units[names[0]] = _Unit(
                weights=[target], sites=inputs, modules=list(names), scheme=apart
            )
        return units
    every = {t.layer for t in weights} | {t.site.layer for t in sites}
    layers = sorted({t.layer for t in weights if t.layer is not None})
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no numbered layers to take one at a time; use "
            "by='module', or precision_table for the whole model"
        )
    for layer in layers:
        own = [t for t in weights if t.layer == layer]
        inside = [t for t in sites if t.site.layer == layer]
        modules = [name for t in own for name in t.modules] + [t.site.module for t in inside]
        units[layer] = _Unit(
            weights=own, sites=inside, modules=modules, scheme=scheme,
            layers={layer} if keep == "others" else every - {layer},
        )  # fmt: skip
    return units


def _all_but(scheme: Scheme, names: Sequence[str]) -> Scheme:
    """`scheme` with some layers and their inputs in full precision."""
    others = [pair for pair in scheme.overrides if pair[0] not in names]
    apart = [(name, FULL_PRECISION) for name in names]
    return replace(scheme, overrides=(*others, *apart))


def _alone(scheme: Scheme, target: WeightTarget) -> Scheme:
    """`scheme` for one weight and its inputs, which exceptions may set apart; nothing else."""
    overrides = [("*", FULL_PRECISION), *((name, str(target.scheme)) for name in target.modules)]
    for name in target.modules:
        of_input = scheme.at(site := f"{name}:input", name)
        if of_input != target.scheme:
            overrides.append((site, FULL_PRECISION if of_input is None else str(of_input)))
    return replace(scheme, overrides=tuple(overrides))
