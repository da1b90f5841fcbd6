"""The `skipless compare-connections` subcommand, apart from cli.py for its length. Read by cli."""

from __future__ import annotations

import tyro

from skipless.arguments import check_out


def compare_connections(
    layers: tuple[int, ...] = (),
    seeds: tuple[int, ...] = (),
    kinds: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    out: str | None = None,
    jobs: int | None = None,
    fast: bool = False,
    overrides: tyro.conf.Suppress[dict[str, str] | None] = None,
) -> None:
    """Train one small model with every way of joining the stream, and compare them.

    Residual, ReZero, LayerScale, hard removal, removal in places, interpolation, annealing,
    learned, gated and universal joins (`skipless list connections-`). Finished runs are not
    repeated, so the same command continues; the report holds every run in OUT.

    For example: skipless compare-connections --layers 8 --kinds residual rezero none --seeds 0

    Args:
        layers: depths, of 4, 8, 12 and 24; default 4 8. Only some kinds go beyond 8.
        seeds: default 0 1 2.
        kinds: all, if none is given; the baselines of those named come with them.
        tasks: language and authors (which author wrote a passage; 4 layers); default both.
        out: directory of runs and report; default runs/connections or runs/connections-fast.
        jobs: rows that train at a time; default one a core.
        fast: six kinds in small, under two minutes (not for conclusions).
    """
    check_out(out)
    from skipless import connections

    path = connections.compare_connections(
        layers=layers,
        seeds=seeds,
        kinds=kinds,
        tasks=tasks or connections.TASKS,
        out=out,
        jobs=jobs,
        fast=fast,
        settings=overrides,
    )
    print(path.with_suffix(".md").read_text())
    print(f"{path}  (beside it {path.stem}.json, {path.stem}.md and figures, {path.stem}-*.png)")
