"""SmoothQuant: difficulty of activations moved into weights, channel by channel (Q5).

    s_j = max |x_j|^a / max |W_.j|^(1-a)        x / s in front, W diag(s) inside

1. calibration: max |x_j| of every channel of every tensor that linear layers read
2. s_j from it and the largest weight that meets the channel in any layer that reads the tensor
   (a = 0.5 shares evenly; 1 moves everything into the weights, 0 everything out of them);
   1 where either is zero, so that a dead channel keeps its weights
3. 1/s goes into the module in front where that is proved (`transforms.sources`), else to a hook

Full-precision outputs stay the same up to rounding. Source: arXiv 2211.10438. Libraries fold into
norms whose names they know, and only for q, k, v and up; here any norm, V under O, or up under
down qualifies, and what does not gets an explicit division, so that no layer is left out unseen.
Read by `by_name.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.jsonable import Config
from skipless.quant.transforms.session import Session
from skipless.quant.transforms.tracing import Group


@dataclass(frozen=True, kw_only=True)
class Smooth(Config):
    """Scale channels between activations and weights. `strength` is a above, in [0, 1]."""

    name: ClassVar[str] = "smooth"
    stage: ClassVar[int] = 1
    strength: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise UserError(f"the strength of smooth is {self.strength}; from 0 to 1 was expected")

    def __str__(self) -> str:
        return self.name if self.strength == 0.5 else f"{self.name}:{self.strength:g}"

    def prepare(self, session: Session) -> None:
        """Scale every group of the session."""
        largest: dict[str, Tensor] = {}

        def visit(group: Group, rows: Tensor) -> None:
            found = rows.abs().amax(0).float()
            known = largest.get(group.names[0])
            largest[group.names[0]] = found if known is None else torch.maximum(known, found)

        session.collect(visit, session.changeable)
        folded = 0
        for group in session.changeable:
            if group.names[0] not in largest:
                continue
            of_x = session.pool(group, largest[group.names[0]])
            matrices = [session.matrix(name) for name in session.members(group)]
            of_w = session.pool(group, torch.stack([m.abs().amax(0) for m in matrices]).amax(0))
            folded += session.scale_inputs(group, smoothing_factors(of_x, of_w, self.strength))
        session.notes.append(
            f"{self}: {folded} of {len(session.changeable)} tensors scaled for free"
        )


def smoothing_factors(of_x: Tensor, of_w: Tensor, strength: float = 0.5) -> Tensor:
    """s_j = max |x_j|^a / max |w_j|^(1-a) (Q5) of the maxima [width]; 1 where either is 0."""
    s = of_x.pow(strength) / of_w.pow(1 - strength)
    usable = (of_x > 0) & (of_w > 0) & torch.isfinite(s) & (s > 0)
    return torch.where(usable, s, torch.ones_like(s))
