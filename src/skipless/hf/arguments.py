"""What a call of a model in `modeling.py` is given, checked; and what it shows on request.

Legend: B batch, T new tokens, S past plus new tokens, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.model import Attention

__all__ = [
    "as_asked",
    "attention_probabilities",
    "check_classes",
    "check_given",
    "check_labels",
    "check_length",
    "check_padding_side",
    "checked_positions",
]

PACKED = (
    "packed documents (position_ids that start anew within a row, cu_seq_lens) are not computed "
    "apart here; give every document a row of its own, padded"
)


def check_given(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Any,
    more: dict,
    width: int,
) -> None:
    """Raise UserError unless there is one input, of `width` channels where it is embedded, and a
    mask that says which tokens are padding."""
    if (input_ids is None) == (inputs_embeds is None):
        number = "neither" if input_ids is None else "both"
        raise UserError(f"{number} of input_ids and inputs_embeds were given; pass one of them")
    if inputs_embeds is not None and (inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != width):
        raise UserError(
            f"inputs_embeds have shape {list(inputs_embeds.shape)}; [batch, tokens, {width}] was "
            "expected (hidden_size)"
        )
    if input_ids is not None and (input_ids.ndim != 2 or input_ids.is_floating_point()):
        raise UserError(
            f"input_ids are {_kind(input_ids)} of shape {list(input_ids.shape)}; whole numbers "
            "[batch, tokens] were expected"
        )
    if attention_mask is not None and getattr(attention_mask, "ndim", None) != 2:
        found = getattr(attention_mask, "shape", None)
        what = type(attention_mask).__name__ if found is None else f"of shape {list(found)}"
        raise UserError(
            f"attention_mask is {what}; [batch, past plus new tokens] was expected, 1 on tokens "
            "and 0 on padding: what each token sees is the model's own affair"
        )
    if (
        isinstance(attention_mask, Tensor)
        and attention_mask.dtype != torch.bool
        and attention_mask.device.type == "cpu"
        and bool(((attention_mask != 0) & (attention_mask != 1)).any())
    ):
        # One that is added to scores, 0 on tokens, would be read the wrong way round; one that
        # numbers the documents of a row would not keep them apart.
        raise UserError(
            f"attention_mask holds {float(attention_mask.min()):g} to "
            f"{float(attention_mask.max()):g}; 1 on tokens and 0 on padding was expected"
        )
    if any(name.startswith("cu_seq_lens") for name in more):
        raise UserError(PACKED)


def check_labels(labels: Tensor, shape: tuple[int, ...], size: int) -> None:
    """Raise UserError unless `labels` [B, T] are ids below `size`, or -100 (seen on the CPU)."""
    if tuple(labels.shape) != shape or labels.is_floating_point():
        raise UserError(
            f"labels are {_kind(labels)} of shape {list(labels.shape)}; whole numbers of shape "
            f"{list(shape)} were expected, the input_ids themselves or -100"
        )
    if labels.device.type == "cpu":
        _check_range(labels, size)


def check_padding_side(mask: Any) -> None:
    """Raise UserError for prompts [B, T] that end in padding: what is written would follow it."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.numel():
        padded = int((mask[:, -1] == 0).sum())
        if padded:
            raise UserError(
                f"{padded} of {mask.shape[0]} prompts end in padding, and generate goes on after "
                "the last place; pad on the left (tokenizer.padding_side = 'left')"
            )


def check_length(prompt: int, total: int, limit: int) -> None:
    """Raise UserError where prompts of `prompt` tokens cannot grow to `total`.

    The last token of a text is not read again, so that a text may be one longer than `limit`.
    """
    if prompt > limit:
        raise UserError(
            f"the prompt has {prompt} tokens, padding included, and the model takes {limit} "
            "(config.max_position_embeddings); shorten it"
        )
    if total > limit + 1:
        raise UserError(
            f"a prompt of {prompt} tokens and {total - prompt} new ones exceed the {limit} that "
            "the model takes (config.max_position_embeddings); set max_new_tokens to "
            f"{limit + 1 - prompt} at most"
        )


def check_classes(labels: Tensor, rows: int, config: Any) -> None:
    """Raise UserError unless `labels` are one for each of `rows`, of the kind that
    `config.problem_type` says: classes are whole numbers [B] (seen on the CPU)."""
    if not labels.ndim or labels.shape[0] != rows:
        raise UserError(
            f"labels have shape {list(labels.shape)}; one for each of the {rows} texts was expected"
        )
    whole = not labels.is_floating_point()
    kind = config.problem_type or (
        "single_label_classification" if whole and config.num_labels > 1 else ""
    )
    if kind != "single_label_classification":
        return
    if not whole:
        raise UserError(
            f"labels are {_kind(labels)} and config.problem_type is {kind!r}; whole numbers were "
            "expected, or another problem_type"
        )
    if labels.device.type == "cpu":
        _check_range(labels, config.num_labels)


def _check_range(labels: Tensor, size: int) -> None:
    wrong = labels[((labels < 0) & (labels != -100)) | (labels >= size)]
    if len(wrong):
        raise UserError(
            f"labels hold {int(wrong[0])}; 0 to {size - 1} were expected, or -100 where nothing is "
            "asked"
        )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def checked_positions(
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    given: Tensor,
    past: int,
    settings: ModelConfig,
) -> Tensor | None:
    """Positions [B, T] to use in place of the model's count, or None where they are the same.

    Raises UserError for positions beyond the context and for packed documents.
    """
    if position_ids is None or settings.position == "none":
        return None
    rows, num_new = given.shape
    if position_ids.ndim != 2 or position_ids.shape[1] != num_new:
        raise UserError(
            f"position_ids have shape {list(position_ids.shape)}; {[rows, num_new]} was expected"
        )
    position_ids = position_ids.expand(rows, -1)
    real = torch.ones_like(position_ids, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask[:, -num_new:].to(position_ids.device).bool()
    placed = torch.where(real, position_ids, 0)
    if num_new > 1:
        steps = position_ids[:, 1:] - position_ids[:, :-1]
        if bool(((steps != 1) & real[:, 1:] & real[:, :-1]).any()):
            raise UserError(PACKED)
    # other devices would wait for the answers; their own kernels notice
    if position_ids.device.type == "cpu":
        low, high = int(placed.min()), int(placed.max())
        if low < 0 or high >= settings.max_position_embeddings:
            raise UserError(
                f"position_ids hold {low if low < 0 else high}; 0 to "
                f"{settings.max_position_embeddings - 1} were expected (max_position_embeddings)"
            )
        if attention_mask is None and torch.equal(
            placed, torch.arange(past, past + num_new).expand(rows, -1)
        ):
            return None
    return placed


@contextmanager
def attention_probabilities(model: nn.Module, wanted: bool) -> Iterator[list[Tensor] | None]:
    """Collect the probabilities [B, H, T, S] of every attention layer while the block runs.

    Yields None where they are not `wanted`. Raises UserError unless attention is eager: no other
    form makes them.
    """
    if not wanted:
        yield None
        return
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    name = getattr(model.config, "_attn_implementation", None)
    if name != "eager":
        raise UserError(
            f"attn_implementation {name!r} makes no attention probabilities to output; call "
            "model.set_attn_implementation('eager') or leave output_attentions out"
        )
    shown: list[Tensor] = []

    def show(module: nn.Module, args: Any, out: Any) -> None:
        shown.append(out)

    handles = [layer.probabilities.register_forward_hook(show) for layer in layers]
    try:
        yield shown
    finally:
        for handle in handles:
            handle.remove()


def as_asked(out: Any, config: Any, return_dict: bool | None) -> Any:
    """The output object, or its values as a tuple."""
    asked = config.return_dict if return_dict is None else return_dict
    return out if asked else out.to_tuple()
