"""Continuing a text: greedy or sampled, with or without the key/value cache.

Texts longer than the model's context slide: when the window is full it drops its oldest half, so
that the cache is rebuilt once per half window rather than at every token. The rule depends on the
length only, so cached and uncached decoding see the same windows. `generate` is a method of
`Transformer`.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.ranges import is_whole


def window_start(length: int, limit: int) -> int:
    """Where the visible window starts in a text of `length` tokens; it holds at most `limit`."""
    if length <= limit:
        return 0
    step = max(limit // 2, 1)
    return -(-(length - limit) // step) * step


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    top_p: float | None = None,
) -> Tensor:
    """Token ids [B] drawn from logits [B, V]; temperature 0 takes the largest.

    `top_k` keeps the k largest, `top_p` then the likeliest whose probabilities reach it. Raises
    UserError where the largest logit is not finite, or one is NaN.
    """
    if temperature == 0:
        largest, token = logits.max(dim=-1)
        _check_finite(largest)
        return token
    logits = logits.float().cpu()  # on the CPU: the same draws on every device
    _check_finite(logits.amax(dim=-1))
    if temperature < 1e-3:  # dividing by next to nothing must not make infinite logits
        logits = logits.double() - logits.amax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p  # what stands before reaches it
        probabilities = torch.zeros_like(probabilities).scatter(
            -1, places, ordered.masked_fill(beyond, 0.0)
        )
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _check_finite(largest: Tensor) -> None:
    """NaN anywhere makes the largest NaN."""
    if not torch.isfinite(largest).all():
        raise UserError("the model's logits are not finite; check its weights")


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """Raise UserError for settings out of range."""
    if not _is_whole(seed, 0) or seed >= 2**64:
        raise UserError(f"seed is {seed!r}; a whole number from 0 to 2^64 - 1 was expected")
    if not _is_whole(max_new_tokens, 0):
        raise UserError(f"max_new_tokens is {max_new_tokens!r}; a whole number >= 0 was expected")
    if not (isinstance(temperature, Real) and 0 <= temperature < math.inf):
        raise UserError(
            f"temperature is {temperature!r}; a finite number >= 0 was expected, 0 for the "
            "likeliest token each time"
        )
    if top_k is not None and not _is_whole(top_k, 1):
        raise UserError(f"top_k is {top_k!r}; a whole number >= 1 was expected, or none for all")
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        raise UserError(f"top_p is {top_p!r}; a share of at most 1 and above 0 was expected")


def _is_whole(value: object, low: int) -> bool:
    return is_whole(value) and value >= low


def _check_ids(input_ids: object, vocab_size: int) -> None:
    """Raise UserError unless these are token ids [batch, time] with at least one token a row."""
    if not isinstance(input_ids, Tensor):
        raise UserError(
            f"input_ids is {type(input_ids).__name__}; a tensor of token ids [batch, time] was "
            "expected, such as torch.tensor([ids])"
        )
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        advice = "; add the batch with ids[None]" if input_ids.dim() == 1 else ""
        raise UserError(
            f"input_ids has shape {tuple(input_ids.shape)}; [batch, time] with at least one token "
            f"was expected{advice}"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise UserError(
            f"input_ids is {input_ids.dtype}; int64 was expected, so use input_ids.long()"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"input_ids holds {low if low < 0 else high}; ids from 0 to {vocab_size - 1} were "
            "expected: is it this model's tokenizer?"
        )


@torch.no_grad()
def generate(
    model,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    top_p: float | None = None,
) -> Tensor:
    """Continue `input_ids` int64 [B, T]; returns [B, T + max_new_tokens].

    `temperature` 0 is greedy; `top_k` keeps the k likeliest tokens, `top_p` the likeliest that
    have this share of the probability; the same `seed` gives the same text. The model is put in
    evaluation mode meanwhile. Raises UserError for a classification or bidirectional model, for
    settings out of range, and for logits that are not finite.
    """
    config = model.config
    if config.num_labels is not None or not config.causal:
        raise UserError(
            "only a causal language model generates text; this one has "
            + ("a classification head" if config.num_labels is not None else "causal=False")
        )
    _check_ids(input_ids, config.vocab_size)
    check_sampling(max_new_tokens, temperature, top_k, top_p, seed)
    generator = torch.Generator().manual_seed(seed)
    limit, was_training = config.max_position_embeddings, model.training
    # On an accelerator a token that is only looked up there is not waited for.
    waits = temperature != 0 or input_ids.device.type == "cpu"
    seen_largest: list[Tensor] = []
    model.eval()
    try:
        cache, start = None, 0
        for _ in range(max_new_tokens):
            wanted = window_start(input_ids.shape[1], limit)
            if cache is None or wanted != start:
                cache, start = model.new_cache() if use_cache else None, wanted
            seen = cache.length if cache is not None else 0
            logits = model(input_ids[:, start + seen :], cache=cache, logits_to_keep=1).logits
            if waits:
                token = sample(logits[:, -1], temperature, top_k, generator, top_p)
                token = token.to(input_ids.device)
            else:
                largest, token = logits[:, -1].max(dim=-1)
                seen_largest.append(largest)
            input_ids = torch.cat((input_ids, token[:, None]), dim=1)
        if seen_largest:
            _check_finite(torch.stack(seen_largest))
    finally:
        model.train(was_training)
    return input_ids
