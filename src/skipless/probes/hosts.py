"""`ProbeLog` as a callback of Lightning and of transformers' Trainer.

    trainer = lightning.Trainer(callbacks=[lightning_callback("runs/theirs", every=50)])
    trainer = Trainer(model, args, callbacks=[trainer_callback("runs/theirs", every=50)], ...)

Both libraries are imported when a callback is made. The files and `options` are those of
`ProbeLog` (callbacks.py).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

from skipless.errors import UserError, suggestion
from skipless.packages import not_installed
from skipless.probes.callbacks import ProbeLog

LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")


def lightning_callback(out: str | Path, *, module: str | None = None, **options: Any) -> Any:
    """A `Callback` of lightning or pytorch_lightning, whichever is installed, that logs to `out`.

    `module` names the attribute of the LightningModule that is measured, "" the LightningModule
    itself; None takes its attribute `model` if that is a module. Statistics by pass (attention,
    padding) need the module whose forward is called. A step is an optimiser step: accumulated
    batches are measured together. The training loss and the first learning rate go to
    metrics.jsonl, and scalars to the trainer's own logger as well.
    """
    base: Any = _lightning()

    class LightningProbe(base):
        probe_log: ProbeLog | None = None
        step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.probe_log = ProbeLog(_part(pl_module, module), out, **options)
            self.step = 0

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if self.probe_log is not None and trainer.global_step + 1 != self.step:
                self.step = trainer.global_step + 1
                self.probe_log.begin(self.step)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if self.probe_log is not None:
                self.probe_log.gradients()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if self.probe_log is None or trainer.global_step < self.step:
                return  # more batches of this step follow
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            rates = [g["lr"] for o in trainer.optimizers for g in o.param_groups]
            self.probe_log.end(self.step, {"loss": loss, "lr": rates[0] if rates else None})

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._close()

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._close()

        def _close(self) -> None:
            if self.probe_log is not None:
                self.probe_log.close()
                self.probe_log = None

    return LightningProbe()


def trainer_callback(out: str | Path, **options: Any) -> Any:
    """A `TrainerCallback` of transformers that logs to `out`.

    Gradient norms are those that the optimiser gets, after clipping. metrics.jsonl has a line where
    the Trainer logs (`logging_steps`): loss, lr, grad_norm. The Trainer tells nobody when a
    training raises; call the callback's `close()` then, or its hooks stay until the next begins.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise not_installed("transformers", instead="use ProbeLog itself") from None

    class TrainerProbe(TrainerCallback):
        log: ProbeLog | None = None

        def on_train_begin(self, args, state, control, **kwargs):
            self.close()
            self.log = ProbeLog(kwargs["model"], out, **options)

        def on_step_begin(self, args, state, control, **kwargs):
            if self.log is not None:
                self.log.begin(state.global_step + 1)

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if self.log is not None:
                self.log.gradients()

        def on_step_end(self, args, state, control, **kwargs):
            if self.log is not None:
                self.log.end(state.global_step, {})

        def on_log(self, args, state, control, logs=None, **kwargs):
            names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm",
                     "eval_loss": "held_out_loss"}  # fmt: skip
            values = {names[k]: v for k, v in (logs or {}).items() if k in names}
            if self.log is not None and values:
                self.log.metrics(state.global_step, values)

        def on_train_end(self, args, state, control, **kwargs):
            self.close()

        def close(self) -> None:
            """Remove hooks and close writers; nothing to do between trainings."""
            if self.log is not None:
                self.log.close()
                self.log = None

    return TrainerProbe()


def _lightning() -> Any:
    """The class Callback of the package in use; a trainer takes only those of its own package."""
    packages = sorted(LIGHTNINGS, key=lambda name: name not in sys.modules)
    for package in packages:
        with contextlib.suppress(ImportError):
            return importlib.import_module(package).Callback
    raise not_installed("pytorch_lightning", why="nor is lightning", instead="use ProbeLog itself")


def _part(owner: nn.Module, name: str | None) -> nn.Module:
    if name is None:
        inner = getattr(owner, "model", None)
        return inner if isinstance(inner, nn.Module) else owner
    try:
        return owner.get_submodule(name)
    except AttributeError:
        near = suggestion(name, [n for n, _ in owner.named_modules() if n], noun="module")
        raise UserError(f"{type(owner).__name__} has no module {name!r}; {near}") from None
