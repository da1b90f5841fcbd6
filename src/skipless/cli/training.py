"""The subcommands that train: `demo`, `train`, `sweep` and `compare-connections`."""

from __future__ import annotations

from typing import Annotated

from skipless.cli.arguments import (
    Jobs,
    Positional,
    Settings,
    Switch,
    as_options,
    check_out,
    interruption,
    option,
    what_to_train,
)
from skipless.cli.terminal import frequency_lines


def demo(
    fast: Switch = False,
    fresh: Switch = False,
    out: Annotated[str | None, option("DIR", default="runs/demo or runs/demo-fast")] = None,
    jobs: Jobs = None,
) -> None:
    """Train, measure, quantise and compare seven models; write one HTML report.

    Small ones on the same text: residual and residual-free, with AdamW, KL-Shampoo and Muon, and
    the paper's literal settings. Interrupted, it continues where it stopped.

    For example: skipless demo --fast --out runs/first

    Args:
        fast: the same shape of work in under two minutes (not for conclusions).
        fresh: start anew instead of resuming.
        out: directory of runs and report.
        jobs: models that train at a time.
    """
    from skipless.demo import run_demo

    check_out(out)
    run_demo(fast=fast, fresh=fresh, out=out, jobs=jobs)


def train(
    recipe: Annotated[Positional[str], option("RECIPE")],
    out: Annotated[str | None, option("RUN", default="runs/RECIPE")] = None,
    fresh: Switch = False,
    measure: Switch = False,
    overrides: Settings = None,
) -> None:
    """Train a recipe, any setting changed by --its.name VALUE, or continue a run.

    What settings there are is printed by `skipless show demo-rf-kl`. A run goes on, with the
    settings it has, by `skipless train runs/mine`. Under torchrun the same command trains on
    several processes or machines.

    For example: skipless train demo-rf-kl --out runs/mine --optim.lr 1e-3 --train.num_tokens 1e6

    Args:
        recipe: a name of `skipless list`, a JSON file written by `skipless show NAME --json`, or a
            run directory to continue.
        out: run directory. Holding an unfinished run, it is resumed.
        fresh: remove the run in --out first.
        measure: afterwards evaluate, quantise, probe and sample, as the report wants.
    """
    config, directory = what_to_train(recipe, out, overrides)

    from skipless.train import load_run
    from skipless.train import train as train_run

    try:
        result = train_run(config, directory, fresh=fresh)
        if measure:
            from skipless.log import say
            from skipless.measure import measure_all

            measure_all(load_run(directory), say=say)
    except KeyboardInterrupt:
        text = interruption(config, directory, measure=measure)
        raise KeyboardInterrupt(text) from None
    counted = result.held_out_tokens
    what = "tokens" if config.model.num_labels is None else "passages"
    on = "" if counted is None else f" on {counted:,} {what}"
    print(
        f"{directory}  held-out loss {result.held_out_loss:.4f} nats{on} after {result.step} steps"
    )
    if config.model.num_labels is None:
        for line in frequency_lines(result.held_out_loss, directory):
            print(line)


def sweep(
    names: Annotated[Positional[tuple[str, ...]], option("RECIPE [RECIPE ...]", default="")],
    setting: Annotated[str, option("SETTING")] = "optim.lr",
    values: Annotated[tuple[str, ...], option("VALUE [VALUE ...]", default="")] = (),
    out: Annotated[str, option("DIR")] = "runs/sweep",
    jobs: Jobs = None,
    overrides: Settings = None,
) -> None:
    """Train recipes at several values of one setting and tell which did best.

    Further settings, such as --train.num_tokens 1e5, are the same for all.

    For example: skipless sweep demo-rf-kl demo-rf-muon --values 2e-3 4e-3 8e-3

    Args:
        names: names of `skipless list`.
        setting: the setting to vary.
        values: its values; at least one.
        out: directory of the runs; finished ones are not repeated.
        jobs: runs that train at a time.
    """
    from skipless.sweep import best, run_sweep

    check_out(out)
    results = run_sweep(
        names, setting=setting, values=values, out=out, settings=overrides, jobs=jobs
    )
    chosen = best(results)
    for row in results:
        loss = row["held_out_loss"]
        mark = "  <- best" if row is chosen.get(row["recipe"]) else ""
        text = f"{loss:.4f}{mark}" if loss is not None else f"failed: {row['error']}"
        print(f"{row['recipe']:<24} {setting} {row[setting]:<8} {text}")
    counts = sorted({row["held_out_tokens"] for row in results if row["held_out_tokens"]})
    if counts:
        on = " or ".join(f"{count:,}" for count in counts)
        print(f"held-out loss in nats, the mean over {on} tokens (or passages, of a classifier)")


def compare_connections(
    layers: Annotated[tuple[int, ...], option("N [N ...]", default="4 8")] = (),
    seeds: Annotated[tuple[int, ...], option("N [N ...]", default="0 1 2")] = (),
    kinds: Annotated[tuple[str, ...], option("KIND [KIND ...]", default="all")] = (),
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]", default="both")] = (),
    out: Annotated[
        str | None, option("DIR", default="runs/connections or runs/connections-fast")
    ] = None,
    jobs: Jobs = None,
    fast: Switch = False,
    overrides: Settings = None,
) -> None:
    """Train one small model with every way of joining the stream, and compare them.

    Residual, ReZero, LayerScale, hard removal, removal in places, interpolation, annealing,
    learned, gated and universal joins (`skipless list connections-`). Finished runs are not
    repeated, so the same command continues; the report holds every run in the directory.

    For example: skipless compare-connections --layers 8 --kinds residual rezero none --seeds 0

    Args:
        layers: depths, of 4, 8, 12 and 24; only some kinds go beyond 8.
        seeds: a run each.
        kinds: the baselines of those named come with them.
        tasks: language, and authors (which author wrote a passage; 4 layers).
        out: directory of runs and report.
        jobs: runs that train at a time.
        fast: six kinds in small, under two minutes (not for conclusions).
    """
    check_out(out)
    from skipless import connections

    with as_options(
        {"connection kind": "--kinds", "task is": "--tasks is", "train.seed": "--seeds"}
    ):
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
