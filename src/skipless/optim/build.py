"""From the settings of a run (`OptimizerRecipe`) to one optimiser for a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from skipless.config import OptimizerRecipe
from skipless.optim import checking
from skipless.optim.base import RoleOptimizer
from skipless.optim.muon import Muon
from skipless.optim.whitening import KLSOAP, SOAP, KLShampoo, Shampoo, Whitening


class AdamW(RoleOptimizer):
    """AdamW for everything, with the same routing: gains apart, decay by role."""

    without = ("block_size", "split")

    def __init__(
        self,
        params: nn.Module | Iterable,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **routing: Any,
    ) -> None:
        checking.no_unknown(self, routing)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **routing)


WHITENING: dict[str, type[Whitening]] = {
    cls.algorithm: cls for cls in (KLShampoo, KLSOAP, SOAP, Shampoo)
}


def build_optimizer(recipe: OptimizerRecipe, model: nn.Module) -> RoleOptimizer:
    """One torch optimiser for every parameter of `model`, as `recipe` says.

    Each group has `base_lr`; a loop sets `group["lr"] = group["base_lr"] * schedule(...)`.
    """
    routing: dict[str, Any] = {
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "adamw_lr": recipe.adamw_lr,
        "adamw_betas": recipe.adamw_betas,
        "gain_lr": recipe.gain_lr,
        "gain_weight_decay": recipe.gain_weight_decay,
    }
    if recipe.name == "adamw":
        # Hidden matrices take lr and betas; embedding, head and gains the adamw_ ones.
        return AdamW(model, betas=recipe.betas, eps=recipe.eps, **routing)
    if recipe.name == "muon":
        return Muon(
            model, momentum=recipe.momentum, scale=recipe.muon_scale, steps=recipe.muon_steps,
            **routing,
        )  # fmt: skip
    return WHITENING[recipe.name](
        model, betas=recipe.betas, eps=recipe.eps, block_size=recipe.block_size,
        refresh_every=recipe.refresh_every, root=recipe.root, update_rms=recipe.update_rms,
        reference=recipe.reference, start=recipe.start if recipe.name == "kl_shampoo" else None,
        **routing,
    )  # fmt: skip
