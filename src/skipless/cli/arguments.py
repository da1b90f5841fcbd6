"""Words of the command line to settings, directories and numbers; the arguments' common types.

No torch here, so that a mistake in an argument is told at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from skipless.config import RunConfig, from_json
from skipless.errors import UserError, counted
from skipless.jsonable import giving, override, read_text
from skipless.rundir import CHECKPOINTS, RunDir, continue_command
from skipless.scheme import Scheme, check_groups

Positional = tyro.conf.Positional


def option(metavar: str | None = None, default: str | None = None, help: str | None = None) -> Any:
    """What --help says of an argument, to stand in `Annotated[...]`.

    `metavar` names its value. `default` tells the default in words where the one in the code (None,
    an empty tuple) says little; "" leaves it out. `help` replaces the docstring's.
    """
    hint = default and f"(default: {default})"
    return tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint=hint)


Switch = Annotated[bool, option(default="")]
"""Off unless given; the text does not say so of each."""
AsJson = Annotated[bool, option(default="", help="print JSON instead of text")]
Jobs = Annotated[int | None, option("N", default="one a core")]
Settings = tyro.conf.Suppress[dict[str, str] | None]
"""The words with a dot, which `split_settings` took out: `--optim.lr 3e-4`."""


def read_config(name: str) -> RunConfig:
    """The settings of a recipe, of a run directory or of a JSON file.

    Raises UserError for what is none of them.
    """
    from skipless import recipes

    path = Path(name)
    if path.is_dir():
        return RunDir.open(path).config()
    if path.suffix == ".json":
        if not path.exists():
            raise UserError(
                f"{path} does not exist; `skipless show RECIPE --json > {path}` makes one"
            )
        with giving():
            return from_json(RunConfig, read_text(path), where=str(path))
    if "/" in name:
        raise UserError(
            f"{name} does not exist; name a run directory, or a recipe (`skipless list` shows them)"
        )
    return recipes.get(name)


def what_to_train(
    name: str, out: str | None, settings: dict[str, str] | None
) -> tuple[RunConfig, Path]:
    """Settings and directory of `skipless train NAME`: a run directory without `out` is itself
    continued, anything else goes to `out` or runs/NAME."""
    check_out(out)
    config = override(read_config(name), settings or {})
    if out is None and Path(name).is_dir():
        return config, Path(name)
    return config, Path(out or f"runs/{config.name}")


def check_out(out: str | None) -> None:
    """Raise UserError for an --out of nothing."""
    if out is not None and not out.strip():
        raise UserError("--out is empty; name a directory, or leave --out away for the default")


def check_out_folder(out: str | None) -> None:
    """Raise UserError for an --out of nothing, and for one where no folder can be."""
    check_out(out)
    if out is None:
        return
    path = Path(out)
    found = next((p for p in (path, *path.parents) if os.path.lexists(p)), None)
    if found is not None and not found.is_dir():
        raise UserError(f"--out is {out} and {found} is no folder; name a folder to write into")


def new_folder(out: str | None) -> Path:
    """The folder that --out names, which has to be missing or empty; the next thing may be slow.

    Raises UserError for an --out that is missing, or that holds something.
    """
    if out is None or not out.strip():
        raise UserError("--out is missing; name the folder to write")
    from skipless.outputs import free_folder

    return free_folder(out)


def split_settings(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--optim.lr 3e-4` and `--optim.lr=3e-4` (any name with a dot) out of `arguments`.

    Returns the other words and the settings. Raises UserError for a setting without a value.
    """
    rest, settings = [], {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not equals:
            value = next(words, None)
            if value is None:
                raise UserError(f"{word} has no value; write {word} VALUE")
        settings[name.replace("-", "_")] = value
    return rest, settings


@contextlib.contextmanager
def as_options(names: Mapping[str, str]) -> Iterator[None]:
    """Errors from inside, which name settings as Python does, name options instead.

    `names`: setting, such as `convert.steps_per_stage` or `stacks=` -> what is typed, `--steps`.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        for setting in sorted(names, key=len, reverse=True):  # the longest, of two that overlap
            end = r"\b" if setting[-1].isalnum() else ""
            text = re.sub(rf"(?<![\w./-]){re.escape(setting)}{end}", names[setting], text)
        if text == str(error):
            raise
        raise UserError(text) from error


def whole_number(flag: str, text: str | None) -> int | None:
    """`1024`, `20_000` and `1e3` as a whole number; None stays None.

    Raises UserError naming `flag` for anything else, and for less than 1.
    """
    if text is None:
        return None
    try:
        number = float(text) if "e" in text.lower() else int(text)
        if number == int(number) >= 1:
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{flag} is {text!r}; expected a whole number of at least 1, such as 20_000")


def split_schemes(words: Iterable[str]) -> tuple[str, ...]:
    """Schemes, which spaces or commas part. Raises UserError for one that is none."""
    names = tuple(name for word in words for name in word.split(",") if name)
    for name in names:
        Scheme.parse(name)
    return names


def tell_fewer(asked: int | None, found: int, length: int) -> None:
    """Say on stderr that a text has fewer tokens than --num-tokens; `found` are whole sequences."""
    if asked is not None and found + length <= asked:
        from skipless.log import say

        say(
            f"--num-tokens asks for {asked:,} and the text has {counted(found, 'token')} in "
            f"sequences of {length}: measured on these"
        )


def check_schemes(run: str, schemes: Iterable[str]) -> None:
    """Raise UserError for the first scheme that is none or does not fit the run's model."""
    for text in schemes:
        size = Scheme.parse(text).group_size
        if size is not None:
            model = RunDir.open(run).config().model
            widths = {"model.hidden_size": model.hidden_size, "down_proj": model.mlp_width}
            try:
                check_groups(size, widths)
            except UserError as error:
                raise UserError(f"{text!r} does not fit {run}: {error}") from None


def interruption(config: RunConfig, directory: Path, *, measure: bool) -> str:
    """What is to be known after Ctrl-C in `skipless train`: where, how far, how to go on.

    Empty when nothing was written yet.
    """
    run = RunDir(directory)
    if not run.continues(config):
        return ""
    steps = [int(p.name.removeprefix("step-")) for p in (run / CHECKPOINTS).glob("step-*")]
    at = max(steps, default=0)
    command = continue_command(directory, *(["--measure"] if measure else []))
    if "RANK" in os.environ:  # torchrun starts the processes
        command = "the same torchrun command"
    return f"{directory} keeps step {at} of {config.train.num_steps}; continue with: {command}"


def again(words: list[str]) -> str:
    """What is to be known after Ctrl-C in a command that goes on where it was.

    Without --fresh, which would throw away what there is.
    """
    return f"continue with: {shlex.join(['skipless', *(w for w in words if w != '--fresh')])}"
