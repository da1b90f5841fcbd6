"""What surgery cannot work on, refused: wrapped models, weights that are no numbers, batches that
are not of the model's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from skipless.errors import UserError
from skipless.model import Transformer

__all__ = ["check_batch", "check_batches", "check_finite", "check_model"]


def check_model(model: Any, *, wrapped: bool = False) -> None:
    """Raise UserError unless `model` is a module and, if not `wrapped`, none that a wrapper holds
    whose gradients or files would leave the connections out."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__} and no loaded model; load one first, such as "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    for module in () if wrapped else model.modules():
        name = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UserError(
                f"{name} reduces the gradients of the parameters it was made with, which gains put "
                "in later are not; patch the model, then wrap it"
            )
        if hasattr(type(module), "get_base_model") and hasattr(module, "peft_config"):
            raise UserError(
                f"{name} saves adapters and would leave the connections out; patch the model "
                "before get_peft_model (modules_to_save keeps trained gains in the adapter)"
            )


def check_finite(model: nn.Module, where: str = "") -> None:
    """Raise UserError for a weight that is NaN or infinite, with its name and its first such entry.

    torch's attention on a CPU can turn a NaN in a query into plain numbers, so that logits do not
    always show one. `where` is what the sentence calls the model: its folder, or else its class.
    Weights on the device meta are passed over.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        broken = ~parameter.detach().isfinite()
        if bool(broken.any()):
            index, *more = broken.nonzero().tolist()
            value = float(parameter.detach()[tuple(index)])
            others = f" (and {len(more):,} more)" if more else ""
            raise UserError(
                f"{where or type(model).__name__} computes no numbers: {name} is {value} at "
                f"{index}{others}; get its weights anew"
            )


def check_batches(model: nn.Module, batches: Iterable[Any]) -> None:
    """Raise UserError for the first batch that `check_batch` refuses."""
    for index, batch in enumerate(batches):
        check_batch(model, batch, f"batch {index}")


def check_batch(model: nn.Module, batch: Any, name: str = "the batch") -> None:
    """Raise UserError for token ids that are none of the model's, which torch tells of from deep
    inside, and on CUDA not where it happened: of another shape or dtype than [B, T] whole numbers,
    none at all, or beyond the vocabulary. A model that reads no token ids takes anything."""
    embedding = _embedding(model)
    if embedding is None:
        return
    ids = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    ids = ids.get("input_ids") if isinstance(ids, Mapping) else ids
    if not isinstance(ids, Tensor):
        return  # `skipless.evaluate.loss` says what a batch is
    if ids.is_floating_point() or ids.ndim != 2 or not ids.numel():
        raise UserError(
            f"{name} holds {str(ids.dtype).removeprefix('torch.')} of shape {list(ids.shape)}; "
            "token ids, at least one, as whole numbers [batch, tokens] were expected"
        )
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= len(embedding):
        raise UserError(
            f"{name} holds the token {low if low < 0 else high} and {type(model).__name__} knows 0 "
            f"to {len(embedding) - 1}; cut the text with the tokenizer of this model"
        )


def _embedding(model: Any) -> Tensor | None:
    """The token embedding [V, D] of a model whose first input are token ids."""
    if isinstance(model, Transformer):
        return model.embed_tokens.weight
    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    try:
        return getattr(model.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):  # two towers
        return None
