"""Surgery on loaded Hugging Face models: other skip connections, and back."""

from skipless.surgery.adapters import FAMILIES, SUBLAYERS, find_stacks
from skipless.surgery.patching import connections, gains, patch, set_training_progress, unpatch
from skipless.surgery.saving import load, save_pretrained

__all__ = [
    "FAMILIES",
    "SUBLAYERS",
    "connections",
    "find_stacks",
    "gains",
    "load",
    "patch",
    "save_pretrained",
    "set_training_progress",
    "unpatch",
]
