"""Codes of activations for integer layers (Q1, Q4): one C++ call where it applies, else torch.

The same codes as `fake.integer_codes`. Read by `quant.integers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skipless.quant.activations import ActivationQuantizer
from skipless.quant.fake import quantizer
from skipless.quant.integers.hardware import fastest_kernel


def site_codes(
    site: ActivationQuantizer, x: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int16 codes [tokens, in] of a site's tensor and their scale, float32 [1] or [tokens].

    `rows` is `x` as such a matrix where a token is not its last dimension (convolutions). Layers
    that read the same tensor share them, and a tensor that is on the grid already (a quantised
    stream) keeps its codes, as in the simulation.
    """
    state, key = site.state, site.key
    rows = x.reshape(-1, x.shape[-1]) if rows is None else rows
    known = state.remembered_codes(x, key)
    if known is not None and known[0].shape == rows.shape:  # a convolution's are laid out otherwise
        return known
    if (scale := state.remembered_scale(x, key)) is not None and bool(torch.isfinite(scale).all()):
        grid = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        step = scale.reshape(-1, 1) if scale.dim() else scale
        limit = 2 ** (site.bits - 1) - 1  # a bfloat16 value may lie past the last grid point
        codes = (grid / step).round_().clamp_(-limit, limit).to(torch.int16)
        scale = scale.reshape(-1).float()
    else:
        codes, scale = activation_codes(
            rows, site.bits, granularity=site.granularity, clip=site.clip
        )
    if isinstance(site.clip, str):
        state.note_scale(site.site.name, scale)
    state.remember_codes(x, key, codes, scale)
    return codes, scale


def activation_codes(
    x: Tensor, bits: int, *, granularity: str = "tensor", clip: Any = "absmax"
) -> tuple[Tensor, Tensor]:
    """Codes of `x` [..., in] as int16 [tokens, in], scale float32 [1] or [tokens] (Q1).

    The same codes as `fake.integer_codes`, symmetric. Where that raises, the scale is NaN: for the
    whole tensor or the token under a dynamic range, for tokens with NaN under a given one; so that
    what comes of it is NaN and never a plausible number.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    if rows.numel() == 0:
        ones = torch.ones(1, dtype=torch.float32, device=x.device)
        return torch.zeros(rows.shape, dtype=torch.int16, device=x.device), ones
    given = not isinstance(clip, str)
    clip = clip.to(x.device) if isinstance(clip, Tensor) else clip
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    if rows.dtype == torch.float32 and rows.device.type == "cpu" and (given or clip == "absmax"):
        fused = _fused_codes(rows, bits, granularity == "token", clip if given else None)
        if fused is not None:
            return fused
    step, bounds, _ = quantizer(rows, bits, True, clip, granularity == "tensor")
    codes = (rows / step).round_().clamp_(*bounds)
    scale = torch.where(torch.isfinite(step), step, torch.nan).float().reshape(-1)
    if given:
        scale = torch.where(rows.isnan().any(-1), torch.nan, scale)
    return codes.nan_to_num_(0.0).to(torch.int16), scale


def _fused_codes(
    rows: Tensor, bits: int, per_token: bool, clip: Any
) -> tuple[Tensor, Tensor] | None:
    """`activation_codes` in one C++ call, or None without a kernel."""
    kernel = fastest_kernel()
    if kernel is None:
        return None
    step = -1.0 if clip is None else given_step(rows, bits, clip)
    return kernel.quantize(rows, bits, per_token, step)


def given_step(rows: Tensor, bits: int, clip: Any) -> float:
    """The scale of a given range, for rows like these."""
    return float(quantizer(rows[:1], bits, True, clip, True)[0])
