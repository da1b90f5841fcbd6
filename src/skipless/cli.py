"""Train transformers with and without skip connections, measure, quantise and compare them.

The `skipless` command: subcommands only; the work is in the rooms, imported inside. Every
subcommand exits 0 on success, 2 on bad input (one sentence on stderr; `--traceback` shows where),
130 on Ctrl-C. Results go to stdout, progress to stderr. `--help` must not import torch.
"""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from skipless import __version__
from skipless.arguments import (
    again,
    check_out,
    interruption,
    read_config,
    split_settings,
    what_to_train,
)
from skipless.comparing import compare_connections
from skipless.errors import UserError, suggestion
from skipless.foreign import models, patch
from skipless.terminal import (
    check_schemes,
    evaluation_line,
    probe_lines,
    quantize_lines,
    whole_number,
)

Positional = tyro.conf.Positional
Run = Annotated[
    Positional[str],
    tyro.conf.arg(metavar="RUN", help="a run directory, such as runs/mine"),
]
Tokens = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="TOKENS",
        help="held-out tokens to measure on, such as 20_000 or 1e5",
        help_behavior_hint="(default: the run's own setting)",
    ),
]
AsJson = Annotated[bool, tyro.conf.arg(help="print one JSON object instead of a table")]


def demo(
    fast: bool = False,
    fresh: bool = False,
    out: str | None = None,
    jobs: int | None = None,
) -> None:
    """Train, measure, quantise and compare all rows; write one HTML report.

    Seven small models on the same text: residual and residual-free, with AdamW, KL-Shampoo and
    Muon, and the paper's literal settings. Interrupted, it continues where it stopped.

    Args:
        fast: the same shape of work in under two minutes (not for conclusions).
        fresh: start anew instead of resuming.
        out: directory of runs and report; default runs/demo or runs/demo-fast.
        jobs: rows that train at a time; default one a core.
    """
    from skipless.demo import run_demo

    check_out(out)
    run_demo(fast=fast, fresh=fresh, out=out, jobs=jobs)


def list_(prefix: Positional[str] = "", json: bool = False) -> None:
    """List the recipes (named runs), optionally only those starting with PREFIX."""
    from skipless import recipes

    names = recipes.names(prefix)
    if not names:
        raise UserError(
            f"no recipe starts with {prefix!r}; "
            f"{suggestion(prefix, recipes.names(), noun='recipe')}"
        )
    if json:
        _print_json({name: recipes.describe(name) for name in names})
        return
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {recipes.describe(name)}")


def show(name: Positional[str], json: bool = False) -> None:
    """Show every setting of a recipe or of a run directory.

    What it prints as `optim.lr = 0.003` is changed by `--optim.lr 0.003` in `skipless train`.

    Args:
        name: a recipe (`skipless list`) or a run directory.
        json: print JSON, which can be read back.
    """
    from skipless.jsonable import leaves, to_json

    config = read_config(name)
    if json:
        print(to_json(config), end="")
        return
    for key, value in leaves(config).items():
        print(f"{key} = {value!r}")


def data(
    action: Positional[Literal["list", "get", "prepare"]],
    names: Positional[tuple[str, ...]] = (),
    vocab_size: int = 2048,
    json: bool = False,
) -> None:
    """Named texts: list them, fetch some, or tokenise them.

    Args:
        action: list | get NAME... | prepare NAME_OR_PATH...
        names: named sources, files or folders (.txt, .jsonl, .parquet), or hf:NAME.
        vocab_size: of the tokeniser that `prepare` trains.
        json: print JSON.
    """
    from skipless import data as room
    from skipless.config import DataConfig

    if action == "list":
        rows = room.sources()
        if json:
            _print_json(rows)
            return
        for row in rows:
            print(f"{row['name']:<14} {row['licence']:<16} {row['note']}")
        return
    if not names:
        raise UserError(f"data {action} needs at least one name; `skipless data list` shows them")
    if action == "get":
        results = [room.fetch(name) for name in names]
        _print_json(results) if json else [print(r["summary"]) for r in results]
        return
    prepared = room.prepare(DataConfig(sources=names), vocab_size)
    print(prepared.describe())


def train(
    recipe: Positional[str],
    out: str | None = None,
    fresh: bool = False,
    measure: bool = False,
    overrides: tyro.conf.Suppress[dict[str, str] | None] = None,
) -> None:
    """Train a recipe, any setting changed by --its.name VALUE, or continue a run.

    For example: skipless train demo-rf-kl --out runs/mine --optim.lr 1e-3 --train.num_tokens 1e6.
    `skipless train runs/mine` continues it with the settings it has.
    `skipless show demo-rf-kl` prints all settings. Under torchrun the same command trains on
    several processes or machines.

    Args:
        recipe: a name from `skipless list`, a JSON file written by `skipless show NAME --json`, or
            a run directory to continue.
        out: run directory; default runs/RECIPE. Holding an unfinished run, it is resumed.
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
    print(f"{directory}  held-out loss {result.held_out_loss:.4f} nats after {result.step} steps")


def sweep(
    names: Positional[tuple[str, ...]],
    setting: str = "optim.lr",
    values: tuple[str, ...] = (),
    out: str = "runs/sweep",
    jobs: int | None = None,
    overrides: tyro.conf.Suppress[dict[str, str] | None] = None,
) -> None:
    """Train recipes at several values of one setting and tell which did best.

    For example: skipless sweep demo-rf-kl demo-rf-muon --values 2e-3 4e-3 8e-3

    Args:
        names: recipes.
        setting: the setting to vary.
        values: its values.
        out: directory of the runs; finished ones are not repeated.
        jobs: runs at a time; default one a core.
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


def eval_(run: Run, num_tokens: Tokens = None, json: AsJson = False) -> None:
    """Held-out loss, perplexity and bits per byte of a trained run -> eval.json.

    For example: skipless eval runs/mine --num-tokens 20_000
    """
    tokens = whole_number("--num-tokens", num_tokens)
    loaded = _load(run)
    from skipless.measure import evaluate_run

    result = evaluate_run(loaded, num_tokens=tokens)
    _print_json(result) if json else print(evaluation_line(result))


def probe(run: Run, num_tokens: Tokens = None, json: AsJson = False) -> None:
    """Statistics of the activations at every site of a trained run -> probe.json.

    For example: skipless probe runs/mine --num-tokens 1e3
    """
    tokens = whole_number("--num-tokens", num_tokens)
    loaded = _load(run)
    from skipless.measure import probe_run

    result = probe_run(loaded, num_tokens=tokens)
    _print_json(result) if json else print(*probe_lines(result), sep="\n")


def quantize(
    run: Run,
    schemes: tuple[str, ...] = (),
    scopes: tuple[Literal["linear", "block", "all"], ...] = (),
    num_tokens: Tokens = None,
    by_layer: bool = False,
    json: AsJson = False,
) -> None:
    """Held-out loss of a trained run under simulated quantisation -> quant.json.

    Also the worst tensors and the error by depth, at the lowest of the schemes named.

    For example: skipless quantize runs/mine --schemes W8A8 W4A8-a:token --by-layer

    Args:
        schemes: such as W8A8 W4A8-a:token W4Afp-w:g32; the run's own list if none is given.
        scopes: linear (inputs of linear layers), block (also sublayer outputs and the stream),
            all (also queries, keys, values, probabilities); the run's own if none is given.
        by_layer: also the loss with one layer alone quantised, a pass over the text a layer.
    """
    tokens = whole_number("--num-tokens", num_tokens)
    check_schemes(run, schemes)
    loaded = _load(run)
    from skipless.log import say
    from skipless.measure import quantize_run

    result = quantize_run(
        loaded,
        schemes=schemes or None,
        scopes=scopes or None,
        num_tokens=tokens,
        by_layer=by_layer,
        say=lambda text: None if json else say(text),
    )
    _print_json(result) if json else print(*quantize_lines(result), sep="\n")


def report(runs: Positional[tuple[str, ...]], out: str = "report.html") -> None:
    """Compare run directories in one self-contained HTML file.

    Args:
        runs: run directories; a directory that contains run directories stands for them.
        out: where to write; its numbers (mine.json) and figures (mine-NAME.png) go beside it.
    """
    from skipless.report import build_report, find_runs, print_table
    from skipless.report.build import check_out

    check_out(out)
    directories = find_runs(runs)
    path = build_report(directories, Path(out))
    print_table(directories)
    figures = len(list(path.parent.glob(f"{path.stem}-*.png")))
    print(f"{path}  (beside it {path.stem}.json and {figures} figures, {path.stem}-*.png)")


COMMANDS = {
    "demo": demo,
    "list": list_,
    "show": show,
    "data": data,
    "train": train,
    "sweep": sweep,
    "compare-connections": compare_connections,
    "eval": eval_,
    "probe": probe,
    "quantize": quantize,
    "report": report,
    "models": models,
    "patch": patch,
}
RESUMING = ("demo", "train", "sweep", "compare-connections")
SETTABLE = ("train", "sweep", "compare-connections")


def _load(run: str) -> Any:
    from skipless.rundir import RunDir

    RunDir.open(run).config()  # torch takes its time to import, a mistake should not
    from skipless.train import load_run

    return load_run(run)


def _print_json(value: Any) -> None:
    from skipless.rundir import to_strict_json

    print(to_strict_json(value, indent=2))


def _run(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise UserError(
            f"unknown command {arguments[0]!r}; "
            f"{suggestion(arguments[0], COMMANDS, noun='command')}"
        )
    arguments, settings = split_settings(arguments)
    if settings and (not arguments or arguments[0] not in SETTABLE):
        raise UserError(
            f"--{next(iter(settings))} is a setting of a run; only `skipless train`, "
            "`sweep` and `compare-connections` take settings"
        )
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS
        | {name: functools.partial(COMMANDS[name], overrides=settings) for name in SETTABLE},
        prog="skipless",
        description=(__doc__ or "").splitlines()[0] + " `skipless --version` tells the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    if not words:
        words = ["--help"]
    if words == ["--version"]:
        print(f"skipless {__version__}")
        return 0
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        _run(words)
    except UserError as error:
        if traceback:
            raise
        print(f"skipless: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        text = str(stop) or (again(words) if words[0] in RESUMING else "")
        print("skipless: interrupted" + (f"; {text}" if text else ""), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `skipless list | head`
        sys.stderr.close()
        return 0
    return 0


def _as_interrupt(*_: Any) -> None:
    """A polite kill saves and stops like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
