"""Static ranges: what a site's values were over the calibration batches, in constant memory (Q1).

`absmax` keeps the extreme of all batches. Percentile, MSE-best and Gaussian clips are chosen for
each batch and averaged by its number of values: exact for one batch, and steady for many, where a
running maximum would let one batch decide. Read by `quant.activations` and `quant.training`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.quant.fake import clip_range


class RangeObserver:
    """Collects the per-tensor range of one site, batch by batch."""

    def __init__(self, bits: int, *, symmetric: bool = True, clip: str = "absmax") -> None:
        self.bits, self.symmetric, self.clip = bits, symmetric, clip
        self.count = 0
        self._ends: Tensor | None = None  # float64 [1] clip or [2] (low, high)

    def update(self, x: Tensor) -> None:
        """Take in one batch of values; an empty tensor changes nothing."""
        if x.numel() == 0:
            return
        found = clip_range(x, self.bits, symmetric=self.symmetric, clip=self.clip)
        ends = torch.stack(found if isinstance(found, tuple) else (found,)).cpu().double()
        self.count += x.numel()
        if self._ends is None:
            self._ends = ends
        elif self.clip == "absmax" and self.symmetric:
            self._ends = torch.maximum(self._ends, ends)
        elif self.clip == "absmax":
            low, high = torch.minimum(self._ends, ends)[0], torch.maximum(self._ends, ends)[1]
            self._ends = torch.stack((low, high))
        else:
            self._ends = self._ends + (ends - self._ends) * (x.numel() / self.count)

    def range(self, where: str = "the site") -> Tensor | tuple[Tensor, Tensor]:
        """The clip, or (low, high), as float32 scalars. Raises UserError if nothing finite came."""
        if self._ends is None:
            raise UserError(f"{where} saw no value in the calibration batches; give more of them")
        if not bool(torch.isfinite(self._ends).all()):
            raise UserError(
                f"{where} saw NaN or infinity in the calibration batches; look for the first "
                "such value with a dynamic scheme, or leave the batch out"
            )
        ends = self._ends.float().unbind()
        return ends[0] if self.symmetric else (ends[0], ends[1])
