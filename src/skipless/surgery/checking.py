"""Models that surgery cannot work on, refused: wrapped ones, and weights that are no numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from skipless.errors import UserError

__all__ = ["check_finite", "check_model"]


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

    `where` is what the sentence calls the model: its folder, or else its class.
    """
    for name, parameter in model.named_parameters():
        broken = ~parameter.detach().isfinite()
        if bool(broken.any()):
            index, *more = broken.nonzero().tolist()
            value = float(parameter.detach()[tuple(index)])
            others = f" (and {len(more):,} more)" if more else ""
            raise UserError(
                f"{where or type(model).__name__} computes no numbers: {name} is {value} at "
                f"{index}{others}; get its weights anew"
            )
