"""Gains multiplied into the linear layers beside them, and the count of what was folded.

Read by `own_folding.py` and `patched_folding.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.fallback import double
from skipless.model import Connection, is_absent
from skipless.sites import bias_of, weight_of
from skipless.surgery.patching import CONSTANT_KINDS

__all__ = ["Tally", "fold_norm", "join_weights", "scale_output"]

_TAGS = {"rezero": "F1", "layerscale": "F2", "interpolate": "F3", "fixed": "F3", "learned": "F3"}


@dataclass(kw_only=True)
class Tally:
    """What was folded, and what stays."""

    counts: Counter[str] = field(default_factory=Counter)
    """Gains that are gone, by tag."""
    kept: list[str] = field(default_factory=list)
    """Norm gains that stay, each with its reason."""

    def joined(self, connection: Connection) -> None:
        """Count the gain of a connection; what was dropped had none."""
        tag = _TAGS.get(connection.config.kind)
        if tag and not is_absent(connection.config):
            self.counts[tag] += 1

    def norm(self, name: str, norm: nn.Module, readers: Sequence[nn.Module]) -> None:
        """Fold a norm's gain into its readers, or note why it stays."""
        reason = fold_norm(norm, readers) if readers else "no linear layer reads it alone"
        if reason:
            self.kept.append(f"{name}: {reason}")
        else:
            self.counts["F4"] += 1


def join_weights(name: str, connection: Connection) -> tuple[float, Tensor]:
    """a as a number and b as a float64 tensor [1] or [D] of y = a x + b f."""
    config, gains = connection.config, connection.gains()
    if config.kind not in CONSTANT_KINDS:
        raise UserError(
            f"{name} is {config.kind}: its weights depend on the token, and no weight can hold them"
        )
    if config.kind == "fixed" and config.c != 0:
        raise UserError(f"{name} adds {config.c} times the embedding, which no weight can hold")
    fixed = config.kind == "fixed"
    a = gains.get("a", torch.tensor([config.a if fixed else float(config.kind != "none")]))
    b = gains.get("b", torch.tensor([config.b if fixed else 1.0]))
    if config.kind == "anneal" and 0 < float(a) < 1:
        raise UserError(
            f"{name} is half annealed (stream weight {float(a):.4g}); finish it with "
            "set_training_progress(1.0) before folding"
        )
    if not bool((a == a[0]).all()):
        raise UserError(
            f"{name} weighs the stream per channel ({float(a.min()):.4g} to {float(a.max()):.4g}), "
            "and only one number a sublayer can be divided out (F3)"
        )
    return float(a[0]), double(b)


@torch.no_grad()
def scale_output(linear: nn.Module, gain: Tensor) -> None:
    """F1, F2: W <- W diag(gain) and the bias with it; transformers' Conv1D stores in x out."""
    weight, bias = weight_of(linear), bias_of(linear)
    wide = double(weight)
    gain = gain.to(wide.device)
    shape = (-1, 1) if isinstance(linear, nn.Linear) else (1, -1)
    weight.copy_(wide * gain.view(shape))
    if bias is not None:
        bias.copy_(double(bias) * gain)


@torch.no_grad()
def fold_norm(norm: nn.Module, readers: Sequence[nn.Module]) -> str:
    """Move the gain (and bias) of `norm` into all its readers (F4); a reason when it cannot be."""
    weight, bias = weight_of(norm), bias_of(norm)
    if bias is not None and bool(bias.any()) and any(bias_of(r) is None for r in readers):
        return "its bias has no bias to go to"
    gain = double(weight)
    for reader in readers:
        matrix, own = weight_of(reader), bias_of(reader)
        matrix = matrix if isinstance(reader, nn.Linear) else matrix.t()
        if bias is not None and own is not None:
            own.copy_(double(own) + double(matrix) @ double(bias))
        wide = double(matrix)
        matrix.copy_(wide * gain.to(wide.device))
    weight.fill_(1.0)
    if bias is not None:
        bias.zero_()
    return ""
