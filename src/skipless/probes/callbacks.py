"""Probes inside anybody's training: three lines in a plain loop, a Lightning or a Trainer callback.

    log = ProbeLog(model, "runs/theirs", every=50)                                    # 1
    for step, batch in enumerate(batches, start=1):
        with log.step(step) as row:                                                   # 2
            loss = model(batch).square().mean()
            loss.backward()
            row["loss"] = float(loss)                                                 # 3
        optimizer.step()
        optimizer.zero_grad()

Every `every`-th step the forward passes inside the block are measured as they are, without a pass
of their own; the other steps carry no hook. OUT/probes.jsonl gets rows of the form that our own
training writes, OUT/metrics.jsonl a line a step, and TensorBoard or trackio the same numbers with
histograms. `skipless doctor OUT` and `heatmap` read the files. Works on any nn.Module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.errors import UserError
from skipless.files import make_directory
from skipless.probes.gradients import gradient_norms
from skipless.probes.probe import Probe
from skipless.probes.writers import open_writers
from skipless.rundir import CONFIG, DATA, METRICS, PROBES, RunDir
from skipless.sharded import full
from skipless.sites import Site, find_sites


class ProbeLog:
    """Measures `model` during training and appends to files in `out`.

    `every` counts steps; the first step is measured too. `stats` None takes moments, and geometry
    where the model has a stream; "attention" has to be named, since it runs the first pass of a
    measured step on the eager path, which rounds differently. All else leaves the training bit for
    bit as it is. `writers`: "tensorboard", "trackio", a SummaryWriter, or anything with
    `log(dict, step=)`. `unigram_loss` (nats a token), `num_steps`, `warmup_steps` and `causal` go
    into data.json for `skipless doctor`, which judges the curve by them.

    Under torch.distributed every process has to run the same steps; statistics are merged and the
    first process writes. Raises UserError for a number below 1, a folder of a run or a model, a
    missing library that was asked for, and the patterns that `Probe` refuses. A log that is there
    already is continued: rows from the first step that is begun on are replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        out: str | Path,
        *,
        every: int = 50,
        sites: str | Site | Sequence[str | Site] | None = None,
        stats: Sequence[str] | None = None,
        writers: Sequence[Any] = (),
        unigram_loss: float | None = None,
        num_steps: int | None = None,
        warmup_steps: int | None = None,
        causal: bool | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UserError(f"every is {every!r}; give the number of steps between measurements")
        self.model, self.every, self.sites = model, every, sites
        self.stats = _default_stats(model) if stats is None else tuple(stats)
        self.run = RunDir(make_directory(out))
        if (self.run / CONFIG).exists():
            raise UserError(
                f"{out} holds a run or a model ({CONFIG}), whose log would be written over; name a "
                "folder of its own"
            )
        self.writers = open_writers(writers, self.run.path) if _is_first() else []
        self._open: contextlib.ExitStack | None = None
        self._began = False
        Probe(model, sites, self.stats)  # what it refuses is told before the first step
        note = {"unigram_loss": unigram_loss, "num_steps": num_steps,
                "warmup_steps": warmup_steps, "causal": causal}  # fmt: skip
        if _is_first():
            self.run.write_json(DATA, {k: v for k, v in note.items() if v is not None})

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[dict[str, Any]]:
        """Watch one step, forward and backward; yields a dict whose numbers go to metrics.jsonl.

        Gradient norms are read where the block ends, so `zero_grad` belongs behind it. After an
        exception nothing is written and no hook is left.
        """
        row: dict[str, Any] = {}
        self.begin(step)
        try:
            yield row
        except BaseException:
            self.abandon()
            raise
        self.end(step, row)

    def is_due(self, step: int) -> bool:
        """Whether `step`, counted from 1, is measured."""
        return step == 1 or step % self.every == 0

    def begin(self, step: int) -> None:
        """Start of a step, for frameworks that call back; `end` or `abandon` has to follow."""
        self.abandon()
        if not self._began and _is_first():
            # What an attempt that was cut short left beyond the step from which this one goes on.
            for name in (METRICS, PROBES):
                self.run.truncate_jsonl(name, lambda row: row.get("step", 0) < step)
        self._began = True
        if self.is_due(step):
            self._open = contextlib.ExitStack()
            self._probe = self._open.enter_context(Probe(self.model, self.sites, self.stats))
            self._gradients: dict[str, float] = {}

    def gradients(self) -> None:
        """Read gradient norms now, for frameworks that clear them before the step ends."""
        if self._open is not None and any(p.grad is not None for p in self.model.parameters()):
            self._gradients = gradient_norms(self.model)

    def end(self, step: int, values: dict[str, Any]) -> None:
        """End of a step: append `values` to metrics.jsonl, and the measurement if one was due."""
        if self._open is not None and not self._gradients:
            self.gradients()
        if values:
            self.metrics(step, values)
        if self._open is None:
            return
        probe, gradients = self._probe, self._gradients
        self.abandon()
        probe.all_reduce()
        row = {
            "step": step, "sites": probe.table() if "moments" in self.stats else [],
            "geometry": probe.geometry() if probe.joins else [],
            "attention": probe.attention() if probe.heads else [],
            "gradient_norms": gradients, "gains": current_gains(self.model),
            "num_keys": _length(probe),
        }  # fmt: skip
        if _is_first():
            self.run.append(PROBES, row)
            for writer in self.writers:
                writer.write(step, _scalars(row), _histograms(probe, row))

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl: its numbers, tensors of one element as numbers."""
        numbers = {k: v for k, value in values.items() if (v := _number(value)) is not None}
        if numbers and _is_first():
            self.run.append(METRICS, {"step": step, **numbers})
            for writer in self.writers:
                writer.write(step, numbers, {})

    def abandon(self) -> None:
        """Remove the hooks of a step that is not to be written; nothing to do without one."""
        if self._open is not None:
            stack, self._open = self._open, None
            stack.close()

    def close(self) -> None:
        """Remove what hooks there are and close the writers that were opened here."""
        self.abandon()
        for writer in self.writers:
            writer.close()
        self.writers = []


def current_gains(model: nn.Module) -> dict[str, Any]:
    """Learned connection weights by name, as probes.jsonl has them: those of `model.gains()`, else
    of every module with `gains()`."""
    own: Any = getattr(model, "gains", None)
    if callable(own):
        found: Any = own()
    else:
        modules: list[tuple[str, Any]] = list(model.named_modules())
        parts = [(n, m.gains()) for n, m in modules if n and callable(getattr(m, "gains", None))]
        found = {f"{name}.{key}": value for name, part in parts for key, value in part.items()}
    return {name: full(value.detach()).tolist() for name, value in found.items()}


def _length(probe: Probe) -> int | None:
    """Tokens a sequence, where a join tells."""
    for join in probe.joins.values():
        if join.num_sequences:
            return round(join.stream.count / join.num_sequences)
    return None


def _default_stats(model: nn.Module) -> tuple[str, ...]:
    has_stream = any(site.kind == "stream" for site in find_sites(model))
    return ("moments", "geometry") if has_stream else ("moments",)


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """The names are those of training's own mirrors: kurtosis/SITE."""
    found: dict[str, float] = {}
    for site in row["sites"]:
        for key in ("kurtosis", "max_over_std"):
            if _number(site.get(key)) is not None:
                found[f"{key}/{site['site']}"] = site[key]
    found |= {f"gradient_norm/{layer}": norm for layer, norm in row["gradient_norms"].items()}
    for join in row["geometry"]:
        if _number(join.get("token_similarity")) is not None:
            found[f"token_similarity/{join['module']}"] = join["token_similarity"]
    for name, value in row["gains"].items():
        flat = torch.tensor(value, dtype=torch.float64).flatten()
        found[f"gain/{name}"] = float(flat.abs().mean() if len(flat) > 1 else flat.sum())
    return found


def _histograms(probe: Probe, row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """{channel_rms/SITE: root mean square of every channel of the stream, float64 [D]}, and every
    gain of more than one channel."""
    found = {}
    for site in probe.sites:
        moments = probe.moments[site.name]
        if site.kind == "stream" and moments.mean is not None and moments.sums is not None:
            energy = moments.mean**2 + moments.sums[0] / moments.count
            found[f"channel_rms/{site.name}"] = energy.sqrt().cpu()
    for name, value in row["gains"].items():
        flat = torch.tensor(value, dtype=torch.float64).flatten()
        if len(flat) > 1:
            found[f"gain/{name}"] = flat
    return found


def _number(value: Any) -> float | int | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value


def _is_first() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
