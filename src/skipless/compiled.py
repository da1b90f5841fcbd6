"""Models that `torch.compile` has been at, which hooks set afterwards do not reach.

Compiled code calls the hooks that were there when it was traced, and looks for no others. What
compiles cannot be seen from the model either: a function around it may be compiled, too. So a
change that is to last lets torch trace everything anew, and a look that lasts for the length of a
with statement runs without compiled code. Both cost nothing where nothing was compiled.
Read by `skipless.probes`, `skipless.quant`, `skipless.evaluate`, `skipless.train` and
`skipless.surgery`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["forget_compiled", "run_eagerly", "unwrapped"]


def unwrapped(model: Any) -> Any:
    """The module inside what `torch.compile` returns; any other model is itself."""
    return getattr(model, "_orig_mod", model)


def forget_compiled() -> None:
    """Let every compiled function of the process be traced anew when it is called next."""
    if _is_loaded():
        torch.compiler.reset()


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
