"""skipless: transformers without, or with learned, skip connections.

Train them, measure what happens inside, quantise them with plain uniform integers, compare.
Importing the package is cheap; torch is loaded by the rooms that need it (`skipless.model`,
`skipless.optim`, `skipless.probes`, `skipless.quant`, ...).
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`skipless.diagnose(model, batches)`; its room, and torch with it, is loaded on demand."""
    if name == "diagnose":
        import importlib

        return importlib.import_module("skipless.diagnose")
    raise AttributeError(f"module 'skipless' has no attribute {name!r}")
