"""Surgery on loaded Hugging Face models: other skip connections, and back.

stacks.py     where the skips of a model are, read from its source
patching.py   `patch`, `unpatch`: what is asked for is read by choosing.py and checking.py,
              classes are made by rewriting.py, what is patched is told by records.py
dropping.py   sublayers that are neither computed nor stored
tracing.py    which linear layer ends a branch, found in a forward pass
saving.py, loading.py     patched models to disk and back
sources.py, reading.py    what a command names, and unpatched models from disk
folders.py    a folder in, a patched folder out; for the command line
universal/    universal interpolation, which sees padding and caches
conversion/   `convert`: fewer skips, taught by the original
slimming/     `prune`, `fold`, `to_stock`
"""

from skipless.surgery.conversion.converting import convert
from skipless.surgery.conversion.results import Conversion
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.surgery.conversion.skips import untrained_curves
from skipless.surgery.loading import load
from skipless.surgery.patching import patch, unpatch
from skipless.surgery.records import connections, gains, set_training_progress
from skipless.surgery.saving import save_pretrained
from skipless.surgery.slimming.folding import Folded, fold
from skipless.surgery.slimming.pruning import Pruned, PruneRow, prune
from skipless.surgery.slimming.shares import shares
from skipless.surgery.slimming.stock import to_stock
from skipless.surgery.stacks import FAMILIES, SUBLAYERS, find_stacks

__all__ = [
    "Conversion",
    "ConversionConfig",
    "FAMILIES",
    "Folded",
    "SUBLAYERS",
    "PruneRow",
    "Pruned",
    "connections",
    "convert",
    "find_stacks",
    "fold",
    "gains",
    "load",
    "patch",
    "prune",
    "save_pretrained",
    "set_training_progress",
    "shares",
    "to_stock",
    "unpatch",
    "untrained_curves",
]
