"""Surgery on loaded Hugging Face models: other skip connections, and back."""

from skipless.surgery.adapters import FAMILIES, SUBLAYERS, find_stacks
from skipless.surgery.conversion import Conversion, ConversionConfig
from skipless.surgery.converting import convert
from skipless.surgery.folding import Folded, fold
from skipless.surgery.loading import load
from skipless.surgery.patching import patch, unpatch
from skipless.surgery.pruning import Pruned, PruneRow, prune, shares
from skipless.surgery.records import connections, gains, set_training_progress
from skipless.surgery.saving import save_pretrained
from skipless.surgery.skips import untrained_curves
from skipless.surgery.stock import to_stock

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
