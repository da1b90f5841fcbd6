"""Universal interpolation inside transformers' layers: which tokens are real, which came before.

A join alone sees neither padding nor cache; the layer around it is handed both. So the class of a
layer with universal connections becomes a subclass of the same name whose `forward` reads its own
arguments first: the mask's diagonal says which new tokens are real (a token sees itself unless it
is padding), the cache carries a `LayerState`. What was read is in force while that one layer runs,
and a layer that gradient checkpointing runs again is handed the same arguments again. Nothing is
kept between calls except in the cache, and threads do not see each other.

`torch.compile` leaves such a layer as it is: the number of tokens kept changes at every step.
Read by `patching.py`. Legend: B batch, T new tokens, S past plus new tokens, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.model.context import ForwardContext
from skipless.model.interpolation import Universal
from skipless.surgery.rewriting import Joins, joining_class, joins_of, namesake, reducer
from skipless.surgery.stacks import Layer, original
from skipless.surgery.universal.states import LayerState, state_of

__all__ = ["PatchedUniversal", "carries", "carry", "place", "uncarry"]

_PLACE = "_skipless_place"
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What transformers calls the cache, by version and layer."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a layer stands."""

    stack: str
    index: int
    cache_index: int | None
    """The number under which the layer's attention keeps keys and values; None without one."""
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Running:
    """What the layer that runs was handed."""

    context: ForwardContext
    num_new: int


_RUNNING: ContextVar[Running | None] = ContextVar("skipless_running_layer", default=None)


class PatchedUniversal(Universal):
    """Universal interpolation with the context of the layer that is running."""

    def forward(self, stream, branch, context):
        running = _RUNNING.get()
        if running is None:
            raise UserError(
                "a universal connection was called outside its layer, where padding and cache are "
                "unknown; call the model or the layer"
            )
        if stream.ndim != 3 or stream.shape[1] != running.num_new:
            raise UserError(
                f"a universal connection got {list(stream.shape)} where the layer has "
                f"{running.num_new} tokens; set config.chunk_size_feed_forward to 0"
            )
        return super().forward(stream, branch, running.context)


def place(layer: Layer, stack: str, causal: bool) -> None:
    """Note where a layer with universal connections stands; `carry` makes it act on that."""
    numbers = [getattr(module, "layer_idx", None) for module in layer.module.modules()]
    numbers = [number for number in numbers if isinstance(number, int)]
    setattr(layer.module, _PLACE, Place(
        stack=stack, index=layer.index, causal=causal,
        cache_index=numbers[0] if numbers else None,
    ))  # fmt: skip


def carry(module: nn.Module) -> None:
    """Let a layer that has a place tell its connections what it is handed; others stay."""
    if carries(module):
        module.__class__ = carrying_class(original(type(module)), joins_of(module))


def carries(module: nn.Module) -> bool:
    """Whether the layer has a place."""
    return _PLACE in vars(module)


def uncarry(module: nn.Module) -> None:
    """Undo `place` and `carry`."""
    delattr(module, _PLACE)
    module.__class__ = original(type(module))


@cache
def carrying_class(base: type, joins: Joins) -> type:
    """A subclass of `joining_class(base, joins)`, or of `base` where the additions lie deeper."""
    parent = joining_class(base, joins) if joins else base
    names = tuple(inspect.signature(inspect.unwrap(base.forward)).parameters)[1:]
    run: Any = torch.compiler.disable(_run)

    @wraps(parent.forward)
    def forward(self, *args, **kwargs):
        return run(self, parent.forward, names, args, kwargs)

    return namesake(parent, {
        "forward": forward, "_skipless_base": base, "_skipless_joins": joins,
        "__reduce_ex__": reducer(carrying_class, base, joins),
    })  # fmt: skip


def _run(
    layer: nn.Module, inner: Callable, names: tuple[str, ...], args: tuple, kwargs: dict
) -> Any:
    given = dict(zip(names, args, strict=False)) | kwargs
    running = _read(getattr(layer, _PLACE), given)
    token = _RUNNING.set(running)
    try:
        out = inner(layer, *args, **kwargs)
    finally:
        _RUNNING.reset(token)
    state = running.context.cache
    if isinstance(state, LayerState):
        state.tokens = running.context.tokens
        state.advance(running.num_new)
    return out


def _read(place: Place, given: dict[str, Any]) -> Running:
    """The context of one layer from the arguments it is `given`."""
    stream = given["hidden_states"] if "hidden_states" in given else next(iter(given.values()))
    rows, num_new = stream.shape[:2]
    kept_in = next((given[name] for name in _CACHES if given.get(name) is not None), None)
    if not place.causal and (kept_in is not None or given.get("is_causal") is True):
        raise UserError(
            f"{place.stack} was patched as layers that see all tokens, and this call is causal; "
            "unpatch(model) and patch it in the configuration that it runs in"
        )
    state, past, offset, device = None, 0, 0, stream.device
    if kept_in is not None:
        if place.cache_index is None:
            raise UserError(
                f"layer {place.index} of {place.stack} has no attention that counts the cache's "
                "tokens; call the model with use_cache=False"
            )
        state = state_of(kept_in, (place.stack, place.index), place.cache_index, rows)
        past = state.length
        offset = past - kept_in.get_mask_sizes(num_new, place.cache_index)[1]
    new = _real(given.get("attention_mask"), (rows, num_new), offset, place)
    tokens = new if state is None else state.real(new, (rows, num_new), device)
    context = ForwardContext(is_causal=place.causal, cache=state, tokens=tokens)
    if tokens is not None:
        itself = torch.ones(num_new, past + num_new, dtype=torch.bool, device=device).tril(past)
        seen = tokens[:, None, None, :]
        # padding sees itself, since a softmax over nothing is NaN
        context.visible = (seen & itself if place.causal else seen) | itself.triu(past)
    return Running(context=context, num_new=num_new)


def _real(mask: Any, shape: tuple[int, int], offset: int, place: Place) -> Tensor | None:
    """Which of the new tokens are no padding, bool [B, T]; None when all are known to be real.

    `mask` is what the layer's attention gets: None, bool or additive [B, 1, T, S'] (S' may be a
    window or a static cache), or bool [B, S] (flash attention). `offset` is the column of the first
    new token.
    """
    if mask is None:
        return None
    num_new = shape[1]
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise UserError(
            f"universal interpolation cannot read padding off a {type(mask).__name__} as attention "
            "mask; load the model with attn_implementation='sdpa' or 'eager'"
        )
    if mask.ndim == 2:
        real = mask[:, -num_new:].bool()
    else:
        floating = mask.is_floating_point()
        seen = mask > torch.finfo(mask.dtype).min / 2 if floating else mask.bool()
        seen = seen[:, 0]
        real = seen.diagonal(offset, -2, -1)[:, :num_new]
        if not place.causal and not torch.equal(seen.diagonal(offset + 1, -2, -1), real[:, 1:]):
            raise UserError(
                f"{place.stack} was patched as layers that see all tokens, and its attention mask "
                "hides later ones; choose another connection for it"
            )
        before = seen[:, 1:].diagonal(offset, -2, -1)
        pairs = place.causal and num_new > 1  # of one new token nothing has to be waited for
        if pairs and bool((real[:, :-1] & real[:, 1:] & ~before).any()):
            raise UserError(
                "the attention mask hides a token from its successor (packed documents, attention "
                "in chunks), and universal interpolation has one past for a row; give every "
                "document a row of its own"
            )
    if real.shape[-1] != num_new:
        raise UserError(
            f"the attention mask has shape {list(mask.shape)}, which leaves {real.shape[-1]} of "
            f"the {num_new} tokens without a column; universal interpolation cannot tell padding"
        )
    real = real.expand(*shape)
    # a mask of ones would only switch slower paths on; elsewhere the test would wait for the device
    return None if real.device.type == "cpu" and bool(real.all()) else real
