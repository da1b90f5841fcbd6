"""Surgery on loaded Hugging Face models: other skip connections, and back."""

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
