"""Which tokens of a tensor are far out, what rounding it costs, and a sample of its rows (S3).

`Outliers` sees the rows [tokens, D] of one tensor batch by batch and keeps, in constant memory:

- the `num_extreme` tokens with the largest |x|, whole, with where they stood;
- `num_sampled` tokens drawn uniformly from all: those with the smallest keys, where the key of
  token i is a fixed pseudo-random function of i. Every tensor of a model so keeps the same tokens,
  and batches, probes and processes merge into what one pass would have kept;
- signal and rounding noise per tensor (S3), and the mean over tokens of each token's own
  noise-to-signal ratio, at each width asked for.

`rows()` joins extreme and sampled tokens with weights, so that a weighted sum over them estimates
the sum over all tokens, exactly as far as the extreme ones go. Read by `skipless.diagnose`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.probes.moments import Moments
from skipless.probes.rows import F64, RowSums, chunks, from_powers, row_sums
from skipless.probes.statistics import decibels

NUM_EXTREME = 32
NUM_SAMPLED = 96
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 / golden ratio as a signed number, the step of Weyl sequences and of splitmix64."""


class Fused(NamedTuple):
    """What compiled code gives of rows [n, D]; `sums` None where a value is not finite."""

    largest: Tensor
    """Largest |x| of each row [n], NaN or infinity where it holds one."""
    sums: tuple[Tensor, Tensor, Tensor] | None
    """Sums of powers 1 to 4 by channel [4, D] and by token [4, n], float64; and the sum of
    (round(x / step) - x / step)^2 by token [levels, n], where step = largest of all / level."""


Compiled = Callable[[Tensor, list[int]], Fused | None]
"""(rows, levels) -> the same; None where it does not apply."""


class Kept(NamedTuple):
    """Some tokens of a tensor."""

    rows: Tensor
    """[k, D] as the model computed them, on the CPU."""
    order: Tensor
    """What they were chosen by, [k]: minus the largest |x|, or the key; smallest first."""
    number: Tensor
    """int64 [k]: running number of the token among all tokens seen."""


@dataclass
class Noise:
    """Rounding noise of one tensor at one width; sums over tokens."""

    noise: float = 0.0
    energy: float = 0.0
    ratio: float = 0.0
    """Sum of each token's noise over its energy; tokens of zeros count 0."""
    count: int = 0

    def merge(self, other: Noise) -> None:
        """Add what `other` has seen."""
        self.noise += other.noise
        self.energy += other.energy
        self.ratio += other.ratio
        self.count += other.count

    @property
    def sqnr(self) -> float:
        """S3 in dB over all values: large tokens decide it."""
        return decibels(self.noise, self.energy)

    @property
    def token_sqnr(self) -> float:
        """S3 in dB of the mean over tokens of noise over energy: every token counts alike."""
        return decibels(self.ratio, self.count)


class Outliers:
    """Extreme tokens, sampled tokens and rounding noise of one tensor; empty at first."""

    def __init__(
        self,
        widths: Sequence[int] = (),
        *,
        num_extreme: int = NUM_EXTREME,
        num_sampled: int = NUM_SAMPLED,
        fused: Compiled | None = None,
    ) -> None:
        """`fused` does the sums in compiled code; without it torch does, five times slower."""
        self.num_extreme, self.num_sampled, self.fused = num_extreme, num_sampled, fused
        self.noise = {bits: Noise() for bits in widths}
        self.extreme: Kept | None = None
        self.sample: Kept | None = None
        self.count = 0

    def update(self, x: Tensor, mask: Tensor | None = None, *, first: int = 0) -> Moments:
        """Add a batch [..., D], whose first token has the number `first`; returns its moments.

        `mask` [...] is True at tokens to keep; tokens with a NaN or infinity are left out.
        """
        flat = x.detach().reshape(-1, x.shape[-1]) if x.dim() > 1 else x.detach().reshape(1, -1)
        flat = flat.cpu() if flat.device.type == "mps" else flat
        span, moments = (first, len(flat), str(flat.device)), Moments()
        numbers, keys = _numbered(*span)
        if mask is not None:
            keep = mask.reshape(-1).to(device=flat.device, dtype=torch.bool)
            flat, numbers, keys = flat[keep], numbers[keep], keys[keep]
        if flat.numel() == 0:
            return moments
        found = self._compiled(flat)
        largest = flat.abs().amax(1) if found is None else found.largest
        if not math.isfinite(float(largest.amax())):
            broken = ~torch.isfinite(flat)
            moments.nonfinite = int(broken.sum())
            good = ~broken.any(1)
            flat, numbers, keys, largest = flat[good], numbers[good], keys[good], largest[good]
            if flat.numel() == 0:
                return moments
            found = self._compiled(flat)
        sums = self._sums(flat, largest.amax(), found)
        self.count += len(flat)
        self.extreme = _smallest(
            self.extreme, flat, -largest.float(), numbers, self.num_extreme
        )  # fmt: skip
        self.sample = _smallest(self.sample, flat, keys, numbers, self.num_sampled)
        return moments.merge(Moments.of(sums))

    def _compiled(self, rows: Tensor) -> Fused | None:
        """What the compiled function gives; None where there is none or it does not apply."""
        levels = [2 ** (bits - 1) - 1 for bits in self.noise]
        return None if self.fused is None else self.fused(rows, levels)

    def _sums(self, rows: Tensor, largest: Tensor, found: Fused | None) -> RowSums:
        """Sums of finite rows, their noise added; taken from `found` where it is there."""
        if found is None or found.sums is None:
            visit, finish = self._rounding(rows, float(largest))
            sums = row_sums(rows, visit)
            finish(sums)
            return sums
        channels, tokens, noise = found.sums
        sums = from_powers(rows, channels, tokens, largest)
        steps = {bits: float(largest) / (2 ** (bits - 1) - 1) for bits in self.noise}
        scaled = zip(steps.items(), noise, strict=True)
        self._add({bits: each.to(F64) * step**2 for (bits, step), each in scaled}, sums.energy)
        return sums

    def _rounding(
        self, rows: Tensor, largest: float
    ) -> tuple[Callable[[Tensor, int], None] | None, Callable[[RowSums], None]]:
        """Hooks into `row_sums`: noise of every token under absmax of the whole tensor (Q1)."""
        if not self.noise or largest == 0:
            return None, lambda sums: self._add({bits: sums.energy * 0 for bits in self.noise},
                                                sums.energy)  # fmt: skip
        steps = {bits: largest / (2 ** (bits - 1) - 1) for bits in self.noise}
        dtype = F64 if rows.dtype == F64 else torch.float32
        found = {bits: rows.new_empty(len(rows), dtype=dtype) for bits in self.noise}
        longest = max(len(part) for part in chunks(rows)[:1])
        scaled, rounded = (rows.new_empty(longest, rows.shape[1], dtype=dtype) for _ in range(2))

        def visit(part: Tensor, start: int) -> None:
            t, q = scaled[: len(part)], rounded[: len(part)]
            for bits, step in steps.items():
                torch.div(part, step, out=t)
                torch.round(t, out=q)
                q.sub_(t)
                norm = found[bits][start : start + len(part)]
                torch.linalg.vector_norm(q, dim=1, out=norm)

        def finish(sums: RowSums) -> None:
            noise = {bits: (norm.to(F64) * steps[bits]).square_() for bits, norm in found.items()}
            self._add(noise, sums.energy)

        return visit, finish

    def _add(self, noise: dict[int, Tensor], energy: Tensor) -> None:
        for bits, each in noise.items():
            ratio = torch.where(energy > 0, each / energy, 0.0)
            sums = torch.stack([each.sum(), energy.sum(), ratio.sum()]).tolist()
            self.noise[bits].merge(Noise(sums[0], sums[1], sums[2], len(each)))

    def merge(self, other: Outliers) -> Outliers:
        """Add what `other` has seen (left as it is); both number tokens in one sequence."""
        if self.noise.keys() != other.noise.keys():
            raise UserError(
                f"outliers at widths {list(self.noise)} and {list(other.noise)} cannot be merged; "
                "give both the same widths"
            )
        for bits, noise in other.noise.items():
            self.noise[bits].merge(noise)
        for name, limit in (("extreme", self.num_extreme), ("sample", self.num_sampled)):
            theirs = getattr(other, name)
            if theirs is not None:
                setattr(
                    self,
                    name,
                    _smallest(getattr(self, name), theirs.rows, theirs.order, theirs.number, limit),
                )
        self.count += other.count
        return self

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """(rows [k, D] float32, weights [k] float64, token numbers [k]): extreme ones first.

        An extreme token stands for itself; the sampled ones stand for all the others alike.
        """
        if self.extreme is None or self.sample is None:
            empty = torch.empty(0)
            return empty.reshape(0, 0), empty.to(F64), empty.long()
        known = torch.isin(self.sample.number, self.extreme.number)
        others = ~known
        number = torch.cat([self.extreme.number, self.sample.number[others]])
        rows = torch.cat([self.extreme.rows, self.sample.rows[others]]).float()
        rest = self.count - len(self.extreme.number)
        share = rest / max(1, int(others.sum()))
        ones = torch.ones(len(self.extreme.number), dtype=F64)
        return rows, torch.cat([ones, torch.full((int(others.sum()),), share, dtype=F64)]), number


def _smallest(
    kept: Kept | None, rows: Tensor, order: Tensor, number: Tensor, limit: int
) -> Kept:  # fmt: skip
    """The `limit` tokens with the smallest `order` among those kept and new."""
    chosen = order.topk(min(limit, len(order)), largest=False).indices
    if kept is None:
        return Kept(rows[chosen].cpu(), order[chosen].cpu(), number[chosen].cpu())
    orders = torch.cat([kept.order, order[chosen].cpu()])
    numbers = torch.cat([kept.number, number[chosen].cpu()])
    if len(orders) > limit:
        # Ties go to the earlier token, so that the order of merging does not matter.
        first = torch.argsort(numbers, stable=True)
        best = first[torch.argsort(orders[first], stable=True)[:limit]]
    else:
        best = torch.arange(len(orders))
    new = best >= len(kept.order)
    # Rows are wide, so that those which go are not copied first.
    found = kept.rows.new_empty(len(best), rows.shape[1])
    found[~new] = kept.rows[best[~new]]
    at = best[new] - len(kept.order)
    found[new] = rows[chosen[at.to(chosen.device)]].cpu()
    return Kept(found, orders[best], numbers[best])


@lru_cache(maxsize=4)
def _numbered(first: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Token numbers from `first` on and their keys; every tensor of a batch has the same."""
    numbers = torch.arange(first, first + count, device=device)
    return numbers, _keys(numbers)


def _keys(number: Tensor) -> Tensor:
    """A pseudo-random int64 of each token number (splitmix64's mixing), the same everywhere."""
    x = (number + 1) * _ODD
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))
