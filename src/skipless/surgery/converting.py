"""`convert`: a trained residual model towards fewer skips, in stages, taught by the original.

    found = convert(model, batches, held_out, ConversionConfig(sites=("mlp",)), folder="converted")

Every chosen join becomes y = a x + f with a = 1 (C7), which changes no logit. A stage takes the
next skips: their a goes to 0, at once behind a least-squares fit (`fitting.py`) or step by step,
while the model learns to give the original's distribution, KL(original || model). Then the held-out
loss is measured. At the end the joins are of kind none and the model is an ordinary patched one.

A stage depends on nothing but the weights it starts from and the numbers of its batches: the
optimiser starts anew, dropout is off, step s sees batch s. So with a folder the work continues
after Ctrl-C, bit for bit where the arithmetic repeats itself.

    folder/convert.json       what was measured (conversion.py), written after every stage
    folder/checkpoint/        the weights a stage starts from; gone at the end
    folder/partial/           weights and optimiser within a stage that was interrupted
    folder/skipless-*, config.json     the model, for `load`
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.log import progress, say
from skipless.optim import schedule
from skipless.quant import evaluation_mode
from skipless.rundir import CHECKPOINTS, RunDir, remove
from skipless.surgery.adapters import find_stacks
from skipless.surgery.conversion import RECORD_FILE, Conversion, ConversionConfig, Stage
from skipless.surgery.converting_inputs import (
    Batches,
    by_step,
    check_folder,
    check_model,
    count,
)
from skipless.surgery.distilling import Loss, Yardstick, distillation_loss
from skipless.surgery.fitting import fit_branch
from skipless.surgery.records import connections
from skipless.surgery.saving import save_pretrained
from skipless.surgery.skips import (
    close_joins,
    count_skips,
    open_joins,
    ordered,
    removal_curve,
    set_joins,
)
from skipless.surgery.tracing import trace
from skipless.train import checkpoint
from skipless.train.checkpoint import Position
from skipless.train.distributed import World
from skipless.train.signals import Stop

__all__ = ["convert"]

PARTIAL = "partial"
MIN_LR_RATIO = 0.1
BETAS = (0.9, 0.98)


def convert(
    model: nn.Module,
    batches: Batches | Sequence[Any],
    held_out: Any,
    config: ConversionConfig | None = None,
    *,
    loss: Loss | None = None,
    teacher: nn.Module | None = None,
    folder: str | Path | None = None,
    source: dict[str, Any] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Conversion:
    """Take skips out of `model`, in place, stage by stage; returns what was measured.

    `batches`: a list, gone through round and round, or a Loader; each as `skipless.evaluate.loss`
    takes it, for models without text whatever their forward takes. `held_out`: a list of such.
    `loss(model, held_out)` measures what is no causal language model. `teacher`: the original, by
    default a frozen copy of `model`, which doubles the memory of the weights; the same weights with
    a = 1 cannot stand in for it, because they learn. `folder` keeps record and checkpoints, resumes
    from them, and receives the model. `source` goes into the record. `on_step` gets stage, step,
    loss and grad_norm of every step.

    The model is in eval mode throughout and afterwards. When no stage stayed within the budget it
    is the unpatched original. Raises UserError for a model that is patched at these sites already,
    16-bit or frozen weights, a model that needs `loss`, a folder with other settings, a loss that
    is not finite; KeyboardInterrupt after Ctrl-C, everything saved. After these the model is left
    half-way.
    """
    config = config or ConversionConfig()
    check_model(model, loss, folder)
    source = source or {}
    with ExitStack() as stack:
        run = RunDir(folder) if folder is not None else None
        if run is not None:
            check_folder(run.path, config, source)
            stack.enter_context(run.lock())
            check_folder(run.path, config, source)  # another process may have been here meanwhile
        work = _Work(model, batches, held_out, config, loss, teacher, run, source, on_step)
        return work.run()


class _Work:
    """One conversion in memory. Making it opens the joins; `run` does the stages."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches | Sequence[Any],
        held_out: Any,
        config: ConversionConfig,
        loss: Loss | None,
        teacher: nn.Module | None,
        run: RunDir | None,
        source: dict[str, Any],
        on_step: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.model, self.config, self.directory = model.eval(), config, run
        self.on_step = on_step or (lambda info: None)
        self.batch = by_step(batches)
        self.teacher = (copy.deepcopy(model) if teacher is None else teacher).eval()
        if teacher is None:
            self.teacher.requires_grad_(False)
        total, already = count_skips(model)
        self.learnable = [p for p in model.parameters() if p.requires_grad]
        self.joins = open_joins(model, config)
        try:
            held_out = list(as_list(held_out))
            self.measure = Yardstick(self.teacher, held_out, loss, config.precision)
            self.state = self._begin(total, already, source)
        except BaseException:
            close_joins(model, self.joins, ())
            raise
        size = config.skips_per_stage or len(self.joins)
        order = self.state.order
        self.plan = [order[i : i + size] for i in range(0, len(order), size)]
        self.seconds, self.tokens = 0.0, 0
        self.norms: list[float] = []
        self.fitted: float | None = None

    def _begin(self, total: int, already: int, source: dict[str, Any]) -> Conversion:
        """The baseline, the order and the control; the latter two from the folder if it has them.

        All that can be wrong with settings, model or text is found here, before anything is kept.
        """
        config = self.config
        loss, _, _ = self.measure(self.model)
        shown = [self.batch(i) for i in range(config.fit_batches)]
        with evaluation_mode(self.model):
            self.ends = trace(self.model, self.joins, shown[0]).outputs
        lacking = [name for name in self.joins if name not in self.ends]
        if lacking and config.start == "fit":
            raise UserError(
                f"the branch of {lacking[0]} does not end in a linear layer, so nothing can be "
                "fitted there; choose start 'anneal'"
            )
        former = self.directory.read_json(RECORD_FILE) if self.directory else None
        if former is not None:
            return Conversion.from_dict(former)
        order = ordered(self.model, self.joins, config.order, shown, self.measure)
        size = config.skips_per_stage or len(order)
        counts = [*range(size, len(order), size), len(order)]
        state = Conversion(
            settings=config, model=type(self.model).__name__, order=tuple(order), total=total,
            already=already, loss=loss, standard_error=self.measure.standard_error,
            num_tokens=self.measure.num_tokens, source=source,
            untrained=removal_curve(
                self.model, self.joins, order, counts, self.measure, total, already
            ),
        )  # fmt: skip
        self._write(state)
        return state

    def _write(self, state: Conversion) -> None:
        self.state = state
        if self.directory is not None:
            self.directory.write_json(RECORD_FILE, state.to_dict())

    def run(self) -> Conversion:
        """All stages from where the folder stands."""
        with Stop() as self.stop:
            stage, done = self._resume()
            self.started = time.perf_counter() - self.seconds
            while stage < len(self.plan) and self._one(stage, done):
                stage, done = stage + 1, 0
        return self._finish()

    def _one(self, stage: int, done: int) -> bool:
        """A stage from its step `done` on. False when it was beyond the budget and was undone."""
        names, config = self.plan[stage], self.config
        steps, first = config.steps_per_stage, stage * (config.steps_per_stage + config.fit_batches)
        if done == 0:
            self.norms, self.fitted = [], None
            self.optimizer = self._optimizer(stage)
            self._save(CHECKPOINTS, stage, 0)
            before = self._snapshot()
            self._pause()
            if config.start == "fit":
                self._fit(names, first)
        else:
            before = self.before
        if config.start == "fit" or not steps:
            set_joins(self.joins, names, 1.0)
        title = f"stage {stage + 1} of {len(self.plan)}"
        with progress(title, steps, unit="steps") as advance:
            advance(done)
            for step in range(done, steps):
                if self.stop.requested:
                    self._save(PARTIAL, stage, step)
                    raise KeyboardInterrupt(self._how_to_go_on())
                if config.start == "anneal":
                    set_joins(self.joins, names, (step + 1) / steps)
                loss, norm = self._step(stage, step, first + config.fit_batches + step)
                advance(note=f"loss {loss:.3f}")
                self.on_step({"stage": stage, "step": step, "loss": loss, "grad_norm": norm})
        return self._measure(names, before)

    def _fit(self, names: Sequence[str], first: int) -> None:
        """Fit the branches of `names` in the order of computation, each before the next."""
        batches = [self.batch(first + i) for i in range(self.config.fit_batches)]
        for name in self.joins:
            self._pause()
            if name in names:
                left = fit_branch(self.model, self.joins[name], self.ends[name], batches)
                say(f"{name}: fitted, {left:.1%} of the stream's square is lost")
                set_joins(self.joins, [name], 1.0)
        self.tokens += sum(map(count, batches))
        if self.config.steps_per_stage:  # else it is the stage's own loss
            self.fitted = self.measure(self.model)[0]

    def _pause(self) -> None:
        """Leave if a stop was asked for; the stage will begin anew from its checkpoint."""
        if self.stop.requested:
            raise KeyboardInterrupt(self._how_to_go_on())

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
                "another folder with a lower lr or more warmup_steps"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.norms.append(norm)
        self.tokens += count(batch)
        return value, norm

    def _measure(self, names: Sequence[str], before: list[Tensor]) -> bool:
        """Loss and distance after a stage, as a row; undoes a stage beyond the budget."""
        set_joins(self.joins, names, 1.0)
        loss, increase, error, kl = self.measure.with_divergence(self.model)
        budget, state = self.config.loss_budget, self.state
        kept = budget is None or increase <= budget
        gone = state.already + len(state.converted) + len(names)
        row = Stage(
            removed=tuple(names), num_removed=gone, share=gone / state.total, loss=loss,
            increase=increase, standard_error=error, kl=kl, fitted=self.fitted,
            grad_norm=statistics.median(self.norms) if self.norms else None, tokens=self.tokens,
            seconds=time.perf_counter() - self.started, kept=kept,
        )  # fmt: skip
        self.seconds = row.seconds
        self._write(dataclasses.replace(state, stages=(*state.stages, row)))
        say(
            f"{gone} of {state.total} skips gone: loss {loss:.4f} ({increase:+.4f}), KL {kl:.4f}, "
            f"{self.tokens:,} tokens, {row.seconds:.0f} s"
        )
        if not kept:
            with torch.no_grad():
                for parameter, value in zip(self.learnable, before, strict=True):
                    parameter.copy_(value)
            set_joins(self.joins, names, 0.0)
            say(f"beyond the budget of {budget:+.4f}: this stage is undone, and the last")
        return kept

    def _finish(self) -> Conversion:
        """Kind none where skips went, the plain addition elsewhere; then the folder."""
        for parameter in self.learnable:
            parameter.requires_grad_(True)
        close_joins(self.model, self.joins, self.state.converted)
        if self.directory is not None and connections(self.model):
            save_pretrained(self.model, self.directory.path)
        self._write(dataclasses.replace(self.state, finished=True))
        if self.directory is not None:
            for name in (CHECKPOINTS, PARTIAL):
                remove(self.directory / name)
        return self.state

    def _resume(self) -> tuple[int, int]:
        """Take up the newest checkpoint; returns the stage to go on with and its finished steps."""
        if self.directory is None or not checkpoint.found(self.directory / CHECKPOINTS):
            self.state = dataclasses.replace(self.state, stages=())
            return 0, 0
        stage, done = self._restore(CHECKPOINTS)
        if checkpoint.found(self.directory / PARTIAL):
            self.before = self._snapshot()
            stage, done = self._restore(PARTIAL)
        set_joins(self.joins, self.state.converted, 1.0)
        say(f"resuming at stage {stage + 1} of {len(self.plan)}, step {done}")
        return stage, done

    def _restore(self, name: str) -> tuple[int, int]:
        assert self.directory is not None, "called with a folder"
        newest = checkpoint.found(self.directory / name)[0]
        stage, done = divmod(int(newest.name.rpartition("-")[2]), self.config.steps_per_stage + 1)
        self.optimizer = self._optimizer(stage)
        at = checkpoint.restore(newest.parent, self.model, self.optimizer, World())
        assert at is not None, "a checkpoint was found"
        self.tokens, self.seconds = at.tokens, at.seconds
        self.norms, self.fitted = at.pending["norms"], at.pending["fitted"]
        rows = tuple(Stage.from_dict(row) for row in at.pending["stages"])
        self.state = dataclasses.replace(self.state, stages=rows)
        return stage, done

    def _save(self, name: str, stage: int, done: int) -> None:
        """A checkpoint of `done` steps of a stage; one of a stage's start outdates the others."""
        if self.directory is None:
            return
        at = Position(
            step=stage * (self.config.steps_per_stage + 1) + done, tokens=self.tokens,
            seconds=time.perf_counter() - self.started, pending={
                "norms": self.norms, "fitted": self.fitted,
                "stages": [row.to_dict() for row in self.state.stages],
            },
        )  # fmt: skip
        checkpoint.save(self.directory / name, at, self.model, self.optimizer, World(), keep=1)
        if name == CHECKPOINTS:
            remove(self.directory / PARTIAL)

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

    def _how_to_go_on(self) -> str:
        if self.directory is None:
            return "the conversion had no folder, so nothing was kept"
        return f"all is in {self.directory.path}; the same command goes on from there"
