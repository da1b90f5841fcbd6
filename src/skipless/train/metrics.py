"""What the loop writes down: metrics.jsonl, and mirrors of it for those who use other viewers.

The file in the run directory is the record; TensorBoard (`tensorboard --logdir RUN`) and trackio
(`trackio show`) get the same numbers when `train.mirrors` names them. Read by loop.py.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from skipless.config import RunConfig
from skipless.errors import UserError
from skipless.log import progress, say
from skipless.probes.writers import open_writers
from skipless.rundir import METRICS, PROBES, RunDir

SECONDS_BETWEEN_LINES = 15.0


class Metrics:
    """Appends rows to the run directory and forwards their numbers to the mirrors.

    `step` is where the run starts: rows beyond it, left by an interrupted attempt, are removed,
    and of the rows at it only the training row stays; the loop measures again.
    """

    def __init__(self, run: RunDir, config: RunConfig, step: int) -> None:
        self.run = run
        run.truncate_jsonl(
            METRICS,
            lambda r: self._step(r, METRICS) < step or (r["step"] == step and "loss" in r),
        )
        run.truncate_jsonl(PROBES, lambda r: self._step(r, PROBES) < step)
        self.mirrors = open_writers(
            config.train.mirrors, run.path, after=step, config=config.to_dict(),
            setting="train.mirrors",
        )  # fmt: skip

    def _step(self, row: dict[str, Any], name: str) -> int:
        step = row.get("step")
        if not isinstance(step, int):
            raise UserError(
                f"a line of {self.run / name} has step {step!r}, which is no number of a step; "
                "delete that line"
            )
        return step

    def row(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        self.run.append(METRICS, values)
        numbers: dict[str, float] = {
            k: v for k, v in values.items() if k != "step" and isinstance(v, (int, float))
        }
        for mirror in self.mirrors:
            mirror.write(values["step"], numbers, {})

    def probe(self, values: dict[str, Any]) -> None:
        """One line of probes.jsonl; mirrors get the kurtosis of every site."""
        self.run.append(PROBES, values)
        if self.mirrors:
            numbers = {f"kurtosis/{row['site']}": row["kurtosis"] for row in values["sites"]}
            for mirror in self.mirrors:
                mirror.write(values["step"], numbers, {})

    def close(self) -> None:
        for mirror in self.mirrors:
            mirror.close()


class Silent:
    """Stands in for Metrics on all ranks but the first."""

    def row(self, values: dict[str, Any]) -> None:
        """Nothing: rank 0 writes."""

    def probe(self, values: dict[str, Any]) -> None:
        """Nothing: rank 0 writes."""

    def close(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def reporter(config: RunConfig, step: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Tell a person how far training is: a bar on a terminal, else a dense line now and then.

    Yields `report(info)`, to be called after every step; `step` is where the run starts.
    """
    num_steps = config.train.num_steps
    said = time.perf_counter()
    label = config.label or config.name
    if step:
        say(f"{label}: resuming at step {step} of {num_steps}")
    with progress(label, num_steps, unit="steps") as advance:
        advance(step)

        def report(info: dict[str, Any]) -> None:
            nonlocal said
            advance(1, note=f"loss {info['loss']:.3f}")
            now = time.perf_counter()
            is_due = info["step"] == num_steps or now - said > SECONDS_BETWEEN_LINES
            if is_due and not sys.stderr.isatty():
                said = now
                left = (num_steps - info["step"]) * info["seconds"] / info["step"]
                say(
                    f"step {info['step']}/{num_steps} loss {info['loss']:.4f} "
                    f"norm {info['grad_norm']:.2f} lr {info['lr']:.1e} "
                    f"{info['tokens_per_second']:.0f} tok/s {left:.0f} s left"
                )

        yield report
