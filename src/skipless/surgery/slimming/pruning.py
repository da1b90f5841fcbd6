"""`prune`: leave out the sublayers that a model hardly needs. Not exact, so it reports the loss
before and after (F5).

    prune(model, batches, 1e-3)                   # all whose share |b f| / |x| stays below it
    prune(model, batches, loss_budget=0.02)       # the cheapest ones, one after the other

Every sublayer is ranked by its share of the stream and by the loss without it alone. What is
dropped becomes the identity, y = x, and is gone: its weights, its time, and an attention's entry
in the cache; a layer of which nothing is left goes as a whole. Works in place, on our Transformer
and on patched Hugging Face models. `shares.py` and `trials.py` measure, `removal.py` takes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from skipless.compiled import unwrapped
from skipless.errors import UserError, check_choice
from skipless.evaluate.losses import as_list
from skipless.log import console
from skipless.model import Connection
from skipless.ranges import is_real
from skipless.surgery.checking import check_batches, check_finite
from skipless.surgery.slimming.removal import Size, remove, size_of
from skipless.surgery.slimming.shares import Share, candidates, layer_names, measure_shares
from skipless.surgery.slimming.trials import LossFunction, Trials, next_token_loss

__all__ = ["PruneRow", "Pruned", "prune"]

TOLERANCE = 1e-3
"""Share of the stream that is dropped where neither a tolerance nor a budget is given."""


@dataclass(frozen=True, kw_only=True)
class PruneRow:
    """One sublayer (or layer, where whole ones were asked for)."""

    name: str
    """Its connection, or its layer, under the name before pruning."""
    share_mean: float
    """|b f| / |x| over the tokens of the batches; of a layer, its larger sublayer's."""
    share_max: float
    loss_change: float
    """Nats a token more without this one alone; inf where the loss is not finite without it."""
    is_dropped: bool


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What `prune` did."""

    rows: tuple[PruneRow, ...]
    """Everything that could have gone, the cheapest by loss first."""
    dropped: tuple[str, ...]
    """Connections whose sublayers became the identity, under their names before, in the order in
    which they went."""
    removed_layers: tuple[str, ...]
    """Layers that are gone, under their names before."""
    still_computed: tuple[str, ...]
    """Dropped ones that the architecture does not let go: computed, then multiplied by 0."""
    loss_before: float
    loss_after: float
    before: Size
    after: Size

    @property
    def shares(self) -> dict[str, float]:
        """Largest |b f| / |x| of every row, smallest first."""
        found = {row.name: row.share_max for row in self.rows}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def describe(self) -> str:
        """Counts, losses, parameters, and cache bytes a token."""
        before, after = self.before, self.after
        share = 1 - after.num_parameters / before.num_parameters
        lines = [
            f"dropped {sum(row.is_dropped for row in self.rows)} of {len(self.rows)} "
            f"{_noun(self.rows)}, removed {len(self.removed_layers)} layers: loss "
            f"{self.loss_before:.5f} -> {self.loss_after:.5f} "
            f"({self.loss_after - self.loss_before:+.5f})",
            f"parameters {before.num_parameters:,} -> {after.num_parameters:,} ({-share:+.1%})",
        ]
        if before.cache_bytes is not None and after.cache_bytes is not None:
            lines[1] += f", cache {before.cache_bytes:,} -> {after.cache_bytes:,} bytes a token"
        if self.still_computed:
            lines.append(
                "still computed and multiplied by 0, since the architecture does not let them go: "
                + ", ".join(self.still_computed)
            )
        return "\n".join(lines)

    def table(self) -> str:
        """A line a row: name, share mean and max, loss change alone, dropped or kept."""
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'site':{width}}  share mean   share max  loss alone"]
        for row in self.rows:
            lines.append(
                f"{row.name:{width}}  {row.share_mean:10.3g}  {row.share_max:10.3g}  "
                f"{row.loss_change:+10.5f}  {'dropped' if row.is_dropped else 'kept'}"
            )
        return "\n".join(lines)


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    tolerance: float | None = None,
    *,
    loss_budget: float | None = None,
    unit: Literal["sublayer", "layer"] = "sublayer",
    loss: LossFunction | None = None,
) -> Pruned:
    """Drop sublayers in place: by their share of the stream, or by what the loss loses (F5).

    `tolerance`: every sublayer whose |b f| / |x| stays below it for all tokens goes (1e-3 where
    nothing is given). `loss_budget`: the one that costs least goes, and so on, each measured again
    beside those that are gone, until the loss would be more than the budget (nats a token) above
    the start. With both, only sublayers below the tolerance are considered for the budget.

    `unit="layer"` drops whole layers only, which a plain class can still hold. `batches` as
    `skipless.evaluate.loss` takes them; they are read many times. `loss` measures a model that is
    no language model; then no output of a layer is used twice, and it takes twice as long.

    Prints and returns what was dropped, and losses, parameters and cache before and after. Raises
    UserError, with the model as it was, when nothing can be dropped or everything would be, for a
    sublayer below the tolerance that has no skip to fall back on, and for a loss that is not
    finite.
    """
    _check(tolerance, loss_budget)
    check_choice("unit", unit, ("sublayer", "layer"))
    model, batches = unwrapped(model), list(as_list(batches))
    if not batches:
        raise UserError(
            "no batch to measure the sublayers on; pass at least one, and a list instead of an "
            "iterator that was read before"
        )
    check_batches(model, batches)
    check_finite(model)
    named = candidates(model)
    groups = _groups(model, named, unit)
    single = measure_shares(model, named, batches)
    found = {name: _largest(single[part] for part in parts) for name, parts in groups.items()}
    trials = Trials(model, batches, groups, loss)
    alone = trials.alone()
    if loss_budget is None:
        chosen = _below(found, TOLERANCE if tolerance is None else tolerance)
        _leave_something(model, [part for name in chosen for part in groups[name]], tolerance)
    else:
        allowed = list(found) if tolerance is None else _below(found, tolerance)
        chosen = _within(loss_budget, trials, {name: alone[name] for name in allowed}, unit)
    expected, before = trials.current, size_of(model, batches[0])
    dropped = [part for name in chosen for part in groups[name]]
    removed, still = remove(model, dropped)
    pruned = Pruned(
        rows=_rows(found, alone, trials.full, chosen), dropped=tuple(dropped),
        removed_layers=removed, still_computed=still, loss_before=trials.full,
        loss_after=(loss or next_token_loss)(model, batches),
        before=before, after=size_of(model, batches[0]),
    )  # fmt: skip
    if loss is None and loss_budget is not None:
        _check_removal(pruned.loss_after, expected)
    for text in (pruned.table(), pruned.describe()):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return pruned


def _check(tolerance: float | None, loss_budget: float | None) -> None:
    if tolerance is not None and not (is_real(tolerance) and 0 < tolerance < math.inf):
        raise UserError(f"tolerance is {tolerance!r}; a positive share of the stream was expected")
    if loss_budget is not None and not (is_real(loss_budget) and 0 < loss_budget < math.inf):
        raise UserError(
            f"loss_budget is {loss_budget!r}; a positive number of nats a token was expected, such "
            "as 0.02"
        )


def _groups(
    model: nn.Module, named: dict[str, Connection], unit: str
) -> dict[str, tuple[str, ...]]:
    """What goes together: every connection alone, or all of a layer if all of them can go.

    Raises UserError where that is no layer, or all that the model has.
    """
    present = layer_names(model)
    groups = {name: (name,) for name in named}
    if unit == "layer":
        layers: dict[str, list[str]] = {}
        for name, layer in present.items():
            layers.setdefault(layer, []).append(name)
        groups = {layer: tuple(n) for layer, n in layers.items() if all(map(named.__contains__, n))}
    if not groups:
        raise UserError(
            "no layer can go as a whole: each has a sublayer without a connection or without a "
            "skip to fall back on; use unit='sublayer'"
        )
    if len(groups) == 1 and set(named) >= set(present):
        raise UserError(
            f"{next(iter(groups))} is the last {unit} that {type(model).__name__} has, so nothing "
            "can go; prune a larger model"
        )
    return groups


def _largest(found: Iterable[Share]) -> Share:
    return max(found, key=lambda share: share.largest)


def _below(found: dict[str, Share], tolerance: float) -> list[str]:
    ordered = sorted(found, key=lambda name: found[name].largest)
    small = [name for name in ordered if found[name].largest < tolerance]
    if not small:
        name = ordered[0]
        raise UserError(
            f"no {_noun_of(name)}'s share of the stream stays below {tolerance:g} for every token; "
            f"the nearest is {name} with {found[name].largest:.3g}: give a larger tolerance, or a "
            "loss budget"
        )
    return small


def _leave_something(model: nn.Module, dropped: list[str], tolerance: float | None) -> None:
    if set(dropped) >= set(layer_names(model)):
        raise UserError(
            f"every sublayer's share of the stream stays below {tolerance or TOLERANCE:g}; nothing "
            "would be left, so lower the tolerance"
        )


def _within(budget: float, trials: Trials, alone: dict[str, float], unit: str) -> list[str]:
    """What goes while the loss stays within the budget, in the order of its going."""
    trials.greedy(alone, budget)
    if not trials.out:
        name = min(alone, key=lambda n: alone[n])
        raise UserError(
            f"no {unit} can go within a loss budget of {budget:g}; the cheapest is {name} with "
            f"{alone[name] - trials.full:+.3g}"
        )
    return trials.out


def _rows(
    found: dict[str, Share], alone: dict[str, float], full: float, chosen: list[str]
) -> tuple[PruneRow, ...]:
    rows = [
        PruneRow(name=name, share_mean=share.mean, share_max=share.largest,
                 loss_change=alone[name] - full, is_dropped=name in chosen)
        for name, share in found.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.loss_change))


def _noun(rows: tuple[PruneRow, ...]) -> str:
    return _noun_of(rows[0].name) + "s"


def _noun_of(name: str) -> str:
    return "sublayer" if name.endswith("_connection") else "layer"


def _check_removal(after: float, expected: float) -> None:
    """What is taken out must compute what leaving out computed; an architecture whose modules do
    more than its source shows would fail here."""
    if not abs(after - expected) <= 1e-3 * max(1.0, abs(expected)):
        raise UserError(
            f"the loss without the dropped sublayers' modules is {after:.5f}, and {expected:.5f} "
            "with their branches left out: this architecture needs one of these modules; load the "
            "model anew"
        )
