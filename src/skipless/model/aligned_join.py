"""The join of universal interpolation (C8) as one autograd function, for the causal aligners
`none`, `mean` and `diagonal`: fast, and small in what it keeps.

In autograd's own operations (`aligners.py`, the oracle of the tests) a site keeps some ten tensors
[B, T, D] for the backward pass. This keeps the branch, and the stream, which the next norm keeps
anyway:

1. Tokens go in chunks whose tensors stay in a core's cache; sums carry over from chunk to chunk.
2. The backward pass takes the chunks in reverse. From the sums at a chunk's start it computes means
   and variances again, and it carries sums over later tokens back.

Read by `interpolation.py`. Legend: B batch, T tokens, C tokens of a chunk, D width, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from skipless.interpolation_config import UniversalConfig
from skipless.model.aligners import EPS, trust
from skipless.model.running_sums import running_sums_, suffix_sums_
from skipless.model.token_statistics import Tokens, counts, wide_dtype, winsor_factors

FUSED = ("none", "mean", "diagonal")
"""The aligners it knows."""

CHUNK = 2**16
"""Numbers [B, C, D] of a chunk on the CPU (2^14 to 2^18 differ by a few per cent at D = 1,024)."""
CHUNK_ELSEWHERE = 2**24
"""The same on accelerators, where it only bounds memory."""


@dataclass
class Join:
    """What a join reads beside the stream and the branch, in float32 or float64."""

    rho: Tensor
    """[1]."""
    weight: Tensor
    """kappa g, [B, T, 1] or [1]."""
    hidden: Tensor | None = None
    """h [B, T, r] of e = F + h up^T; None for e = F."""
    up: Tensor | None = None
    """[D, r]."""
    factor_x: Tensor | None = None
    """By what a token of x, and of e, is multiplied in statistics, [B, T, 1]."""
    factor_e: Tensor | None = None
    num: Tensor | None = None
    """How many tokens count up to each one, at least 1, [1 or B, T, 1]."""
    trust: Tensor | None = None
    """w = n / (n + shrinkage), [1 or B, T, 1]."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Join:
        """`change` of every tensor there is."""
        found = Join(change(self.rho), change(self.weight))
        for name in OPTIONAL:
            own = getattr(self, name)
            setattr(found, name, None if own is None else change(own))
        return found

    def part(self, start: int, stop: int) -> Join:
        """The same for tokens start to stop."""
        return self.map(lambda t: t[:, start:stop] if t.ndim == 3 else t)


OPTIONAL = tuple(f.name for f in fields(Join) if f.default is None)


def aligned_join(
    config: UniversalConfig, tokens: Tokens, x: Tensor, f: Tensor, size: Tensor, given: Join
) -> Tensor:
    """y = x + kappa g (F + rho (A(e) - F)) [B, T, D] (U0 with U2), in the wider of both dtypes.

    `size` [B, T] are the root mean squares of x; `given` has rho, weight, hidden and up. Computed
    in float32 at least, under autocast too. Sums are float64 (float32 on MPS), but within a chunk
    `mean`, which loses nothing by cancellation, adds in float32.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, f.dtype), torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        given = given.map(lambda t: t.to(dtype))
        if config.aligner != "none":
            given.factor_x = winsor_factors(config, tokens, x, "stream_size", size)
            with torch.no_grad():
                _, _, e = _opened(x, f, given)
            given.factor_e = winsor_factors(config, tokens, e, "branch_size")
            num = counts(tokens)[..., None]
            given.num, given.trust = num.clamp(min=1).to(dtype), trust(config, num, dtype)
        rest = (getattr(given, f.name) for f in fields(given))
        return _AlignedJoin.apply(config.aligner, x, f, *rest)


class _AlignedJoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, aligner, x, f, *rest):
        given, carried, kept = Join(*rest), None, []
        dtype = torch.promote_types(x.dtype, f.dtype)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        for start, stop in _chunks(x):
            kept.append(carried)
            part = given.part(start, stop)
            xc, fc, e = _opened(x[:, start:stop], f[:, start:stop], part)
            aligned, carried, _ = _FORWARD[aligner](xc, e, part, carried)
            phi = torch.addcmul(fc, aligned - fc, part.rho)
            torch.addcmul(xc, phi, part.weight, out=y[:, start:stop])
        ctx.save_for_backward(x, f, *rest)
        ctx.aligner, ctx.kept = aligner, kept
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        x, f, *rest = ctx.saved_tensors
        given, later = Join(*rest), None
        grad_x, grad_f = torch.empty_like(x), torch.empty_like(f)
        grads = Join(torch.zeros_like(given.rho), torch.zeros_like(given.weight))
        if given.hidden is not None and given.up is not None:
            grads.hidden, grads.up = torch.empty_like(given.hidden), torch.zeros_like(given.up)
        for (start, stop), carried in zip(reversed(_chunks(x)), reversed(ctx.kept), strict=True):
            part, own = given.part(start, stop), grads.part(start, stop)
            xc, fc, e = _opened(x[:, start:stop], f[:, start:stop], part)
            aligned, _, inside = _FORWARD[ctx.aligner](xc, e, part, carried)
            g = grad_y[:, start:stop].to(xc.dtype)
            by_move = torch.linalg.vecdot(g, aligned - fc)[..., None]
            along = torch.linalg.vecdot(g, fc)[..., None].add_(by_move * part.rho)
            grads.rho.add_((by_move * part.weight).sum())
            own.weight.add_(along if own.weight.ndim == 3 else along.sum())
            to_x, to_e, later = _BACKWARD[ctx.aligner](
                g * (part.weight * part.rho), part, inside, later
            )
            if part.hidden is not None and part.up is not None:
                assert own.hidden is not None and own.up is not None, "made above"
                own.hidden.copy_(to_e @ part.up)
                own.up.addmm_(to_e.flatten(0, 1).T, part.hidden.flatten(0, 1))
            direct = part.weight * (1 - part.rho)
            torch.addcmul(to_e, g, direct, out=grad_f[:, start:stop])
            torch.add(g, to_x, out=grad_x[:, start:stop])
        return None, grad_x, grad_f, *(getattr(grads, n.name) for n in fields(grads))


def _chunks(x: Tensor) -> list[tuple[int, int]]:
    batch, length, width = x.shape
    most = CHUNK if x.device.type == "cpu" else CHUNK_ELSEWHERE
    size = max(most // (batch * width), 16)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _opened(x: Tensor, f: Tensor, part: Join) -> tuple[Tensor, Tensor, Tensor]:
    """x, F and e of a chunk in the dtype of the work."""
    x, f = x.to(part.weight.dtype), f.to(part.weight.dtype)
    if part.hidden is None or part.up is None:
        return x, f, f
    return x, f, f + part.hidden @ part.up.T


# An aligner's forward takes (x, e, part, carried) to (A(e), what the next chunk starts from, what
# the backward pass reads). Its backward takes (the gradient of A(e), part, that, what later chunks
# ask of this one's tokens) to (the gradients of x and of e, what this and later chunks ask).


def _none(x: Tensor, e: Tensor, part: Join, carried: None):
    return e, None, None


def _none_backward(grad: Tensor, part: Join, inside: None, later: None):
    return torch.zeros_like(grad[:, :1, :1]), grad, None


def _mean(x: Tensor, e: Tensor, part: Join, carried: Tensor | None):
    """A(e) = e + w (mean_x - mean_e)."""
    fx, fe, num, trust = _counted(part)
    sums = running_sums_((x * fx).addcmul_(e, fe, value=-1))
    last = sums[:, -1].to(wide_dtype(x.device), copy=True)
    if carried is not None:
        sums += carried[:, None].to(sums.dtype)
        last += carried
    return torch.addcmul(e, sums, trust / num), last, None


def _mean_backward(grad: Tensor, part: Join, inside: None, later: Tensor | None):
    fx, fe, num, trust = _counted(part)
    asked = suffix_sums_(grad * (trust / num))
    first = asked[:, 0].to(wide_dtype(grad.device), copy=True)
    if later is not None:
        asked += later[:, None].to(asked.dtype)
        first += later
    return asked * fx, torch.addcmul(grad, asked, fe, value=-1), first


def _diagonal(x: Tensor, e: Tensor, part: Join, carried: tuple[Tensor, Tensor | None] | None):
    """A(e) = w mean_x + (e - w mean_e) sqrt(v_x' / v_e')."""
    fx, fe, num, trust = _counted(part)
    z = x.new_empty((2, *x.shape), dtype=wide_dtype(x.device))
    z[0], z[1] = x * fx, e * fe
    last, shift = (None, None) if carried is None else carried
    if z.dtype == torch.float32:
        # Around the first counted token nothing cancels: it is 0, as is its own mean, and both are
        # multiplied by a gradient of some 1 / EPS, since one token has no variance.
        shift = _first(z, fx) if shift is None else shift
        z.sub_(shift).masked_fill_(fx == 0, 0.0)
    sums = z.new_empty((2, *z.shape))
    sums[0] = z
    torch.mul(z, z, out=sums[1])
    carried = running_sums_(sums.flatten(0, 2), last)[:, -1].clone(), shift
    mean, variance = sums.div_(num)
    variance = variance.sub_(mean.square()).clamp_(min=0).to(x.dtype)
    wide, mean = mean, mean.to(x.dtype)
    if shift is not None:  # not before it: what is ahead may be no number
        mean = mean + torch.where(trust > 0, shift, 0.0)
    common = ((1 - trust) / 2) * (variance[0] + variance[1]) + EPS
    top, bottom = torch.addcmul(common, variance, trust)
    ratio = (top / bottom).sqrt_()
    centred = torch.addcmul(e, mean[1], trust, value=-1)
    aligned = (mean[0] * trust).addcmul_(centred, ratio)
    return aligned, carried, (z, wide, ratio, top, bottom, centred)


def _first(z: Tensor, factor: Tensor) -> Tensor:
    """z [2, B, T, D] at the first token whose factor [B, T, 1] is not 0, [2, B, 1, D]."""
    place = (factor[..., 0] != 0).int().argmax(1)
    return z[:, torch.arange(len(place), device=z.device), place][:, :, None]


def _diagonal_backward(grad: Tensor, part: Join, inside: tuple, later: Tensor | None):
    """Through the ratio r = sqrt(p / q): dr = r / 2 (dp / p - dq / q); through the moments, with n
    and m of token t: dz_s = sum_{t>=s} (dm_t - 2 m_t dv_t) / n_t + 2 z_s sum_{t>=s} dv_t / n_t."""
    (fx, fe, num, trust), (z, wide, ratio, top, bottom, centred) = _counted(part), inside
    to_e = grad * ratio
    half = centred.mul_(to_e).div_(2)
    to_variance = torch.stack((half / top, half.neg_() / bottom))
    common = to_variance.sum(0) * ((1 - trust) / 2)
    to_variance.mul_(trust).add_(common).div_(num)
    by_trust = trust / num
    to_mean = torch.stack((grad * by_trust, to_e * -by_trust))
    asked = z.new_empty((2, *z.shape))
    asked[0], asked[1] = to_mean, to_variance
    # in wide numbers: where few tokens have no variance yet, dv is some 1 / EPS, and 2 z dv cancels
    asked[0].addcmul_(wide, asked[1], value=-2)
    later = suffix_sums_(asked.flatten(0, 2), later)[:, 0].clone()
    by_mean, by_variance = asked
    to_z = by_mean.addcmul_(z, by_variance, value=2).to(grad.dtype)
    return to_z[0] * fx, to_e.addcmul_(to_z[1], fe), later


def _counted(part: Join) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = (part.factor_x, part.factor_e, part.num, part.trust)
    assert all(t is not None for t in found), "an aligner needs to know who counts"
    return found  # type: ignore[return-value]


_FORWARD = {"none": _none, "mean": _mean, "diagonal": _diagonal}
_BACKWARD = {"none": _none_backward, "mean": _mean_backward, "diagonal": _diagonal_backward}
