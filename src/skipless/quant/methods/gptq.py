"""GPTQ: weights rounded one input channel at a time, the rest correcting for the error (Q5).

Minimises |X W^T - X Q^T|^2 over matrices Q on the scheme's grid, greedily, with H = X^T X:

1. H of every group of layers that read one tensor, over the calibration batches; block by block, so
   that X comes from a model whose earlier blocks are quantised already, activations rounded too if
   the scheme rounds them
2. damping: 1 % of the mean diagonal is added to the diagonal. A channel that is always zero has no
   say: its weights are rounded to the nearest and disturb nothing
3. order: as stored, or (`order`) channels with the largest H_jj first
4. U = upper Cholesky factor of H^-1; for each channel j: round column j to the grid, spread the
   error e = (w_j - q_j) / U_jj over the columns to come, w_k -= e U_jk. In blocks of 128 columns,
   so that most of the work is matrix products

The grid (ranges, groups, zero points) is that of the scheme on the original weights, the same as
for rounding to the nearest: only the choice of codes differs, so the format, integer execution and
saving do not change. Libraries recompute a group's range when they reach it, which `order` then
forbids; and they run block by block through classes they know, where here the calibration batches
pass through the model once a block up to that block (cost grows with the square of depth).

Source: arXiv 2210.17323. float64 except on MPS, which has none. Read by `by_name.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.jsonable import Config, check_named
from skipless.log import make_progress
from skipless.quant.fake import Codes, grid
from skipless.quant.transforms.session import Session
from skipless.quant.transforms.tracing import Group
from skipless.quant.weights import QuantizedWeight
from skipless.scheme import Scheme

BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Gptq(Config):
    """Choose codes with second-order information. `damping` is a share of the mean diagonal."""

    name: ClassVar[str] = "gptq"
    stage: ClassVar[int] = 4
    damping: float = 0.01
    act_order: bool = False

    def __post_init__(self) -> None:
        check_named("gptq", self)
        if not 0 < self.damping < 10:
            raise UserError(f"the damping of gptq is {self.damping}; 0.01 is usual")

    def __str__(self) -> str:
        return f"{self.name}:order" if self.act_order else self.name

    def prepare(self, session: Session) -> None:
        """Trace while nothing is rounded yet; the function of the model is not touched."""
        session.trace()

    def choose(self, session: Session, weights: Sequence[QuantizedWeight]) -> None:
        """Replace the rounded values of every weight, one block of the model after the other.

        Leaves quantised values in use in the weights it treats.
        """
        by_parameter = {id(weight.parameter): weight for weight in weights}
        done: set[int] = set()
        with make_progress(unit="matrices") as bar:  # on a terminal only
            task = bar.add_task("gptq", total=len(weights), note="")
            for stage in _stages(session.groups):
                bar.update(task, note="calibration batches")
                hessians = self._hessians(session, stage)
                for group in stage:
                    hessian = hessians.pop(group.names[0], None)
                    if hessian is None:
                        continue
                    found = [by_parameter.get(id(session.targets[n].parameter))
                             for n in session.members(group)]  # fmt: skip
                    todo = [w for w in found if w is not None and id(w) not in done]
                    done |= {id(weight) for weight in todo}
                    bar.update(task, note=group.names[0])
                    self._reconstruct(todo, hessian)
                    bar.update(task, advance=len(todo))
        left = [weight.name for weight in weights if id(weight) not in done]
        if left:
            session.notes.append(
                f"gptq: {', '.join(left[:3])}{'...' * (len(left) > 3)} rounded to the nearest, "
                "since no calibration batch reached them as linear layers"
            )

    def _hessians(self, session: Session, stage: Sequence[Group]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def visit(group: Group, rows: Tensor) -> None:
            wide = rows.float()
            product = (wide.T @ wide).to(_precise(wide))
            key = group.names[0]
            found[key] = product if key not in found else found[key].add_(product)

        session.collect(visit, stage)
        return found

    def _reconstruct(self, weights: Sequence[QuantizedWeight], hessian: Tensor) -> None:
        """All weights that read one tensor; its factor is made once."""
        columns = weights[0].columns if weights else None
        if columns is not None:  # they have no error; the others are on their own
            hessian[columns] = 0
            hessian[:, columns] = 0
        factor = None
        for weight in weights:
            matrix = weight.matrix().float()
            if columns is not None:
                matrix = matrix.clone()
                matrix[:, columns] = 0
            try:
                if factor is None:
                    factor = _factor(hessian, self.damping, self.act_order)
                codes = _codes(matrix, *factor, weight.scheme)
            except UserError as error:
                raise UserError(f"{weight.name}: {error}") from None
            weight.replace(codes.dequantize().reshape(matrix.shape), codes)
            weight.swap()


def gptq(
    matrix: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    damping: float = 0.01,
    act_order: bool = False,
) -> Codes:
    """Codes of `matrix` [out, in] on the grid of `scheme` for inputs with X^T X = `hessian` (Q5).

    int16 codes (int32 at 16 bits; asymmetric ones with the zero point taken off) and scales in the
    shape of the scheme's groups, as `fake.integer_codes` gives. Raises UserError for values that
    are not finite.
    """
    hessian = hessian.to(matrix.device, _precise(matrix)).clone()
    return _codes(matrix, *_factor(hessian, damping, act_order), scheme)


def _codes(matrix: Tensor, upper: Tensor, order: Tensor | None, scheme: Scheme) -> Codes:
    """Step 4, on the transposed weight, so that an input channel is a row of memory."""
    if not bool(torch.isfinite(matrix).all()):
        raise UserError("the weight is not finite; look at the model")
    step, low, high, shape = grid(
        matrix, scheme.weight_bits, scheme.weight_granularity, scheme.symmetric, scheme.clip
    )
    dtype = _precise(matrix)
    w = matrix.T.to(dtype, copy=True).contiguous()
    steps, lows, highs = (
        torch.as_tensor(t, device=w.device).expand(shape).reshape(matrix.shape).T.to(dtype)
        for t in (step, low, high)
    )
    if order is not None:
        w, steps, lows, highs = (t[order] for t in (w, steps, lows, highs))
    codes = torch.zeros_like(w)
    for start in range(0, len(w), BLOCK):
        stop = min(start + BLOCK, len(w))
        errors = torch.zeros_like(w[start:stop])
        for j in range(start, stop):
            nearest = (w[j] / steps[j]).round_()
            codes[j] = torch.maximum(torch.minimum(nearest, highs[j]), lows[j])
            error = (w[j] - codes[j] * steps[j]).div_(upper[j, j])
            w[j + 1 : stop].addr_(upper[j, j + 1 : stop], error, alpha=-1)
            errors[j - start] = error
        w[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    if order is not None:
        codes = codes[order.argsort()]
    # With the zero point taken off, 16-bit codes reach up to 65,535.
    whole = torch.int16 if scheme.weight_bits < 16 else torch.int32
    return Codes(codes.T.to(whole).reshape(shape), step)


def _factor(hessian: Tensor, damping: float, act_order: bool) -> tuple[Tensor, Tensor | None]:
    """(U, order of the channels or None) from X^T X, which is changed in place."""
    if not bool(torch.isfinite(hessian).all()):
        raise UserError(
            "the calibration values are not finite or overflow when squared; look at the batches, "
            "or convert the model to float32"
        )
    order = hessian.diagonal().argsort(descending=True) if act_order else None
    if order is not None:
        hessian = hessian[order][:, order]
    return _inverse_factor(hessian, damping), order


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian, which is changed in place."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clone()
    dead = diagonal == 0
    diagonal[dead] = 1.0 if mean == 0 else mean
    for attempt in range(4):  # a Hessian of few tokens may need more than the customary 1 %
        diagonal += damping * 10**attempt * mean
        factor, info = torch.linalg.cholesky_ex(hessian)
        if int(info) == 0:
            inverse = torch.cholesky_inverse(factor)
            upper, info = torch.linalg.cholesky_ex(inverse, upper=True)
            if int(info) == 0:
                return upper
    raise UserError(
        "the Hessian of the calibration values has no Cholesky factor even with strong damping; "
        "give more, or more varied, calibration batches"
    )


def _stages(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that are calibrated together: those of one block; others one at a time."""
    stages: list[list[Group]] = []
    for group in groups:
        if stages and group.block is not None and stages[-1][-1].block == group.block:
            stages[-1].append(group)
        else:
            stages.append([group])
    return stages


def _precise(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64
