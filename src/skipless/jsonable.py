"""Dataclasses to JSON and back, and leaf overrides by dotted name. No torch here.

`Config` is the base of every settings class in `skipless.config`; this file is the machinery and
knows none of them.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Union

from skipless.errors import UserError, suggestion

_GIVEN: ContextVar[tuple[str, ...]] = ContextVar("given", default=())


@contextmanager
def giving(names: Iterable[str] = ("",)) -> Iterator[None]:
    """While this holds, the settings of these dotted names ("" for all) are those that somebody has
    just written; what `from_dict` reads beside them was there before."""
    before = _GIVEN.set(tuple(names))
    try:
        yield
    finally:
        _GIVEN.reset(before)


def is_given(name: str) -> bool:
    """Whether the setting has just been written by somebody (`giving`)."""
    return any(g in ("", name) or name.startswith((f"{g}.", f"{g}[")) for g in _GIVEN.get())


class Config:
    """Base of all settings: JSON both ways, checked while reading."""

    if typing.TYPE_CHECKING:  # every subclass is a dataclass
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    rules: ClassVar[tuple[Any, ...]] = ()
    """Which values leave which other fields without effect (`unread.Rule`)."""

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dict; tuples become lists, as in JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, where: str = ""):
        """Build from a nested dict. Missing keys keep their default; unknown keys are errors.

        Raises UserError naming the key, or the value and the type that was expected.
        """
        if not isinstance(values, dict):
            raise UserError(f"{where or cls.__name__} is {values!r}; a JSON object was expected")
        hints = _hints(cls)
        for key in values:
            if key not in hints:
                raise UserError(f"unknown setting {where}{key}; {suggestion(key, hints)}")
        new = cls(**{k: _convert(v, hints[k], f"{where}{k}") for k, v in values.items()})
        new._refuse_idle(where)
        return new

    def effective(self):
        """The same settings, those that have no effect at their defaults."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        parts = {n: v.effective() for n, v in values.items() if isinstance(v, Config)}
        return dataclasses.replace(self, **parts, **{n: d for n, d, _ in self._idle()})  # type: ignore[type-var]

    def _idle(self) -> Iterator[tuple[str, Any, str]]:
        """(name, default, the setting that makes it so) of values that have no effect."""
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        for rule in self.rules:
            if rule.idle(getattr(self, rule.setting)):
                for name in rule.fields:
                    if getattr(self, name) not in (None, defaults[name]):
                        yield name, defaults[name], rule.setting

    def _refuse_idle(self, where: str) -> None:
        """Raise UserError for a value that has just been given and has no effect."""
        for name, _, setting in self._idle():
            if is_given(f"{where}{name}"):
                raise UserError(
                    f"{where}{name} is {getattr(self, name)!r}, which has no effect while "
                    f"{where}{setting} is {getattr(self, setting)!r}; leave it out, or change that"
                )

    def describing(self, changes: dict[str, Any]):
        """These settings, their descriptions made true after `override` changed some leaves."""
        return self


def to_json(config: Config) -> str:
    """The settings as indented JSON text with a final newline."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(cls: type[Config], text: str, *, where: str = "") -> Any:
    """The inverse of `to_json`. Raises UserError for text that is not JSON or does not fit."""
    return cls.from_dict(parse_json(text, where=where or "the settings"))


def read_text(path: str | Path) -> str:
    """A whole UTF-8 file. Raises UserError when it cannot be read or is no text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check the path and its permission"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); is it the right file?") from None


def parse_json(text: str, *, where: str) -> Any:
    """JSON text as plain values. Raises UserError naming `where` for what is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{where} is not valid JSON (nested too deeply)") from None
    except ValueError as error:  # also a number of more digits than Python takes
        raise UserError(f"{where} is not valid JSON ({error})") from None


def leaves(config: Config, prefix: str = "") -> dict[str, Any]:
    """Every leaf by dotted name: {"optim.lr": 0.001, ...}, in order of definition."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        name = prefix + item.name
        found.update(leaves(value, name + ".") if isinstance(value, Config) else {name: value})
    return found


def override(config: Any, changes: dict[str, Any]) -> Any:
    """Replace leaves by dotted name; text values are parsed by the leaf's type.

    `override(run, {"optim.lr": "3e-4", "model.connection.kind": "rezero"})`. Tuples take
    comma-separated text, None is written "none". All changes are applied before the settings are
    checked, so that two that only fit together can be changed together. Raises UserError for an
    unknown name (with near ones) or a value of the wrong type.
    """
    known = leaves(config)
    tree = config.to_dict()
    for name, value in changes.items():
        if name not in known:
            raise UserError(f"unknown setting {name}; {suggestion(name, known, noun='setting')}")
        *parents, leaf = name.split(".")
        node, cls = tree, type(config)
        for parent in parents:
            node, cls = node[parent], _hints(cls)[parent]
        hint = _hints(cls)[leaf]
        node[leaf] = _parse(value, hint, name) if isinstance(value, str) else value
    with giving(changes):
        new = type(config).from_dict(tree)
    return new.describing({k: v for k, v in leaves(new).items() if v != known[k]})


def check_named(where: str, config: Config) -> None:
    """Raise UserError for a field of named values (`Literal`) or of True and False that has none.

    `from_dict` looks at every type; this is for settings that are made in Python, where a misspelt
    word would be one more value that no branch asks for.
    """
    for name, hint in _hints(type(config)).items():
        if _has_names(hint):
            _convert(getattr(config, name), hint, f"{where}.{name}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Type of every field by name."""
    found = typing.get_type_hints(cls)
    return {item.name: found[item.name] for item in dataclasses.fields(cls)}


def _has_names(hint: Any) -> bool:
    if _is_union(hint) or typing.get_origin(hint) is tuple:
        return any(map(_has_names, typing.get_args(hint)))
    return hint is bool or typing.get_origin(hint) is Literal


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _describe(hint: Any) -> str:
    if _is_union(hint):
        return " or ".join(_describe(arg) for arg in typing.get_args(hint))
    if hint is types.NoneType:
        return "none"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_describe(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check a JSON value against a type hint and return it in that type."""
    wrong = UserError(f"{where} is {value!r}; expected {_describe(hint)}")
    if _is_union(hint):
        for arg in typing.get_args(hint):
            try:
                return _convert(value, arg, where)
            except UserError:
                continue
        raise wrong
    if hint is types.NoneType:
        if value is not None:
            raise wrong
        return None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise wrong
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        if args[-1] is Ellipsis:
            return tuple(_convert(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
        if len(value) != len(args):
            raise wrong
        pairs = zip(value, args, strict=True)
        return tuple(_convert(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(pairs))
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value, where=where + ".")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise wrong
    if not isinstance(value, hint):
        raise wrong
    return value


def _parse(text: str, hint: Any, where: str) -> Any:
    """Text from a command line to the JSON value of a leaf."""
    if _is_union(hint):
        args = typing.get_args(hint)
        if types.NoneType in args and text.lower() == "none":
            return None
        return _parse(text, next(a for a in args if a is not types.NoneType), where)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(inner, type) and issubclass(inner, Config):
            return parse_json(text, where=f"{where} = {text!r}")
        return [_parse(part.strip(), inner, where) for part in text.split(",") if part.strip()]
    expected = UserError(f"{where} is {text!r}; expected {_describe(hint)}")
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise expected
        return text.lower() in ("true", "1", "yes")
    try:
        if hint is int:
            number = float(text)  # 5e6 is a fine way to write five million
            return int(text) if "e" not in text.lower() else _whole(number)
        if hint is float:
            return float(text)
    except ValueError:
        raise expected from None
    return text


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)
