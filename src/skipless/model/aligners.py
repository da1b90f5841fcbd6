"""The aligners of universal interpolation (U2): bring a branch into the stream's distribution.

1. Both are winsorised for statistics only (`token_statistics.py`); what is mapped is e itself.
2. Statistics shrink towards a common one: S' = w S + (1 - w) c, w = n / (n + shrinkage), with one
   c for stream and branch, so that no token at all gives the identity, and no variance of zero
   gives an infinite ratio.
3. The affine map: A(e) = w mean_x + (e - w mean_e) M. M is a ratio of deviations (diagonal), or
   L_e^-T L_x^T (cholesky), or the Gaussian optimal transport (bures); sinkhorn is no such map.

A causal model uses prefixes (mean, diagonal) or completed chunks (cholesky, bures). Read by
`interpolation.py`; `aligned_join.py` is the fast form of `none`, `mean` and `diagonal` where there
is no cache. Legend: B batch, T new tokens, S past plus new tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipless.interpolation_config import UniversalConfig
from skipless.model.matrix_roots import bures_map, cholesky_map
from skipless.model.token_statistics import (
    Tokens,
    counts,
    prefix_moments,
    whole_moments,
    wide_dtype,
    winsor_factors,
)

EPS = 1e-8
"""Added to variances; only felt where both are zero."""

Affine = tuple[Tensor, Tensor, Tensor]
"""w mean_x [B, D], w mean_e [B, D] and M [B, D, D] of A(e) = w mean_x + (e - w mean_e) M."""


def align(config: UniversalConfig, tokens: Tokens, stream: Tensor, branch: Tensor) -> Tensor:
    """U2: A(branch), in the branch's dtype; `stream` and `branch` [B, T, D] are the new tokens."""
    if config.aligner == "none":
        return branch
    work = torch.promote_types(branch.dtype, torch.float32)
    x, e = stream.to(work), branch.to(work)
    wx = x * winsor_factors(config, tokens, x, "stream_size")
    we = e * winsor_factors(config, tokens, e, "branch_size")
    return _ALIGNERS[config.aligner](config, tokens, wx, we, e).to(branch.dtype)


def trust(config: UniversalConfig, num: Tensor, dtype: torch.dtype) -> Tensor:
    """How much statistics of n tokens count: w = n / (n + shrinkage), 0 at n = 0."""
    num = num.to(dtype)
    return num / (num + config.shrinkage).clamp(min=1)


def _mean(config, tokens: Tokens, wx: Tensor, we: Tensor, e: Tensor) -> Tensor:
    """A(e) = e + w (mean_x - mean_e)."""
    num = counts(tokens)[..., None]
    weight = trust(config, num, e.dtype)
    apart = wx - we
    if not tokens.causal:
        return e + weight * apart.sum(1, keepdim=True) / num.clamp(min=1)
    wide = wide_dtype(e.device)
    sums = apart.to(wide).cumsum(1)
    if tokens.cache is not None:
        known = tokens.history("apart", apart)
        if tokens.past:
            start = tokens.cache.recall((tokens.key, "apart"), tokens.past)
            if start is None:
                start = (known[:, : tokens.past].to(wide).cumsum(1)[:, -1],)
            sums = sums + start[0][:, None]
        tokens.cache.remember((tokens.key, "apart"), known.shape[1], (sums[:, -1].clone(),))
    return e + weight * (sums / num.clamp(min=1)).to(e.dtype)


def _diagonal(config, tokens: Tokens, wx: Tensor, we: Tensor, e: Tensor) -> Tensor:
    """A(e) = w mean_x + (e - w mean_e) sqrt(v_x' / v_e'), channel by channel."""
    if tokens.causal:
        mean_x, var_x = prefix_moments(tokens, wx, "stream")
        mean_e, var_e = prefix_moments(tokens, we, "branch")
    else:
        mean_x, var_x = whole_moments(tokens, wx)
        mean_e, var_e = whole_moments(tokens, we)
    weight = trust(config, counts(tokens)[..., None], e.dtype)
    common = (1 - weight) * (var_x + var_e) / 2 + EPS
    ratio = ((weight * var_x + common) / (weight * var_e + common)).sqrt()
    return weight * mean_x + (e - weight * mean_e) * ratio


_MAPS = {"cholesky": cholesky_map, "bures": bures_map}


def _full(config, tokens: Tokens, wx: Tensor, we: Tensor, e: Tensor) -> Tensor:
    """A(e) = w mean_x + (e - w mean_e) M with whole covariances."""
    wide = wide_dtype(e.device)
    if not tokens.causal:
        affine = _affine(config, *_sums(wx.to(wide), we.to(wide), tokens.counted))
        return _apply(affine, e)
    x, b = tokens.history("stream", wx), tokens.history("branch", we)
    if tokens.real is None:
        return _chunked(config, x, b, tokens.counted, e, tokens)
    # Rows start at different positions, and chunks count from a row's own first token.
    rows = []
    for row, real in enumerate(tokens.real):
        new = real[tokens.past :]
        counted = tokens.counted[row : row + 1, real]
        mapped = _chunked(
            config, x[row : row + 1, real], b[row : row + 1, real], counted,
            e[row : row + 1, new], None,
        )  # fmt: skip
        place = new.nonzero()[:, 0]
        rows.append(e[row].index_copy(0, place, mapped[0]))
    return torch.stack(rows)


def _chunked(
    config, x: Tensor, b: Tensor, counted: Tensor, e: Tensor, tokens: Tokens | None
) -> Tensor:
    """Map e [B, T, D], the last T of the S tokens x and b, by the chunks completed before each.

    `tokens` remembers sums and map in its cache, if it has one.
    """
    wide, size = wide_dtype(e.device), config.chunk_size
    total, first = x.shape[1], x.shape[1] - e.shape[1]
    chunk, sums = 0, None
    affine: Affine | None = None
    cache, key = (tokens.cache, (tokens.key, "chunks")) if tokens is not None else (None, None)
    if cache is not None and first >= size:
        known = cache.recall(key, first // size * size)
        if known is not None:
            chunk, sums, affine = first // size, known[:5], (known[5], known[6], known[7])
    pieces = []
    while chunk * size < total:
        begin, end = chunk * size, min((chunk + 1) * size, total)
        if end > first:
            piece = e[:, max(begin - first, 0) : end - first]
            if sums is not None and affine is None:
                affine = _affine(config, *sums)
            pieces.append(piece if affine is None else _apply(affine, piece))
        if end - begin == size:
            here = _sums(x[:, begin:end].to(wide), b[:, begin:end].to(wide), counted[:, begin:end])
            sums = here if sums is None else tuple(s + h for s, h in zip(sums, here, strict=True))
            affine = None
            if cache is not None and (chunk + 2) * size > total:
                affine = _affine(config, *sums)
                cache.remember(key, end, (*sums, *affine))
        chunk += 1
    return torch.cat(pieces, dim=1) if pieces else e


def _sums(x: Tensor, e: Tensor, counted: Tensor) -> tuple[Tensor, ...]:
    """Number [B], sums [B, D] and outer products [B, D, D] of both, 0 where not counted."""
    num = counted.sum(-1).to(x.dtype).expand(x.shape[0])
    mask = counted[..., None]
    x, e = x * mask, e * mask
    return num, x.sum(1), e.sum(1), x.mT @ x, e.mT @ e


def _affine(config, num, sum_x, sum_e, outer_x, outer_e) -> Affine:
    """(w mean_x, w mean_e, M) with covariances shrunk to one multiple of the identity."""
    weight, n = trust(config, num, num.dtype)[:, None], num.clamp(min=1)[:, None]
    mean_x, mean_e = sum_x / n, sum_e / n
    cov_x = outer_x / n[..., None] - mean_x[:, :, None] * mean_x[:, None, :]
    cov_e = outer_e / n[..., None] - mean_e[:, :, None] * mean_e[:, None, :]
    width = mean_x.shape[-1]
    trace = (cov_x + cov_e).diagonal(dim1=-2, dim2=-1).sum(-1) / (2 * width)
    # the floor keeps sums of fewer tokens than channels definite even without shrinkage
    level = ((1 - weight[:, 0]) * trace + 1e-9 * trace + EPS)[:, None, None]
    common = level * torch.eye(width, dtype=num.dtype, device=num.device)
    shrunk = [weight[..., None] * cov + common for cov in (cov_x, cov_e)]
    return weight * mean_x, weight * mean_e, _MAPS[config.aligner](*shrunk)


def _apply(affine: Affine, e: Tensor) -> Tensor:
    mean_x, mean_e, matrix = (part.to(e.dtype) for part in affine)
    return mean_x[:, None] + (e - mean_e[:, None]) @ matrix


def _sinkhorn(config, tokens: Tokens, wx: Tensor, we: Tensor, e: Tensor) -> Tensor:
    """A(e_i) = e_i + w (sum_j P_ij x_j / sum_j P_ij - e_i), P the entropic transport plan between
    the counted tokens of e and x; others stay as they are."""
    mask = tokens.counted.expand(e.shape[:2])
    num = mask.sum(-1, keepdim=True).clamp(min=1)
    cost = (we.square().sum(-1)[:, :, None] + wx.square().sum(-1)[:, None, :]
            - 2 * we @ wx.mT).clamp(min=0)  # fmt: skip
    pairs = mask[:, :, None] & mask[:, None, :]
    scale = (cost * pairs).sum((1, 2), keepdim=True) / num[..., None] ** 2
    logits = -cost / (config.sinkhorn_epsilon * scale.clamp(min=EPS))
    # finite, so that no row is empty: an excluded token's mass is e^-1e4 = 0
    logits = logits.masked_fill(~pairs, -1e4)
    log_mass = torch.where(mask, -num.to(e.dtype).log(), -1e4)
    left = right = torch.zeros_like(log_mass)
    for _ in range(config.sinkhorn_steps):
        right = log_mass - torch.logsumexp(logits + left[:, :, None], dim=1)
        left = log_mass - torch.logsumexp(logits + right[:, None, :], dim=2)
    plan = torch.softmax(logits + right[:, None, :], dim=2)
    weight = trust(config, num, e.dtype)[..., None]
    return torch.where(mask[..., None], e + weight * (plan @ wx - e), e)


_ALIGNERS = {"mean": _mean, "diagonal": _diagonal, "cholesky": _full, "bures": _full,
             "sinkhorn": _sinkhorn}  # fmt: skip
