"""Run directories to `RunData`: everything a report needs, read from files only.

A part that is missing or unreadable is not an error: it becomes None and a sentence in
`RunData.missing`, which the report prints. Only a directory without config.json is refused.
In the files of a run NaN is written as null, so `number` tells "not finite" from "not measured".
No torch here. Read by tables, plots and html.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skipless.config import ConnectionConfig, RunConfig
from skipless.errors import UserError
from skipless.rundir import CONFIG, ENVIRONMENT, RunDir, continue_command

RESIDUAL, RESIDUAL_FREE, MIXED = "residual", "residual-free", "mixed"

OPTIMIZER_NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "soap": "SOAP",
    "shampoo": "Shampoo",
    "kl_shampoo": "KL-Shampoo",
    "kl_soap": "KL-SOAP",
}

# What each part of a run directory feeds: the sentence when it is not there.
PARTS = {
    "metrics.jsonl": "no loss curve",
    "probes.jsonl": "nothing about the inside over time",
    "probe.json": "no measurement after training",
    "quant.json": "no loss at low precision, no SQNR and no R_l",
    "eval.json": "no final evaluation",
    "samples.json": "no sample text",
}


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run directory in memory. Parts that do not exist are empty or None."""

    path: Path
    label: str
    config: RunConfig
    environment: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    """train.json: seconds of training and tokens, once finished."""
    probe: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    tasks: dict[str, Any] | None = None
    """tasks.json, which few runs have: zero-shot accuracies by scheme."""
    unigram_loss: float | None = None
    """data.json: held-out loss of token frequencies alone, nats a token."""
    missing: tuple[str, ...] = ()

    @property
    def unfinished(self) -> str:
        """ "step 29 of 40" for a run without train.json, which is written last, or with a log that
        is shorter than its settings; else empty."""
        train = self.config.train
        if self.result and not (self.metrics and self.tokens < train.num_tokens):
            return ""
        steps = [int(s) for row in self.metrics if math.isfinite(s := number(row, "step") or 0)]
        return f"step {max(steps, default=0)} of {train.num_steps}"

    @property
    def num_layers(self) -> int:
        return self.config.model.num_hidden_layers

    @property
    def optimizer(self) -> str:
        """The optimiser of the hidden matrices by its usual name."""
        name = self.config.optim.name
        return OPTIMIZER_NAMES.get(name, name)

    @property
    def family(self) -> str:
        """ "residual", "residual-free" (ends training without any skip) or "mixed"."""
        kinds = {_family(c) for c in self._connections()}
        return kinds.pop() if len(kinds) == 1 else MIXED

    @property
    def connection(self) -> str:
        """The connection in words, e.g. "anneal over 50 %" or "residual / none"."""
        seen = list(dict.fromkeys(_describe(c) for c in self._connections()))
        return " / ".join(seen)

    @property
    def tokens(self) -> int:
        """Training tokens seen so far, by the log; 0 when there is no log."""
        seen = [t for row in self.metrics if (t := number(row, "tokens")) is not None]
        return int(seen[-1]) if seen and math.isfinite(seen[-1]) else 0

    def _connections(self) -> list[ConnectionConfig]:
        model = self.config.model
        return [
            model.connection_at(layer, sublayer)
            for layer in range(model.num_hidden_layers)
            for sublayer in ("attention", "mlp")
        ]


def _family(connection: ConnectionConfig) -> str:
    if connection.kind == "residual":
        return RESIDUAL
    no_skip = connection.kind in ("none", "anneal")
    if no_skip or (connection.kind == "fixed" and connection.a == 0 and connection.c == 0):
        return RESIDUAL_FREE
    return MIXED


def _describe(connection: ConnectionConfig) -> str:
    if connection.kind == "anneal":
        return f"annealed to none over {connection.anneal_fraction:.0%}"
    if connection.kind == "fixed":
        return f"fixed a={connection.a:g} b={connection.b:g} c={connection.c:g}"
    return connection.kind


def number(row: dict[str, Any] | None, key: str) -> float | None:
    """`row[key]` as float: None when absent, NaN when it is null, text or not finite."""
    if not isinstance(row, dict) or key not in row:
        return None
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            value = float(value) if isinstance(value, str) else math.nan
        except ValueError:
            return math.nan
    return float(value) if math.isfinite(value) else math.nan


def load_run(path: str | Path) -> RunData:
    """Read one run directory. Raises UserError when it has no readable config.json."""
    run = RunDir.open(path)
    missing: list[str] = []
    config = run.config()

    def part(name: str, read: Callable[[str], Any], kind: type) -> Any:
        """One file checked for its JSON type; complaints go to `missing`."""
        if not (run / name).exists():
            missing.append(f"{name} is missing: {PARTS[name]}")
            return None
        try:
            value = read(name)
        except (UserError, OSError, UnicodeDecodeError) as error:
            missing.append(f"{name} cannot be read ({error}): {PARTS[name]}")
            return None
        if not isinstance(value, kind) or not value:
            missing.append(f"{name} is empty: {PARTS[name]}")
            return None
        return value

    metrics = part("metrics.jsonl", run.read_jsonl, list) or []
    probes = part("probes.jsonl", run.read_jsonl, list) or []
    probe = part("probe.json", run.read_json, dict)
    samples = part("samples.json", run.read_json, (dict, list)) or []  # type: ignore[arg-type]
    data = RunData(
        path=Path(path),
        label=config.label or config.name or Path(path).name,
        config=config,
        environment=_environment(run, missing),
        metrics=[row for row in metrics if isinstance(row, dict)],
        probes=[row for row in probes if isinstance(row, dict)],
        result=_optional(run, "train.json"),
        probe=probe,
        quant=part("quant.json", run.read_json, dict),
        evaluation=part("eval.json", run.read_json, dict),
        samples=[
            s for s in ([samples] if isinstance(samples, dict) else samples) if isinstance(s, dict)
        ],
        tasks=_optional(run, "tasks.json") or None,
        unigram_loss=number(_optional(run, "data.json"), "unigram_loss"),
    )
    if probe is None and data.probes:
        missing.append("the inside is shown as of the last line of probes.jsonl")
    if data.unfinished:
        missing.append(
            f"not finished, {data.unfinished}; continue with: {continue_command(data.path)}"
        )
    return dataclasses.replace(data, missing=tuple(missing))


def is_log(path: str | Path) -> bool:
    """Whether `path` holds what a `ProbeLog` wrote, and no run of ours."""
    path = Path(path)
    return (path / "probes.jsonl").is_file() and not (path / CONFIG).exists()


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories named by `paths`; a directory that contains runs stands for them, by name.

    Raises UserError for a path that neither is a run nor contains one.
    """
    found: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        if (path / CONFIG).exists():
            inside = [path]
        else:
            inside = sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        if is_log(path):
            raise UserError(
                f"{path} is a log of somebody's training and no run directory, so that it cannot "
                f"stand in a comparison; `skipless report {path}` alone shows it over time"
            )
        logs = [p for p in sorted(path.glob("*")) if is_log(p)] if not inside else []
        if logs:
            raise UserError(
                f"{path} contains no run directory but logs of somebody's training; `skipless "
                f"report {logs[0]}` shows one over time"
            )
        if not inside:
            what = "contains no run directory" if path.is_dir() else "does not exist"
            raise UserError(
                f"{path} {what}; name directories that `skipless train` or `skipless demo` wrote"
            )
        found += [p for p in inside if p not in found]
    return found


def load_runs(paths: Sequence[str | Path]) -> list[RunData]:
    """Read several run directories, in the order given.

    Raises UserError when there is none, when a directory is given twice or is not a run.
    """
    paths = [Path(p) for p in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not paths:
        raise UserError("no run directory was given; name at least one, e.g. runs/demo/*")
    resolved = [p.resolve() for p in paths]
    for path in paths:
        if resolved.count(path.resolve()) > 1:
            raise UserError(f"{path} is given twice; name each run directory once")
    return [load_run(path) for path in paths]


def _optional(run: RunDir, name: str) -> dict[str, Any]:
    try:
        value = run.read_json(name, {})
    except (UserError, OSError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _environment(run: RunDir, missing: list[str]) -> dict[str, Any]:
    values = _optional(run, ENVIRONMENT)
    if not values:
        missing.append("environment.json is missing or unreadable: machine and versions unknown")
    return values
