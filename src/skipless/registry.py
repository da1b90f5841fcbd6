"""A named table of functions or classes, with errors that suggest near names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from skipless.errors import UserError, suggestion

T = TypeVar("T")


class Registry(Generic[T]):
    """`@registry.register("name")` adds, `registry.get("name")` finds or raises UserError."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, T] = {}
        self._attributes: dict[str, dict[str, Any]] = {}

    def register(self, name: str, **attributes: Any) -> Callable[[T], T]:
        """Decorator: add the decorated object under `name`, with free-form attributes."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise RuntimeError(f"{self.noun} {name!r} is registered twice")
            self._entries[name] = entry
            self._attributes[name] = attributes
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called `name`. Raises UserError that suggests near names."""
        if name not in self._entries:
            raise UserError(
                f"unknown {self.noun} {name!r}; {suggestion(name, self._entries, noun=self.noun)}"
            )
        return self._entries[name]

    def attributes(self, name: str) -> dict[str, Any]:
        """What was given to `register` beside the name."""
        self.get(name)
        return self._attributes[name]

    def names(self) -> list[str]:
        """All names in order of registration."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
