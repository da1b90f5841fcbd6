"""transformers' Trainer with our optimisers, annealed connections and quantised training.

    trainer = Trainer(
        model, args, train_dataset=data,
        optimizer_cls_and_kwargs=trainer_optimizer(recipes.get("rf-small-muon").optim),
        callbacks=[TrainingProgress(), QuantizedTraining("W4A4 scope=block from=0.1 over=0.3")],
    )

Both callbacks are functions of the step alone, so that a resumed training goes on exactly. The
probe callback is `skipless.probes.hosts.trainer_callback`. Any model works: patched ones have
connections too, and quantised training needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from skipless.config import OptimizerRecipe
from skipless.errors import UserError
from skipless.model import Connection
from skipless.optim import build_optimizer
from skipless.quant import train_quantized
from skipless.scheme import TrainingPlan

__all__ = ["QuantizedTraining", "TrainingProgress", "trainer_optimizer"]


def trainer_optimizer(recipe: OptimizerRecipe) -> tuple[Callable[[], Any], dict[str, Any]]:
    """`recipe` as the Trainer's `optimizer_cls_and_kwargs`.

    The Trainer calls a factory with the whole model, so that every parameter gets its role; by
    itself it would decay gains. Learning rates are the recipe's, the schedule that of
    `TrainingArguments`, whose `learning_rate` and `weight_decay` are not used. Raises UserError for
    what is no recipe.
    """
    if not isinstance(recipe, OptimizerRecipe):
        raise UserError(
            f"trainer_optimizer takes an OptimizerRecipe, such as recipes.get(name).optim, and got "
            f"{recipe!r}"
        )

    def factory() -> Callable[..., Any]:
        return lambda model, **_: build_optimizer(recipe, model)

    return factory, {}


class TrainingProgress(TrainerCallback):
    """Tells connections the share of training done before every step, and 1 at the end (C7)."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Where the training, or a resumed one, starts."""
        if not _connections(kwargs["model"]):
            raise UserError(
                f"{type(kwargs['model']).__name__} has no skipless connection to tell the progress "
                "of training; leave TrainingProgress out, or patch the model first"
            )
        self._tell(kwargs["model"], state.global_step / state.max_steps)

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the forward passes of a step."""
        self._tell(kwargs["model"], state.global_step / state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        """Before evaluating and saving, which belong to the steps done."""
        self._tell(kwargs["model"], state.global_step / state.max_steps)

    @staticmethod
    def _tell(model: nn.Module, share: float) -> None:
        for connection in _connections(model):
            connection.set_training_progress(min(share, 1.0))


class QuantizedTraining(TrainerCallback):
    """Rounds weights and activations in the forward pass as `plan` says (Q3), straight through in
    the backward pass: "W4A4 scope=block from=0.1 over=0.3".

    What is trained, saved and resumed are the values before rounding. Where training ends the model
    is in full precision again, or with `finish` quantised as by `skipless.quant.quantize`. Raises
    UserError for a plan that cannot be read; for the model, as `train_quantized`. The Trainer tells
    nobody when a training raises: call `close()` then.
    """

    def __init__(self, plan: str | TrainingPlan, *, finish: bool = False) -> None:
        self.plan, self.ends_quantised = TrainingPlan.parse(plan), finish
        self.training: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Put the rounding in."""
        self.close()
        self.training = train_quantized(kwargs["model"], self.plan)
        self.training.at(min(state.global_step / state.max_steps, 1.0))

    def on_step_begin(self, args, state, control, **kwargs):
        """The width of this step."""
        if self.training is not None:
            self.training.at(min(state.global_step / state.max_steps, 1.0))

    def on_train_end(self, args, state, control, **kwargs):
        """Take the rounding out, or leave a quantised model."""
        training = self.training
        self.close()
        if training is not None and self.ends_quantised:
            training.finish()

    def close(self) -> None:
        """Take the rounding out; nothing to do between trainings."""
        if self.training is not None:
            self.training.remove()
            self.training = None


def _connections(model: nn.Module) -> list[Connection]:
    return [module for module in model.modules() if isinstance(module, Connection)]
