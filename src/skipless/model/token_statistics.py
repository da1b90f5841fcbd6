"""What the aligners of U2 may know about the tokens so far: who counts, at what weight, and the
means and variances of every prefix.

Nothing here looks ahead in a causal model: position t reads positions <= t only. Padding never
counts. Sums are float64, or float32 around the first counted token where a device has no float64
(MPS): raw float32 sums of squares lose everything once a mean exceeds its deviation 1,000-fold.

Read by `aligners.py`. Legend: B batch, T new tokens, S past plus new tokens, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from skipless.interpolation_config import UniversalConfig
from skipless.model.cache import KeyValueCache
from skipless.model.context import ForwardContext
from skipless.model.running_sums import suffix_sums_

FEW = 4
"""Fewer counted tokens than this are too few for a median: see `winsor_factors`."""


@dataclass
class Tokens:
    """The tokens of one pass at one connection."""

    counted: Tensor
    """Bool [1 or B, S]: enters statistics."""
    real: Tensor | None
    """Bool [B, S], False on padding; None when all are tokens."""
    causal: bool
    past: int
    cache: KeyValueCache | None
    key: Hashable

    @classmethod
    def of(
        cls, config: UniversalConfig, context: ForwardContext, num_new: int,
        device: torch.device, key: Hashable,
    ) -> Tokens:  # fmt: skip
        """Read them off the context; the first token is left out as the config says."""
        cache = context.cache
        past = cache.length if cache is not None else 0
        real = context.tokens
        if real is None:
            counted = torch.ones(1, past + num_new, dtype=torch.bool, device=device)
            if config.skip_first_token:
                counted[:, 0] = False
        else:
            counted = real & (real.cumsum(-1) > 1) if config.skip_first_token else real
        causal = context.is_causal or cache is not None
        return cls(counted, real, causal, past, cache, key)

    @property
    def new(self) -> Tensor:
        """Bool [1 or B, T]: which of the new tokens count."""
        return self.counted[:, self.past :]

    def history(self, name: str, new: Tensor) -> Tensor:
        """`new` [B, T, C] after what the cache kept of the past: [B, S, C]."""
        return new if self.cache is None else self.cache.extend((self.key, name), new)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def winsor_factors(
    config: UniversalConfig, tokens: Tokens, x: Tensor, name: str, size: Tensor | None = None
) -> Tensor:
    """What each new token of `x` [B, T, D] is multiplied by in statistics, [B, T, 1] in [0, 1].

    0 where it does not count. A token is scaled down to `config.winsor` times the median root mean
    square: of the last `winsor_window` counted tokens when causal, of all when not. While fewer
    than FEW have been seen there is nothing to compare with, so that the token's own robust
    deviation (1.4826 times the median of |x| over its channels) bounds it too: a massive
    activation sits in a few channels and leaves that one small. `size` [B, T] are the root mean
    squares, where they are known.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    new = tokens.new
    if config.winsor is None:
        return new.to(work)[..., None].expand(x.shape[0], -1, 1)
    own: Tensor = (
        torch.linalg.vector_norm(x, dim=-1, dtype=work) * x.shape[-1] ** -0.5
        if size is None
        else size
    )
    known = tokens.history(name, own[..., None])[..., 0]
    known = known.masked_fill(~tokens.counted, torch.nan)
    if tokens.causal:
        window = config.winsor_window
        padded = torch.nn.functional.pad(known, (window - 1, 0), value=torch.nan)
        windows = padded[:, tokens.past :].unfold(1, window, 1)
        typical = windows.nanmedian(dim=-1).values
        few = (~windows.isnan()).sum(-1) < FEW
        # without padding the few are at the front; a median over channels is not free
        early = x.shape[1] if tokens.real is not None else max(FEW + 1 - tokens.past, 0)
        if early:
            robust = 1.4826 * x[:, :early].abs().to(work).median(dim=-1).values
            start = typical[:, :early]
            typical[:, :early] = torch.where(few[:, :early], start.minimum(robust), start)
    else:
        typical = known.nanmedian(dim=-1, keepdim=True).values
    limit = config.winsor * typical
    factor = torch.where(limit > 0, limit / own.clamp(min=torch.finfo(work).tiny), 1.0)
    return torch.where(new, factor.clamp(max=1), 0.0)[..., None]


class _PrefixMoments(torch.autograd.Function):
    """Mean and variance of every prefix, keeping only x and the mean for the backward pass.

    With d = x - shift, m_t = sum_{s<=t} d_s / n_t and v_t = sum d_s^2 / n_t - m_t^2:
    dx_s = sum_{t>=s} (gm_t - 2 m_t gv_t) / n_t + 2 d_s sum_{t>=s} gv_t / n_t.
    """

    @staticmethod
    def forward(ctx, x, mask, num, shift, start, wide):
        d = x.to(wide)
        if shift is not None:
            d = (d - shift) * mask
        sums, squares = d.cumsum(1), d.square().cumsum(1)
        if start is not None:
            sums += start[0][:, None]
            squares += start[1][:, None]
        last = (sums[:, -1].clone(), squares[:, -1].clone())
        mean = sums.div_(num)
        variance = squares.div_(num).sub_(mean.square()).clamp_(min=0).to(x.dtype)
        shown = (mean if shift is None else mean + shift).to(x.dtype)
        ctx.save_for_backward(x, mask, num, shift, mean)  # rounded, it would not cancel
        ctx.wide = wide
        ctx.mark_non_differentiable(*last)
        return shown, variance, *last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_mean, grad_variance, *_):
        x, mask, num, shift, mean = ctx.saved_tensors
        d = x.to(ctx.wide)
        if shift is not None:  # of one token dv is some 1 / EPS; around itself it is 0
            d = (d - shift) * mask
        by_variance = grad_variance.to(ctx.wide) / num
        by_mean = grad_mean.to(ctx.wide) / num - 2 * mean * by_variance
        grad = suffix_sums_(by_mean) + 2 * d * suffix_sums_(by_variance)
        return (grad * mask).to(x.dtype), None, None, None, None, None


def prefix_moments(
    tokens: Tokens, x: Tensor, name: str, wide: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and population variance over the counted tokens up to each new one, [B, T, D] each.

    `x` [B, T, D] is already winsorised and 0 where it does not count. Where nothing has counted
    yet both are 0 (or the mean anything, at weight 0). `wide` is the dtype of the sums.
    """
    wide = wide or wide_dtype(x.device)
    num = counts(tokens).clamp(min=1).to(wide)[..., None]
    mask = tokens.new.to(wide)[..., None]
    past, start, shift = tokens.past, None, None
    known = tokens.history(name, x)
    if wide == torch.float32 and x.dtype != torch.float64:
        first = tokens.counted.int().argmax(dim=-1).expand(x.shape[0])
        shift = known[torch.arange(len(first), device=x.device), first][:, None].detach().to(wide)
    if past and tokens.cache is not None:
        start = tokens.cache.recall((tokens.key, name), past)
        if start is None:
            old = known[:, :past].to(wide)
            if shift is not None:
                old = (old - shift) * tokens.counted[:, :past, None]
            # running sums, added in the order in which they were added the first time
            start = (old.cumsum(1)[:, -1], old.square().cumsum(1)[:, -1])
    mean, variance, *last = _PrefixMoments.apply(x, mask, num, shift, start, wide)
    if tokens.cache is not None:
        tokens.cache.remember((tokens.key, name), past + x.shape[1], tuple(last))
    return mean, variance


def counts(tokens: Tokens) -> Tensor:
    """How many tokens count up to each new one, int64 [1 or B, T]; all of them if not causal."""
    if tokens.causal:
        return tokens.counted.cumsum(-1)[:, tokens.past :]
    return tokens.counted.sum(-1, keepdim=True)


def whole_moments(tokens: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance over all counted tokens, [B, 1, D] each; not causal."""
    mask = tokens.counted.to(x.dtype)[..., None]
    num = counts(tokens).clamp(min=1)[..., None]
    mean = (x * mask).sum(1, keepdim=True) / num
    return mean, ((x - mean).square() * mask).sum(1, keepdim=True) / num
