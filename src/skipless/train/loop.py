"""The training loop, in the order things happen.

Step s sees batch s, a pure function of (seed, s), and its random numbers are seeded by (seed, s,
rank), so a resumed run has nothing to restore but weights and optimiser state and continues bit for
bit. Order within a step: learning rate, forward and backward, check that all is finite, clip,
update, log, save, and only then measure (a failing measurement costs no training). Loss is the mean
over the tokens of the global batch, whatever the split into processes and accumulation steps.

Read by training.py, which finds directory, text and processes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from skipless.config import RunConfig
from skipless.data import PreparedData, open_batches, open_loader
from skipless.errors import first_line
from skipless.log import say
from skipless.model import Transformer, initialize
from skipless.optim import build_optimizer, schedule
from skipless.probes import gradient_norms
from skipless.quant.training import train_quantized
from skipless.rundir import CHECKPOINTS, FINAL_PROBE, METRICS, RESULT, WEIGHTS, RunDir
from skipless.train import checkpoint
from skipless.train.checkpoint import Position
from skipless.train.diagnose import all_finite, refuse_non_finite
from skipless.train.distributed import (
    World,
    average_gradients,
    clip,
    drop_compiled,
    parallelise,
)
from skipless.train.load import note_text, save_weights
from skipless.train.measure import (
    Batch,
    bits_per_byte,
    held_out_loss,
    num_labels,
    peak_memory_bytes,
    probe_origin,
    probe_row,
    step_numbers,
    trace,
)
from skipless.train.memory import keep_freed_memory
from skipless.train.metrics import Metrics, Silent, reporter
from skipless.train.precision import autocast
from skipless.train.result import TrainResult, drop_stale
from skipless.train.signals import Interrupted, Stop


class Loop:
    """One run in memory: model, optimiser, batches, and how far it is.

    Making it touches no file; `resume` takes up what the directory holds, then comes `run`.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        data: PreparedData,
        world: World,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.config, self.directory, self.data, self.world = config, run, data, world
        self.settings, self.num_steps = config.train, config.train.num_steps
        self.on_step = on_step or (lambda info: None)
        self.report: Callable[[dict[str, Any]], None] = lambda info: None
        self.stop = Stop(alone=not world.is_distributed)
        if world.device.type == "cpu":
            keep_freed_memory()

        # Batches: training ones by step, cut into micro-batches; fixed held-out ones.
        share = self.settings.batch_size // world.size
        self.micro_batch_size = min(self.settings.micro_batch_size or share, share)
        self.loader = open_loader(config, data, world.rank, world.size)

        self.model = self.build_model()
        self.rounding = train_quantized(self.model, self.settings.quantize)
        if self.settings.compile:
            self.try_compiled()
        self.optimizer = build_optimizer(config.optim, self.model)

    def resume(self) -> None:
        """Take up what a former attempt left, if it did; the directory must be claimed."""
        run, world = self.directory, self.world
        restored = checkpoint.restore(run / CHECKPOINTS, self.model, self.optimizer, world)
        self.at = restored or Position()
        self.saved_step = self.at.step if restored else None
        if restored is None:
            world.first(lambda: drop_stale(run, None))
        world.first(lambda: note_text(run, self.data))
        self.metrics = Metrics(run, self.config, self.at.step) if world.is_main else Silent()
        self.started = time.perf_counter() - self.at.seconds

    def build_model(self) -> Transformer:
        """The model as this process trains it, with its initial weights.

        Several processes shard it on the meta device first, so none ever holds all of it.
        """
        settings, world = self.settings, self.world
        if not world.is_distributed:
            model = Transformer(self.config.model, seed=settings.seed).to(world.device)
            parallelise(model, settings, world)
            return model.train()
        with torch.device("meta"):
            model = Transformer(self.config.model)
        parallelise(model, settings, world)
        model.to_empty(device=world.device)
        initialize(model, settings.seed)
        return model.train()

    def try_compiled(self) -> None:
        """One forward and backward pass; if it does not compile, say so and train eagerly."""
        try:
            self.backward(self.loader.batch(0))
        except Exception as error:  # dynamo, inductor and missing compilers raise their own kinds
            drop_compiled(self.model)
            if self.world.is_main:
                reason = first_line(error)
                say(f"train.compile: torch.compile failed, training uncompiled ({reason})")
        self.model.zero_grad(set_to_none=True)

    def run(self) -> TrainResult:
        """From the step `resume` found to the end."""
        reports = reporter(self.config, self.at.step) if self.world.is_main else _no_report()
        with self.stop, reports as self.report:
            try:
                self.measure()  # what a resumed run still owes at its first step
                while self.at.step < self.num_steps:
                    self.advance()
                    if _due(self.at.step, self.settings.checkpoint_every, self.num_steps):
                        self.save()
                    self.measure()
                self.save()
                return self.finish()
            except Interrupted:
                self.optimizer.zero_grad(set_to_none=True)
                self.save()
                raise KeyboardInterrupt from None
            finally:
                self.metrics.close()

    def advance(self) -> None:
        """One optimiser step and its row of metrics.jsonl."""
        step, world = self.at.step, self.world
        began = time.perf_counter()
        if any(world.total(self.stop.requested)):  # all processes stop at the same step
            raise Interrupted
        seed = (self.settings.seed * 1_000_003 + step) * world.size + world.rank
        torch.manual_seed(seed % 2**63)
        self.model.set_training_progress(step / self.num_steps)
        self.rounding.at(step / self.num_steps)
        multiplier = self.set_rates(step)

        batch = self.loader.batch(step)
        loss = self.backward(batch)
        traced = trace(self.model, step + 1, every=self.config.probe.trace_every)
        norm = clip(self.model.parameters(), self.settings.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            numbers = {"loss": loss, "gradient norm": norm}
            self.stop_non_finite(step + 1, self.micro_batches(batch), numbers)

        # On measured steps, keep what only this moment can tell.
        measured = _due(step + 1, self.config.probe.every, self.num_steps)
        pending = {"gradient_norms": gradient_norms(self.model)} if measured else {}
        self.optimizer.collect_metrics = measured
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if measured:
            self.require_finite_weights(step + 1)
            pending |= step_numbers(world.gather(self.optimizer.metrics()))

        now = time.perf_counter()
        num_tokens = self.settings.batch_size * self.settings.sequence_length
        row = {
            "step": step + 1, "tokens": self.at.tokens + num_tokens, "loss": loss,
            "lr": self.config.optim.lr * multiplier, "grad_norm": norm,
            "seconds": now - self.started,
        }  # fmt: skip
        self.metrics.row(row | traced)
        self.at = Position(
            step=step + 1, tokens=row["tokens"], seconds=row["seconds"], pending=pending
        )
        if world.is_main:
            speed = num_tokens / (now - began)
            info = {**row, "num_steps": self.num_steps, "tokens_per_second": speed}
            self.report(info)
            self.on_step(info)

    def set_rates(self, step: int) -> float:
        """Set every group's learning rate for `step` (0-based); returns the multiplier."""
        s = self.settings
        multiplier = schedule(
            s.schedule, step, self.num_steps, s.warmup_steps, s.min_lr_ratio, s.decay_fraction
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * multiplier
        return multiplier

    def backward(self, batch: Batch) -> float:
        """Gradient of the mean loss over the global batch; returns that loss.

        Each micro-batch's mean counts by its share of the labels. The factor world.size undoes
        the average over ranks that FSDP takes.
        """
        world = self.world
        (total,) = world.total(int((batch[1] != -100).sum()))
        parts = self.micro_batches(batch)
        mean = torch.zeros((), device=world.device)
        for number, (ids, labels) in enumerate(parts, start=1):
            if number > 1:
                self.stop.check()
            if world.is_distributed:
                average_gradients(self.model, number == len(parts))
            weight = int((labels != -100).sum()) / total
            with autocast(self.settings.precision, world.device):
                loss = self.model(ids.to(world.device), labels=labels.to(world.device)).loss
            (loss * (weight * world.size)).backward()
            if weight:  # the mean over no labels is NaN, and its gradient 0
                mean += loss.detach() * weight
        return world.total(float(mean))[0]

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """The rows of this process's share, `micro_batch_size` at a time."""
        ids, labels = (part.split(self.micro_batch_size) for part in batch)
        return list(zip(ids, labels, strict=True))

    def save(self) -> None:
        """A checkpoint of the present step, unless it is already there."""
        if self.saved_step != self.at.step:
            self.require_finite_weights(self.at.step)
            checkpoint.save(
                self.directory / CHECKPOINTS, self.at, self.model, self.optimizer, self.world,
                keep=self.settings.keep_checkpoints,
            )  # fmt: skip
            self.saved_step = self.at.step

    def measure(self) -> None:
        """Held-out loss and probes, where they are due at the present step."""
        step = self.at.step
        self.model.set_training_progress(step / self.num_steps)
        if step < self.num_steps and _due(step, self.settings.eval_every):
            self.metrics.row({"step": step, **self.held_out()})
        if _due(step, self.config.probe.every):
            self.metrics.probe(self.probe(self.config.probe.num_tokens))

    def finish(self) -> TrainResult:
        """Last measurements, then the weights, then the file that says "finished"."""
        held_out = self.held_out()
        final = self.config.probe.final_tokens
        row = self.probe(final) | probe_origin(self.config.probe, self.at.step, final)
        self.metrics.row({"step": self.at.step, **held_out})
        run = self.directory
        self.world.first(lambda: drop_stale(run, self.at.step))
        self.world.first(lambda: run.write_json(FINAL_PROBE, row))
        save_weights(run / WEIGHTS, self.model, self.world)
        rows = self.world.first(lambda: run.read_jsonl(METRICS))
        result = TrainResult(
            path=str(run.path), step=self.at.step, tokens=self.at.tokens,
            loss=[math.nan, *(r["loss"] for r in rows if r.get("loss") is not None)][-1],
            seconds=time.perf_counter() - self.started,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
            held_out_tokens=num_labels(self.held_out_batches(self.settings.eval_tokens)),
            **held_out,
        )  # fmt: skip
        self.world.first(lambda: run.write_json(RESULT, asdict(result)))
        return result

    def held_out_batches(self, num_tokens: int) -> list[Batch]:
        return open_batches(self.config, self.data, "held_out", self.micro_batch_size, num_tokens)

    def held_out(self) -> dict[str, float]:
        """The held-out loss in nats and in bits per byte, as metrics.jsonl names them."""
        batches = self.held_out_batches(self.settings.eval_tokens)
        nats = held_out_loss(
            self.model, batches, self.world,
            precision=self.settings.precision, check=self.stop.check,
        )  # fmt: skip
        if not math.isfinite(nats):
            self.stop_non_finite(self.at.step, batches, {"held-out loss": nats})
        found: dict[str, float] = {"held_out_loss": nats}
        if self.config.model.num_labels is None:  # nats a label are no measure of bytes
            found["held_out_bits_per_byte"] = bits_per_byte(nats, self.data.bytes_per_token)
        return found

    def probe(self, num_tokens: int) -> dict[str, Any]:
        """One row of probes.jsonl at the present step."""
        return probe_row(
            self.model, self.held_out_batches(num_tokens), self.config.probe, self.world,
            step=self.at.step, precision=self.settings.precision, pending=self.at.pending,
            check=self.stop.check,
        )  # fmt: skip

    def require_finite_weights(self, step: int) -> None:
        """Stop with a diagnosis if `step` left a weight that is no number; such are never saved."""
        if not all_finite(self.model, self.world):
            self.stop_non_finite(step, [], {})

    def stop_non_finite(self, step: int, batches: list[Batch], numbers: dict[str, float]) -> None:
        """Raise UserError with a diagnosis; gradients of the step must still be there."""
        refuse_non_finite(
            self.directory, self.model, batches, self.world, step=step, numbers=numbers,
            precision=self.settings.precision,
        )  # fmt: skip


def _due(step: int, every: int, last: int | None = None) -> bool:
    """True at every multiple of `every` (0: never) and at `last`."""
    return step > 0 and (step == last or (every > 0 and step % every == 0))


@contextlib.contextmanager
def _no_report() -> Iterator[Callable[[dict[str, Any]], None]]:
    yield lambda info: None
