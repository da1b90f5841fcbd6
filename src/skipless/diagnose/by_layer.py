"""What quantising costs layer by layer, and what would cost less: passes through whole models.

    layers    damage of one layer at a time, at each scheme, beside its prediction
    depth     R_l (S9), at the first scheme
    alternatives    milder schemes and exempted layers, measured

Of a model that is read layer by layer the prediction alone. Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from skipless.diagnose.block_noise import block_noise
from skipless.diagnose.damage import Damage
from skipless.diagnose.parts import Parts
from skipless.diagnose.sensitivity import alternatives, layer_sensitivity, predict
from skipless.diagnose.site_rows import Say
from skipless.diagnose.streaming import is_streamed
from skipless.errors import UserError
from skipless.evaluate import error_propagation
from skipless.quant import Scheme
from skipless.report.ranks import spearman

Row = dict[str, Any]


class Work(NamedTuple):
    """What every pass needs."""

    model: nn.Module
    batches: list[Any]
    scope: str
    parts: Parts
    say: Say

    def options(self, scheme: Scheme) -> dict[str, Any]:
        """What `quantize` needs beside a scheme and a scope."""
        return {"calibration": self.batches} if scheme.needs_calibration else {}


def by_layer(
    work: Work,
    schemes: Sequence[Scheme],
    measure: str,
    sites: Sequence[Row],
    weights: Sequence[Row],
) -> dict[str, Any]:
    """layers, depth, alternatives, damage and missing of a `Diagnosis`; `measure` is `Damage`'s,
    `sites` and `weights` are the tables of the report.

    Raises UserError for a measure that the model does not have.
    """
    missing: list[str] = []
    if is_streamed(work.model):
        rows = [row for scheme in schemes for row in _predicted_alone(work, scheme, missing)]
        return {"layers": rows, "depth": [], "alternatives": [], "damage": None, "missing": missing}
    damage = Damage(work.model, work.batches, measure)
    about: Row = {
        "kind": damage.kind, "unit": damage.unit, "baseline": damage.baseline, "correlation": {},
    }  # fmt: skip
    rows = []
    for scheme in schemes:
        try:
            measured = _one_at_a_time(work, damage, scheme)
        except UserError as error:
            missing.append(f"loss by layer at {scheme}: {error}")
            continue
        noise = _noise(work, scheme, missing)
        about["predicted"] = "block" if noise else "sites"
        noise = noise or predict(work.model, scheme, work.scope, sites, weights)
        measured = [
            row | {"scheme": str(scheme), "predicted": noise.get(row["layer"])} for row in measured
        ]
        pairs = [row for row in measured if row["predicted"] is not None]
        about["correlation"][str(scheme)] = spearman(
            [row["predicted"] for row in pairs], [row["increase"] for row in pairs], least=3
        )
        rows += measured
    first = schemes[0]
    return {
        "layers": rows, "depth": _depth(work, first, missing),
        "alternatives": _alternatives(
            work, damage, first, [row for row in rows if row["scheme"] == str(first)], missing
        ),
        "damage": about, "missing": missing,
    }  # fmt: skip


def _one_at_a_time(work: Work, damage: Damage, scheme: Scheme) -> list[Row]:
    """Rows of `layer_sensitivity`, those on disk not measured again, each kept when it is there."""
    part = f"layers-{str(scheme).replace(':', '_')}"
    done: list[Row] = []

    def keep(row: Row) -> None:
        done.append(row)
        work.parts.keep(part, done)

    work.say(f"one layer at a time at {scheme}")
    known = work.parts.known(part) or []
    return layer_sensitivity(damage, scheme, work.scope, work.options(scheme), keep, known)


def _noise(work: Work, scheme: Scheme, missing: list[str]) -> dict[int, float | None]:
    """{layer: what `block_noise` predicts}, None where it is not finite; {} with the reason where
    it cannot be measured."""
    work.say(f"noise of every block at {scheme}")
    try:
        noise = block_noise(work.model, scheme, work.batches, work.scope, work.options(scheme))
    except UserError as error:
        missing.append(f"noise of blocks at {scheme}: {error}")
        return {}
    return {layer: value if math.isfinite(value) else None for layer, value in noise.items()}


def _predicted_alone(work: Work, scheme: Scheme, missing: list[str]) -> list[Row]:
    """The rows of layers of a model that is read layer by layer: predicted and not measured."""
    return [
        {"scheme": str(scheme), "layer": layer, "increase": None, "standard_error": None,
         "predicted": value}
        for layer, value in sorted(_noise(work, scheme, missing).items())
    ]  # fmt: skip


def _depth(work: Work, scheme: Scheme, missing: list[str]) -> list[Row]:
    work.say(f"error by depth at {scheme}")
    try:
        return work.parts.get("depth", lambda: error_propagation(
            work.model, scheme, work.batches, work.scope, **work.options(scheme)
        ))  # fmt: skip
    except UserError as error:
        missing.append(f"error by depth: {error}")
        return []


def _alternatives(
    work: Work, damage: Damage, scheme: Scheme, layers: Sequence[Row], missing: list[str]
) -> list[Row]:
    try:
        return work.parts.get("alternatives", lambda: alternatives(
            damage, scheme, work.scope, work.options(scheme), layers, work.say
        ))  # fmt: skip
    except UserError as error:
        missing.append(f"the whole model quantised: {error}")
        return []
