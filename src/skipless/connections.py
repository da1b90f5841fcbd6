"""The comparison of connections from end to end: train every missing row, then one report.

Rows are the recipes `connections-*`, a run directory a recipe and seed. Finished ones are not
repeated, the first seed of every row is trained before the second of any, and the report holds
whatever is finished in the directory, so it may be made in parts. Read by cli.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skipless import recipes
from skipless.config import RunConfig
from skipless.demo import prepare_data
from skipless.errors import UserError, check_choice, counted
from skipless.jsonable import override
from skipless.log import say
from skipless.recipes.connections import (
    AUTHOR_DEPTH,
    DEPTHS,
    FAST_KINDS,
    FEW,
    KINDS,
    fast_settings,
    name_of,
)
from skipless.report.build import check_out
from skipless.report.join_page import build_connection_report
from skipless.rows import Row, check_jobs, train_rows
from skipless.rundir import CONFIG, EVALUATION, RESULT, WEIGHTS, RunDir

TASKS = ("language", "authors")


def compare_connections(
    *,
    layers: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    kinds: Sequence[str] = (),
    tasks: Sequence[str] = TASKS,
    out: str | Path | None = None,
    jobs: int | None = None,
    fast: bool = False,
    settings: dict[str, str] | None = None,
) -> Path:
    """Train what is missing and return the path of the report, OUT/report.html.

    `settings` are overrides, the same for all rows. Kinds that do not go as deep as `layers` ask
    are left out there. Raises UserError for an unknown kind or depth, and when no run of the family
    is finished; single failures are told and named in the report.
    """
    check_jobs(jobs)
    base = Path(out or ("runs/connections-fast" if fast else "runs/connections"))
    report = check_out(base / "report.html")
    layers = tuple(layers or (FEW[:1] if fast else FEW))
    seeds = tuple(seeds or ((0,) if fast else (0, 1, 2)))
    kinds = tuple(kinds or (FAST_KINDS if fast else KINDS))
    changes = (fast_settings() if fast else {}) | (settings or {})
    rows, configs = [], {}
    for seed in seeds:
        for name in names(layers, kinds, tasks):
            chosen = changes | {"train.seed": str(seed)}
            config = override(recipes.get(name), chosen)
            directory = base / f"{name}-seed{seed}"
            if is_finished(directory, config):
                continue
            arguments = [f"--{key}={value}" for key, value in chosen.items()]
            if config.model.num_labels is not None:
                arguments.append("--measure")  # accuracy; little work for a classifier
            rows.append(Row(name, directory, config.train.num_steps, tuple(arguments)))
            configs[config.data, config.model.vocab_size] = config
    say(f"{counted(len(rows), 'run')} to train in {base}")
    rows = _with_text(rows, configs)
    if rows:
        train_rows(rows, jobs)
    for row in rows:
        if row.error:
            say(f"{row.directory.name} failed: {row.error} (log: {row.log})")
    return build_connection_report(family(base), report)


def names(layers: Sequence[int], kinds: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """The recipes of kinds and their baselines at depths, in the order in which they are trained.

    Raises UserError for what there is none of.
    """
    for kind in kinds:
        check_choice("connection kind", kind, tuple(KINDS))
    for task in tasks:
        check_choice("task", task, TASKS)
    for depth in layers:
        if depth not in DEPTHS:
            raise UserError(
                f"--layers has {depth}; there are rows at {', '.join(map(str, DEPTHS))} layers"
            )
    found = []
    wanted = {*kinds, *(KINDS[kind].baseline for kind in kinds)}
    for depth in sorted(layers):
        here = [kind for kind in KINDS if kind in wanted]
        if "language" in tasks:
            found += [name_of(kind, depth) for kind in here if depth in KINDS[kind].depths]
        if "authors" in tasks and depth == AUTHOR_DEPTH:
            found += [name_of(kind, depth, authors=True) for kind in here if KINDS[kind].classifies]
    if not found:
        raise UserError(
            f"none of {', '.join(kinds)} has a row at {', '.join(map(str, layers))} layers; "
            "`skipless list connections-` shows what there is"
        )
    return found


def is_finished(directory: Path, config: RunConfig) -> bool:
    """Whether a run of these very settings is there with all its results.

    A damaged one is taken up again by training it.
    """
    run = RunDir(directory)
    wanted = [RESULT, WEIGHTS] + ([EVALUATION] if config.model.num_labels is not None else [])
    return all((run / name).exists() for name in wanted) and run.continues(config)


def family(base: Path) -> list[Path]:
    """The run directories of the family in `base`, finished or not. UserError if there is none."""
    found = sorted(path.parent for path in base.glob(f"connections-*/{CONFIG}"))
    if not found:
        raise UserError(
            f"no run of {base} got so far as to write its settings; its *.log files say why"
        )
    return found


def _with_text(rows: list[Row], configs: dict) -> list[Row]:
    """The rows whose text could be prepared, once and before they look for it side by side."""
    missing = set()
    for key, config in configs.items():
        try:
            prepare_data(config)
        except UserError as error:
            say(f"left out: rows on {', '.join(config.data.sources)}: {error}")
            missing.add(key[0].sources)
    if not missing:
        return rows
    if len(missing) == len(configs):
        raise UserError("none of the texts could be prepared; `skipless data list` shows them")
    return [row for row in rows if recipes.get(row.recipe).data.sources not in missing]
