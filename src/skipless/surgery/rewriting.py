"""Subclasses of transformers' classes: layers that join through our connections. Read by
`patching.py`; `saving.py` makes its classes with the same `namesake`.

`joining_class` compiles the layer's own source with one expression changed. The new method is an
ordinary function of transformers' module: its globals, decorators and signature are the old ones,
and tracebacks show the text that runs.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from skipless.errors import UserError
from skipless.surgery.stacks import forward_tree, original, stream_additions

Joins = frozenset[tuple[int, str]]


def joining_class(cls: type, joins: Joins) -> type:
    """A subclass of `cls` (or of what it was before) whose forward joins through `self.<name>`.

    `joins` holds (position among the additions of forward, attribute name). The same arguments
    give the same class, so that layers of one kind stay of one class.
    """
    return _joining_class(original(cls), joins)


def joins_of(module: object) -> Joins:
    """What `joining_class` replaced in the class of `module`; empty if it is not patched."""
    return getattr(type(module), "_skipless_joins", frozenset())


@cache
def _joining_class(base: type, joins: Joins) -> type:
    body = {"forward": _rewritten(base, joins), "_skipless_joins": joins}
    return namesake(base, {**body, "__reduce_ex__": reducer(_joining_class, base, joins)})


def namesake(base: type, body: dict[str, Any]) -> type:
    """A subclass that every look-up by name takes for `base`."""
    return type(base)(base.__name__, (base,), {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "_skipless_base": base, **body,
    })  # fmt: skip


def reducer(make: Callable[..., type], *arguments: Any) -> Callable:
    """Pickling by recipe: the class has no name of its own to be found under."""

    def __reduce_ex__(self, protocol):
        return _new, (make, arguments), self.__dict__

    return __reduce_ex__


def _new(make: Callable[..., type], arguments: tuple) -> Any:
    cls: Any = make(*arguments)
    return cls.__new__(cls)


def _rewritten(cls: type, joins: Joins) -> Callable:
    tree = forward_tree(cls)
    assert tree is not None, f"{cls.__name__} was patchable, and its source is gone"
    nodes = stream_additions(tree)
    for position, name in joins:
        node, side = nodes[position]
        other = "right" if side == "left" else "left"
        call = ast.Call(
            func=ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()),
            args=[getattr(node, side), getattr(node, other), ast.Constant(None)], keywords=[],
        )  # fmt: skip
        _replace(tree, node, call)
    function = inspect.unwrap(cls.forward)
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    cells = dict(zip(function.__code__.co_freevars, contents, strict=True))
    # The factory's arguments become the closure: zero-argument super() finds __class__ there.
    inner = textwrap.indent(ast.unparse(ast.fix_missing_locations(tree)), "    ")
    source = f"def factory({', '.join(cells)}):\n{inner}\n    return {tree.name}\n"
    names = "-".join(name for _, name in sorted(joins))
    file = f"<skipless {cls.__module__}.{cls.__qualname__}.forward {names}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    flags = function.__code__.co_flags & _future_flags()
    try:
        exec(compile(source, file, "exec", flags, True), function.__globals__, scope)
    except NameError as error:
        raise UserError(
            f"{cls.__name__}.forward cannot be compiled again ({error}); it is decorated with "
            "something that its module does not hold"
        ) from None
    return scope["factory"](**cells)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(item is old for item in value):
                value[:] = [new if item is old else item for item in value]


def _future_flags() -> int:
    import __future__

    flags = 0
    for name in __future__.all_feature_names:
        flags |= getattr(__future__, name).compiler_flag
    return flags
