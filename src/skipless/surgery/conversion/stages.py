"""The work of a conversion, stage by stage; `converting.py` makes it ready and finishes it.

A stage takes the next skips: their a of y = a x + f goes from 1 to 0, at once behind a fit
(`fitting.py`) or step by step, while the model learns. Then the held-out loss is measured. It
depends on nothing but the weights it starts from and the numbers of its batches: the optimiser
starts anew, dropout is off, step s sees batch s. So it can be resumed bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.log import progress as bar
from skipless.log import say
from skipless.model import Connection
from skipless.optim import schedule
from skipless.rundir import CHECKPOINTS
from skipless.surgery.batches import count
from skipless.surgery.conversion.distilling import Yardstick, distillation_loss
from skipless.surgery.conversion.fitting import fit_branch
from skipless.surgery.conversion.keeping import PARTIAL, Keeper, Progress
from skipless.surgery.conversion.results import Conversion, Stage
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.surgery.conversion.skips import set_joins
from skipless.surgery.stacks import find_stacks
from skipless.train.signals import Stop

__all__ = ["Stages"]

MIN_LR_RATIO = 0.1
BETAS = (0.9, 0.98)


class Stages:
    """All stages of one conversion. `state` is the record, which `run` goes on with and returns.

    `joins`: the connections whose skip may go. `ends`: the linear layer that ends each branch.
    `batch`: batch number -> batch. `learnable`: the parameters that training may move.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        config: ConversionConfig,
        state: Conversion,
        *,
        joins: Mapping[str, Connection],
        ends: Mapping[str, nn.Module],
        batch: Callable[[int], Any],
        measure: Yardstick,
        learnable: list[nn.Parameter],
        keeper: Keeper,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.model, self.teacher, self.config, self.state = model, teacher, config, state
        self.joins, self.ends, self.batch, self.measure = joins, ends, batch, measure
        self.learnable, self.keeper = learnable, keeper
        self.on_step = on_step or (lambda info: None)
        size = config.skips_per_stage or len(joins)
        self.plan = [state.order[i : i + size] for i in range(0, len(state.order), size)]
        self.progress = Progress()

    def run(self) -> Conversion:
        """All stages from where the folder stands. Raises KeyboardInterrupt after Ctrl-C."""
        with Stop() as self.stop:
            stage, done = self._resume()
            self.started = time.perf_counter() - self.progress.seconds
            while stage < len(self.plan) and self._one(stage, done):
                stage, done = stage + 1, 0
        return self.state

    def _one(self, stage: int, done: int) -> bool:
        """A stage from its step `done` on. False when it was beyond the budget and was undone."""
        names, config = self.plan[stage], self.config
        steps, first = config.steps_per_stage, stage * (config.steps_per_stage + config.fit_batches)
        if done == 0:
            self.progress.norms, self.progress.fitted = [], None
            self.optimizer = self._optimizer(stage)
            self._save(CHECKPOINTS, stage, 0)
            self.before = self._snapshot()
            self._pause()
            if config.start == "fit":
                self._fit(names, first)
        if config.start == "fit" or not steps:
            set_joins(self.joins, names, 1.0)
        with bar(f"stage {stage + 1} of {len(self.plan)}", steps, unit="steps") as advance:
            advance(done)
            for step in range(done, steps):
                if self.stop.requested:
                    self._save(PARTIAL, stage, step)
                self._pause()
                if config.start == "anneal":
                    set_joins(self.joins, names, (step + 1) / steps)
                loss, norm = self._step(stage, step, first + config.fit_batches + step)
                advance(note=f"loss {loss:.3f}")
                self.on_step({"stage": stage, "step": step, "loss": loss, "grad_norm": norm})
        set_joins(self.joins, names, 1.0)
        return self._measure(names)

    def _fit(self, names: Sequence[str], first: int) -> None:
        """Fit the branches of `names` in the order of computation, each before the next."""
        batches = [self.batch(first + i) for i in range(self.config.fit_batches)]
        for name in self.joins:
            self._pause()
            if name in names:
                left = fit_branch(self.model, self.joins[name], self.ends[name], batches)
                say(f"{name}: fitted, {left:.1%} of the stream's square is lost")
                set_joins(self.joins, [name], 1.0)
        self.progress.tokens += sum(map(count, batches))
        if self.config.steps_per_stage:  # else it is the stage's own loss
            self.progress.fitted = self.measure(self.model)[0]

    def _pause(self) -> None:
        """Leave if a stop was asked for; what no checkpoint holds is done again."""
        if self.stop.requested:
            raise KeyboardInterrupt(self.keeper.how_to_go_on())

    def _step(self, stage: int, step: int, number: int) -> tuple[float, float]:
        """One optimiser step on batch `number`; returns loss and gradient norm."""
        config, batch = self.config, self.batch(number)
        rate = config.lr * schedule(
            "linear", step, config.steps_per_stage,
            min(config.warmup_steps, config.steps_per_stage - 1), MIN_LR_RATIO,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = distillation_loss(
            self.model, self.teacher, batch, distill=config.distill,
            cross_entropy=config.cross_entropy, temperature=config.temperature,
            precision=config.precision,
        )  # fmt: skip
        loss.backward()
        value = float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self._trained(), config.max_grad_norm))
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise UserError(
                f"stage {stage + 1}, step {step + 1}: the loss is {value:.4g} and the "
                f"gradient norm {norm:.4g}; nothing of this stage was kept, so start anew in "
                "another folder with a lower lr"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.norms.append(norm)
        self.progress.tokens += count(batch)
        return value, norm

    def _measure(self, names: Sequence[str]) -> bool:
        """Loss and distance after a stage, as a row; undoes a stage beyond the budget."""
        loss, increase, error, kl = self.measure.with_divergence(self.model)
        budget, state, progress = self.config.loss_budget, self.state, self._timed()
        kept = budget is None or increase <= budget
        gone = state.already + len(state.converted) + len(names)
        row = Stage(
            removed=tuple(names), num_removed=gone, share=gone / state.total, loss=loss,
            increase=increase, standard_error=error, kl=kl, fitted=progress.fitted,
            grad_norm=statistics.median(progress.norms) if progress.norms else None,
            tokens=progress.tokens, seconds=progress.seconds, kept=kept,
        )  # fmt: skip
        self.state = dataclasses.replace(state, stages=(*state.stages, row))
        self.keeper.write(self.state)
        say(
            f"{gone} of {state.total} skips gone: loss {loss:.4f} ({increase:+.4f}), KL {kl:.4f}, "
            f"{row.tokens:,} tokens, {row.seconds:.0f} s"
        )
        if not kept:
            with torch.no_grad():
                for parameter, value in zip(self.learnable, self.before, strict=True):
                    parameter.copy_(value)
            set_joins(self.joins, names, 0.0)
            say(f"beyond the budget of {budget:+.4f}: this stage is undone, and the last")
        return kept

    def _resume(self) -> tuple[int, int]:
        """Take up the newest checkpoint; returns the stage to go on with and its finished steps."""
        at = self.keeper.newest(CHECKPOINTS)
        if at is None:  # rows without a checkpoint are of work that is gone
            self.state = dataclasses.replace(self.state, stages=())
            return 0, 0
        self._restore(CHECKPOINTS, at[0])
        within = self.keeper.newest(PARTIAL)
        if within is not None:
            self.before = self._snapshot()
            self._restore(PARTIAL, within[0])
        stage, done = within or at
        set_joins(self.joins, self.state.converted, 1.0)
        say(f"resuming at stage {stage + 1} of {len(self.plan)}, step {done}")
        return stage, done

    def _restore(self, name: str, stage: int) -> None:
        self.optimizer = self._optimizer(stage)
        self.progress, rows = self.keeper.restore(name, self.model, self.optimizer)
        self.state = dataclasses.replace(self.state, stages=rows)

    def _save(self, name: str, stage: int, done: int) -> None:
        self.keeper.save(
            name, stage, done, self.model, self.optimizer, self._timed(), self.state.stages
        )

    def _timed(self) -> Progress:
        """The progress, its time up to now."""
        self.progress.seconds = time.perf_counter() - self.started
        return self.progress

    def _snapshot(self) -> list[Tensor]:
        """Copies of the learnable parameters, if a stage may have to be undone."""
        if self.config.loss_budget is None:
            return []
        return [parameter.detach().clone() for parameter in self.learnable]

    def _optimizer(self, stage: int) -> torch.optim.Optimizer:
        chosen = {id(p) for p in self._layers(stage)} if self.config.train == "layers" else None
        for parameter in self.learnable:
            parameter.requires_grad_(chosen is None or id(parameter) in chosen)
        return torch.optim.AdamW(self._trained(), lr=self.config.lr, betas=BETAS, weight_decay=0.0)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.learnable if p.requires_grad]

    def _layers(self, stage: int) -> list[nn.Parameter]:
        """Parameters of the layers that lost a skip up to `stage`."""
        gone = {name for names in self.plan[: stage + 1] for name in names}
        return [
            parameter
            for stack in find_stacks(self.model) for layer in stack.layers
            if any(layer.path(join) in gone for join in layer.joins)
            for parameter in layer.module.parameters()
        ]  # fmt: skip
