"""Evidence out of files: a run directory of ours, or a folder that `ProbeLog` wrote elsewhere.

No torch and no model here. Read by patient.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipless.doctor.evidence import Curve, Evidence
from skipless.errors import UserError
from skipless.jsonable import leaves
from skipless.report.inside import layer_of
from skipless.report.load import RunData, load_run, number
from skipless.report.measures import final_probe, rows
from skipless.rundir import RunDir

METRICS, PROBES = "metrics.jsonl", "probes.jsonl"
CONSTANT_KINDS = ("anneal", "fixed", "residual", "none")
"""Connections whose weights follow a plan or stand still by design."""


def has_records(path: str | Path) -> bool:
    """Whether a folder holds a log of training."""
    return any((Path(path) / name).is_file() for name in (METRICS, PROBES))


def from_run(path: str | Path) -> Evidence:
    """What a run directory of ours tells by its files. Raises UserError if it is none."""
    run = load_run(path)
    config = run.config
    probe = final_probe(run)
    learned = _learned_gains(run)
    found = Evidence(
        name=f"{path} ({run.label})", settings=leaves(config), unigram=run.unigram_loss,
        num_steps=config.train.num_steps,
        warmup_steps=config.train.warmup_steps, lr=config.optim.lr,
        num_keys=config.train.sequence_length, causal=config.model.causal,
        missing={"gains": "learned gains (this run's connections have none)"} if not learned
        else {},
    )  # fmt: skip
    found = _with_curves(found, run.metrics, run.probes, learned)
    diagnosis = RunDir(path).read_json("diagnosis.json", {})
    if isinstance(diagnosis, dict) and diagnosis.get("text") and not run.result:
        found = dataclasses.replace(found, nonfinite=f"step {diagnosis.get('step')}: "
                                    f"{diagnosis['text']}")  # fmt: skip
    if config.model.num_labels is not None:
        found = dataclasses.replace(
            found, unigram=None, missing={**found.missing, "unigram": "a language model"}
        )
    return _with_inside(found, probe, config.model.hidden_size)


def from_log(path: str | Path) -> Evidence:
    """What metrics.jsonl and probes.jsonl of any training tell; data.json may give unigram_loss."""
    log = RunDir(path)
    metrics, probes = log.read_jsonl(METRICS), log.read_jsonl(PROBES)
    if not metrics and not probes:
        raise UserError(
            f"{path} holds no rows in {METRICS} or {PROBES}; train with a ProbeLog that writes "
            "there"
        )
    note = log.read_json("data.json", {})
    note = note if isinstance(note, dict) else {}
    steps = [s for row in (*metrics, *probes) if isinstance(s := row.get("step"), int)]
    known = number(note, "unigram_loss")
    found = Evidence(
        name=str(path), unigram=known if known is not None and math.isfinite(known) else None,
        num_steps=note.get("num_steps") or max(steps, default=None),
        warmup_steps=note.get("warmup_steps"), causal=note.get("causal"),
        num_keys=_length(probes),
    )  # fmt: skip
    found = _with_curves(found, metrics, probes, None)
    return _with_inside(found, probes[-1] if probes else {}, None)


def _with_curves(
    e: Evidence, metrics: list[dict], probes: list[dict], learned: set[str] | None
) -> Evidence:
    """`learned` names the gains that can be learned; None takes them all."""
    gradients = [
        (step, norms) for row in (*metrics, *probes)
        if isinstance(step := row.get("step"), int) and (norms := _by_layer(row))
    ]  # fmt: skip
    gains: dict[str, dict[float, float]] = defaultdict(dict)
    for row in (*probes, *metrics):
        values, step = row.get("gains"), row.get("step")
        if not isinstance(values, dict) or not isinstance(step, int):
            continue
        for name, value in values.items():
            size = _size(value)
            if size is not None and (learned is None or name in learned):
                gains[name][float(step)] = size
    return dataclasses.replace(
        e, losses=_curve(metrics, "loss"), held_out=_curve(metrics, "held_out_loss"),
        gradients=tuple(sorted(gradients, key=lambda item: item[0])),
        gains={name: tuple(sorted(values.items())) for name, values in gains.items()},
    )  # fmt: skip


def _with_inside(e: Evidence, probe: Mapping[str, Any], width: int | None) -> Evidence:
    sites = rows(probe, "sites")
    widths = [s["channels"] for s in sites if s.get("kind") == "stream" and s.get("channels")]
    width = width or (widths[0] if widths else None)
    broken = [(str(s.get("site")), s["nonfinite"]) for s in sites if s.get("nonfinite")]
    nonfinite = e.nonfinite
    if nonfinite is None and sites:
        nonfinite = f"{broken[0][1]} values at {broken[0][0]} and {len(broken) - 1} sites more" \
            if broken else ""  # fmt: skip
    return dataclasses.replace(
        e, joins=tuple({**row, "channels": width} for row in rows(probe, "geometry")),
        attention=tuple(rows(probe, "attention")), nonfinite=nonfinite,
    )  # fmt: skip


def _learned_gains(run: RunData) -> set[str]:
    """Names of traced gains that training can change by its gradient."""
    names = {
        name for row in (*run.metrics, *run.probes)
        if isinstance(row.get("gains"), dict) for name in row["gains"]
    }  # fmt: skip
    found = set()
    for name in names:
        layer = layer_of(name)
        if "_connection." not in name or layer is None:
            continue  # identity biases and temperatures start where they are meant to stay
        sublayer = "mlp" if "mlp_connection" in name else "attention"
        if run.config.model.connection_at(layer, sublayer).kind not in CONSTANT_KINDS:
            found.add(name)
    return found


def _by_layer(row: Mapping[str, Any]) -> dict[int, float]:
    norms = row.get("gradient_norms")
    if not isinstance(norms, dict):
        return {}
    return {
        layer: value for key in norms
        if (layer := layer_of(key)) is not None and (value := number(norms, key)) is not None
    }  # fmt: skip


def _curve(table: list[dict], key: str) -> Curve:
    found = [
        (float(row["step"]), value) for row in table
        if isinstance(row.get("step"), int) and (value := number(row, key)) is not None
        and math.isfinite(value)
    ]  # fmt: skip
    return tuple(sorted(found))


def _size(value: Any) -> float | None:
    """A single gain with its sign, of several the mean of |gain|, as metrics.jsonl has them."""
    if isinstance(value, list) and len(value) == 1:
        return _size(value[0])
    if isinstance(value, list):
        sizes = [abs(s) for v in value if (s := _size(v)) is not None]
        return sum(sizes) / len(sizes) if sizes else None
    found = number({"v": value}, "v")
    return found if found is not None and math.isfinite(found) else None


def _length(probes: list[dict]) -> int | None:
    lengths = [n for row in probes if isinstance(n := row.get("num_keys"), int)]
    return lengths[-1] if lengths else None
