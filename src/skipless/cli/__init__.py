"""Train transformers with and without skip connections, measure, quantise and compare them.

The `skipless` command: subcommands only; the work is in the rooms, imported inside. Every
subcommand exits 0 on success, 2 on bad input (one sentence on stderr; `--traceback` shows where),
130 on Ctrl-C. Results go to stdout, progress to stderr. `--help` must not import torch.

A subcommand is a function whose signature and docstring are its help. It stands beside its like and
has its name in GROUPS:

    catalogs.py   what there is: list, show, data, models
    training.py   what trains: demo, train, sweep, compare-connections
    measuring.py  what reads trained runs: probe, quantize, report
    evaluating.py what asks a model questions: eval
    generating.py what has a model write: generate
    carding.py    what describes a run to others: card
    diagnosing.py what reads any model: diagnose
    doctoring.py  what judges a run or a model: doctor
    surgery.py    what changes models that others trained: patch
    convert.py    convert, which has many arguments
    slimming.py   what makes trained models smaller: prune, fold
    exporting.py  what writes models for other programs: export

arguments.py turns words into settings, terminal.py turns results into lines.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import tyro

from skipless import __version__
from skipless.cli.arguments import again, split_settings
from skipless.cli.carding import card
from skipless.cli.catalogs import data, list_, models, show
from skipless.cli.convert import convert
from skipless.cli.diagnosing import diagnose
from skipless.cli.doctoring import doctor
from skipless.cli.evaluating import eval_
from skipless.cli.exporting import export
from skipless.cli.generating import generate
from skipless.cli.measuring import probe, quantize, report
from skipless.cli.slimming import fold, prune
from skipless.cli.surgery import patch
from skipless.cli.terminal import overview
from skipless.cli.training import compare_connections, demo, sweep, train
from skipless.errors import UserError, suggestion
from skipless.packages import is_known, not_installed

GROUPS = {
    "All in one": {"demo": demo},
    "What there is": {"list": list_, "show": show, "data": data, "models": models},
    "Train": {"train": train, "sweep": sweep, "compare-connections": compare_connections},
    "Measure trained runs": {"eval": eval_, "probe": probe, "quantize": quantize, "report": report},
    "Measure any model": {"diagnose": diagnose, "doctor": doctor},
    "Change models that others trained": {
        "patch": patch,
        "convert": convert,
        "prune": prune,
        "fold": fold,
    },
    "Use models": {"generate": generate},
    "Use models elsewhere": {"export": export, "card": card},
}
COMMANDS: dict[str, Callable[..., None]] = {
    name: function for commands in GROUPS.values() for name, function in commands.items()
}
RESUMING = ("demo", "train", "sweep", "compare-connections", "diagnose")
SETTABLE = ("train", "sweep", "compare-connections")
HELP = """\
usage: skipless COMMAND ...

{purpose}

{commands}

`skipless COMMAND --help` explains one, with an example.
`skipless --version` tells the version.
Bad input ends in one sentence and exit code 2; --traceback shows where it was found."""


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
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(purpose=(__doc__ or "").splitlines()[0], commands=overview(GROUPS)))
        return 0
    if words == ["--version"]:
        print(f"skipless {__version__}")
        return 0
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        _run(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        if traceback:
            raise
        print(f"skipless: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # an optional package that no room has asked for before
        if traceback or error.name is None or not is_known(error.name.partition(".")[0]):
            raise
        print(f"skipless: {not_installed(error.name.partition('.')[0])}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        text = str(stop) or (again(words) if words[0] in RESUMING else "")
        print("skipless: interrupted" + (f"; {text}" if text else ""), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `skipless list | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if traceback or error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename:
            raise
        text = f"cannot write the output: {error.strerror}; free space, or send it elsewhere"
        print(f"skipless: {text}", file=sys.stderr)
        with open(os.devnull, "w") as nothing:  # what is still held back, or Python's end fails too
            os.dup2(nothing.fileno(), 1)
        return 2
    return 0


def _as_interrupt(*_: Any) -> None:
    """A polite kill saves and stops like Ctrl-C."""
    raise KeyboardInterrupt
