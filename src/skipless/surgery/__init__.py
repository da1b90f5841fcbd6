"""Surgery on loaded Hugging Face models: other skip connections, and back."""

from skipless.surgery.adapters import FAMILIES, SUBLAYERS, find_stacks
from skipless.surgery.folding import Folded, fold
from skipless.surgery.patching import connections, gains, patch, set_training_progress, unpatch
from skipless.surgery.pruning import Pruned, prune, shares
from skipless.surgery.saving import load, save_pretrained
from skipless.surgery.stock import to_stock

__all__ = [
    "FAMILIES",
    "Folded",
    "SUBLAYERS",
    "Pruned",
    "connections",
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
]
