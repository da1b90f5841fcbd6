"""Skipless models at home in transformers. Importing this registers them.

    import skipless.hf
    AutoModelForCausalLM.from_pretrained("exported")  # `skipless export --format hf` made it
    AutoModelForCausalLM.from_pretrained("patched")   # as skipless.surgery.load("patched")

configuration.py  settings as config.json
modeling.py       language model and classifier on body.py; attention.py, past.py, arguments.py
converting.py     our decoder as a model of transformers, and back
exporting.py      a run directory as a folder, reloaded and compared
remote.py         our modules beside the weights, to load without the package
training.py       optimiser and callbacks for the Trainer
auto.py           Auto classes, also for patched folders; quantizer.py packed ones, packed.py
                  those of a run in our own layout
cache.py          keys and values as packed integers

`fetch_model` is that of `skipless.pretrained`.
"""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError:
    from skipless.packages import not_installed

    raise not_installed("transformers", why="which skipless.hf adds our models to") from None

from skipless.hf.auto import PatchedConfig, register
from skipless.hf.body import SkiplessModel
from skipless.hf.cache import QuantizedCache
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import SkiplessForCausalLM, SkiplessForSequenceClassification
from skipless.hf.packed import open_packed_run
from skipless.hf.quantizer import register as register_quantizer
from skipless.pretrained import fetch_model

register()
register_quantizer()

__all__ = [
    "PatchedConfig",
    "QuantizedCache",
    "SkiplessConfig",
    "SkiplessForCausalLM",
    "SkiplessForSequenceClassification",
    "SkiplessModel",
    "fetch_model",
    "open_packed_run",
    "register",
]
