"""Geometry of a join: what the stream x and the branch F do to each other (S7, S8).

`JoinGeometry` sees (x, F, y) batch by batch, where y is the stream after the join (x + F where the
connection is a residual one). Constant memory, mergeable. Norms and kurtosis come from the moments
(moments.py), directions and spectra from the sketches (spectrum.py). `join_geometry` is the
one-shot form. Read by probe.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.probes.moments import Moments, batch_moments
from skipless.probes.rows import F64, as_rows
from skipless.probes.spectrum import Sketch, effective_rank, principal_angle, spectrum_share
from skipless.probes.statistics import cross_cumulant_share

NUM_DIRECTIONS = 16
"""Principal directions of x and of F between which angles are taken."""

Remember = Callable[[Tensor, str, Callable[[], Any]], Any]
"""(tensor, what, compute) -> result: lets a probe compute each tensor's statistics once."""


def token_similarity(x: Tensor, mask: Tensor | None = None) -> tuple[float, int]:
    """Sum over sequences of the mean cosine between different tokens of x [B, T, D], and how many.

    [T, D] is one sequence. Sequences with fewer than two tokens do not count. `mask` [B, T] is
    True at tokens to keep; tokens that are zero or not finite are left out as well.
    """
    if x.dim() < 2:
        return 0.0, 0
    x = x.detach()
    x = x.cpu() if x.device.type == "mps" else x
    x = x.reshape(1, *x.shape) if x.dim() == 2 else x.reshape(x.shape[0], -1, x.shape[-1])
    x = x.to(F64)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    keep = norm.isfinite() & (norm > 0)
    if mask is not None:
        keep &= mask.reshape(*x.shape[:2], 1).to(device=x.device, dtype=torch.bool)
    weight = torch.where(keep, 1 / norm, 0.0)
    # A zero weight would not hide a NaN from the sum.
    x = x if bool(norm.isfinite().all()) else torch.where(keep, x, 0.0)
    total = (weight.transpose(1, 2) @ x).square().sum((1, 2))
    n = keep.sum((1, 2))
    pairs = n * (n - 1)
    cosine = torch.where(pairs > 0, (total - n) / pairs.clamp(min=1), 0.0)
    return float(cosine.sum()), int((pairs > 0).sum())


class JoinGeometry:
    """Statistics of one join, empty at first."""

    def __init__(self) -> None:
        self.stream, self.branch, self.sum, self.output = (Moments() for _ in range(4))
        self.sketches: dict[str, Sketch] = {}
        self.similarity_sum, self.num_sequences = 0.0, 0

    def update(
        self,
        stream: Tensor,
        branch: Tensor,
        output: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        remember: Remember = lambda tensor, what, compute: compute(),
    ) -> JoinGeometry:
        """Add a batch of x, F and y [B, T, D] or [T, D]; y None means x + F. Returns self.

        `mask` [B, T] is True at tokens to keep. Raises UserError for different shapes.
        """
        if stream.shape != branch.shape:
            raise UserError(
                f"the stream has shape {tuple(stream.shape)} and the branch "
                f"{tuple(branch.shape)}; a join needs equal shapes"
            )
        total = stream + branch
        if output is None or (output.shape == total.shape and torch.equal(output, total)):
            total = output = total if output is None else output
        tensors = {"stream": stream, "branch": branch, "sum": total, "output": output}
        for name, x in tensors.items():
            moments = remember(x, "moments", lambda x=x: batch_moments(x, mask))
            getattr(self, name).merge(moments)
            if name != "sum":
                sketch = remember(x, "sketch", lambda x=x: _finite_sketch(x, mask))
                self.sketches.setdefault(name, Sketch(x.shape[-1])).merge(sketch)
        similarity, number = remember(output, "similarity", lambda: token_similarity(output, mask))
        self.similarity_sum += similarity
        self.num_sequences += number
        return self

    def merge(self, other: JoinGeometry) -> JoinGeometry:
        """Add what `other` has seen (left as it is). Returns self."""
        for name in ("stream", "branch", "sum", "output"):
            getattr(self, name).merge(getattr(other, name))
        for name, sketch in other.sketches.items():
            self.sketches.setdefault(name, Sketch(sketch.width)).merge(sketch)
        self.similarity_sum += other.similarity_sum
        self.num_sequences += other.num_sequences
        return self

    def summary(self, decompose: Callable[[Sketch], tuple] = Sketch.decompose) -> dict[str, Any]:
        """The numbers of a geometry row; None where not defined.

        Norms are root mean squares over tokens of |x|, |F|, |x+F|, |y|; `principal_angle` is in
        degrees; `effective_rank`, `spectrum_share` and `token_similarity` are those of y, the
        stream after the join.
        """
        energy = {name: _energy(getattr(self, name)) for name in
                  ("stream", "branch", "sum", "output")}  # fmt: skip
        spectra = {name: decompose(sketch) for name, sketch in self.sketches.items()}
        row: dict[str, Any] = {"count": self.stream.count}
        row |= {f"{name}_norm": value**0.5 for name, value in energy.items()}
        both = energy["stream"] + energy["branch"]
        row["cancellation"] = energy["sum"] / both if both else math.nan
        row["branch_over_stream"] = (
            (energy["branch"] / energy["stream"]) ** 0.5 if energy["stream"] else math.nan
        )
        row["principal_angle"] = principal_angle(
            *(spectra[name][1][:, :NUM_DIRECTIONS] for name in ("stream", "branch"))
        ) if spectra else math.nan  # fmt: skip
        for name, prefix in (("output", ""), ("branch", "branch_")):
            values = spectra[name][0] if spectra else torch.empty(0)
            row[prefix + "effective_rank"] = effective_rank(values)
            row[prefix + "spectrum_share"] = spectrum_share(values)
        row["spectrum_exact"] = all(sketch.exact for sketch in self.sketches.values())
        row["token_similarity"] = (
            self.similarity_sum / self.num_sequences if self.num_sequences else math.nan
        )
        row |= cross_cumulant_share(self.stream, self.branch, self.sum)
        return {key: None if value != value else value for key, value in row.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as CPU tensors and numbers."""
        return {
            key: value.state_dict() if isinstance(value, Moments)
            else {name: sketch.state_dict() for name, sketch in value.items()}
            if isinstance(value, dict) else value
            for key, value in vars(self).items()
        }  # fmt: skip

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> JoinGeometry:
        """The inverse of `state_dict`."""
        join = cls()
        for key, value in state.items():
            if key == "sketches":
                value = {name: Sketch.from_state_dict(part) for name, part in value.items()}
            elif isinstance(value, dict):
                value = Moments.from_state_dict(value)
            setattr(join, key, value)
        return join


def join_geometry(stream: Tensor, branch: Tensor, output: Tensor | None = None) -> dict[str, Any]:
    """S7 and S8 of one join, one-shot: see `JoinGeometry.summary`."""
    return JoinGeometry().update(stream, branch, output).summary()


def _energy(moments: Moments) -> float:
    """Mean over tokens of the squared norm."""
    n, mean, m2, _, _ = moments.pooled()
    return (m2 + n * mean**2) / moments.count if n else math.nan


def _finite_sketch(x: Tensor, mask: Tensor | None) -> Sketch:
    rows = as_rows(x, mask)
    sketch = Sketch.of(rows)
    if math.isfinite(sketch.energy):
        return sketch
    return Sketch.of(rows[torch.isfinite(rows).all(dim=1)])
