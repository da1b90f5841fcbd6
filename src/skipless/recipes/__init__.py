"""Named runs. A recipe is a function that returns a whole `RunConfig`; a variant calls another
recipe and replaces fields, so that what differs is what one reads.

    from skipless import recipes
    config = recipes.get("demo-rf-kl")
    recipes.names()          # all of them, in reading order

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from skipless.config import RunConfig
from skipless.registry import Registry

_recipes: Registry[Callable[[], RunConfig]] = Registry("recipe")


def recipe(name: str, *, paper: str = "") -> Callable[[Callable[[], RunConfig]], Callable]:
    """Decorator: register a function that returns a RunConfig under `name`.

    `paper` says which table or claim the recipe belongs to. The function's docstring is its
    description in `skipless list`.
    """
    return _recipes.register(name, paper=paper)


def get(name: str) -> RunConfig:
    """The settings called `name`. Raises UserError that suggests near names."""
    return dataclasses.replace(_recipes.get(name)(), name=name)


def names(prefix: str = "") -> list[str]:
    """All recipe names that start with `prefix`, in reading order."""
    return [name for name in _recipes if name.startswith(prefix)]


def describe(name: str) -> str:
    """The first line of the recipe's docstring, and its place in the paper if it has one."""
    function = _recipes.get(name)
    text = (function.__doc__ or "").strip().splitlines()[0]
    paper = _recipes.attributes(name).get("paper")
    return f"{text} [{paper}]" if paper else text


from skipless.recipes import (  # noqa: E402, F401  (they register themselves)
    connections,
    demo,
    full,
    optimizers,
    small,
)
