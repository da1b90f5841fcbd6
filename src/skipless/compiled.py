"""Models that `torch.compile` has been at, which hooks set afterwards do not reach.

Compiled code calls the hooks that were there when it was traced, and looks for no others. What
compiles cannot be seen from the model either: a function around it may be compiled, too. So a
change that is to last lets torch trace everything anew, and a look that lasts for the length of a
with statement runs without compiled code. Both cost nothing where nothing was compiled.

Hooks that look at what a pass did so far are `uncompiled`: traced, their code would depend on the
name, range and place of each layer, so that torch would trace it for each of them anew and after
a few of them, with a warning, no more.
Read by every room that looks into a model or changes it in place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch

__all__ = ["forget_compiled", "lasting", "run_eagerly", "uncompiled", "unwrapped"]

P = ParamSpec("P")
T = TypeVar("T")


def unwrapped(model: Any) -> Any:
    """The module inside what `torch.compile` returns; any other model is itself."""
    return getattr(model, "_orig_mod", model)


def forget_compiled() -> None:
    """Let every compiled function of the process be traced anew when it is called next."""
    if _is_loaded():
        torch.compiler.reset()


def lasting(change: Callable[P, T]) -> Callable[P, T]:
    """A decorator of what changes a model, its first argument, in place and for good.

    The change gets the model that is inside, compiled code forgets what it was before, and the
    model is returned as it was given. `inspect.unwrap` leads to the change alone.
    """

    @functools.wraps(change)
    def changed(model: Any, *args: Any, **kwargs: Any) -> Any:
        change(unwrapped(model), *args, **kwargs)  # pyright: ignore[reportCallIssue]
        forget_compiled()
        return model

    return cast(Callable[P, T], changed)


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: `function`, and what it calls, runs as it is written inside compiled code too.

    As `torch.compiler.disable`, which loads torch's compiler, a matter of a second or two.
    """

    as_it_is: Any = None

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal as_it_is
        if torch.compiler.is_compiling():
            if as_it_is is None:
                as_it_is = torch.compiler.disable(function)
            return as_it_is(*args, **kwargs)
        return function(*args, **kwargs)

    return called


@contextmanager
def run_eagerly() -> Iterator[None]:
    """No compiled code for the length of a with statement; what was compiled is kept."""
    if _is_loaded():
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        forget_compiled()  # whatever was compiled inside, with the hooks of then


def _is_loaded() -> bool:
    """Whether something may be compiled; loading torch's compiler takes a second."""
    return "torch._dynamo" in sys.modules
