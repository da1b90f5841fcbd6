"""Several checkpoints of one training by the same pass: heat maps site by step.

    measure_checkpoints([(100, model), (200, lambda: load(200))], batches, ["W8A8"]) -> Timeline

Rows have the form of probes.jsonl, so that tables, figures and page are those of logs over time
(`report.timeline`). Read by the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from skipless.diagnose.batches import first_sequences
from skipless.diagnose.damage import predicts_tokens
from skipless.diagnose.gradients import Loss, gradient_rows
from skipless.diagnose.loading import Subject, load_subject
from skipless.diagnose.parts import Parts, checksum
from skipless.diagnose.running import GRADIENT_SEQUENCES, parse_schemes
from skipless.diagnose.site_rows import Say, site_rows
from skipless.diagnose.weights import check_finite
from skipless.errors import UserError, counted
from skipless.evaluate import sequence_losses
from skipless.evaluate.losses import as_list
from skipless.quant import Scheme, evaluation_mode
from skipless.report.timeline import Timeline, make_timeline
from skipless.rundir import CHECKPOINTS, CONFIG, RunDir

KEPT = ("count", "nonfinite", "mean", "std", "kurtosis", "max_over_std", "max_abs",
        "channel_energy")  # fmt: skip
ALL = "all"


def measure_checkpoints(
    checkpoints: Iterable[tuple[int, nn.Module | Callable[[], nn.Module]]],
    batches: Iterable[Any],
    schemes: Sequence[str | Scheme] | str = ("W8A8",),
    *,
    gradients: bool = False,
    loss: Loss | None = None,
    name: str = "checkpoints",
    about: str = "",
    stamps: dict[int, Any] | None = None,
    out: str | Path | None = None,
    say: Say = lambda text: None,
) -> Timeline:
    """Measure every site of every checkpoint on the same batches.

    `checkpoints` are pairs of a step and a model, or a function that loads it, called when its
    turn comes. Batches are as in `diagnose` and kept in memory. With `gradients` one backward pass
    a checkpoint. `out` writes the page and keeps finished checkpoints; `stamps` tell by step
    whether one on disk is still that of the same weights.

    Raises UserError for fewer than two checkpoints, a step given twice, no batch, and as
    `diagnose` does.
    """
    parsed = parse_schemes(schemes)
    kept, pairs = list(as_list(batches)), list(checkpoints)
    if not kept:
        raise UserError("there is no batch to measure on; give at least one")
    steps = [step for step, _ in pairs]
    if len(steps) < 2 or len(set(steps)) < len(steps):
        raise UserError(
            f"the checkpoints have steps {steps}; give at least two, each once, to see what moved"
        )
    settings = {
        "name": name, "steps": steps, "schemes": [str(s) for s in parsed], "gradients": gradients,
        "about": about, "stamps": stamps, "checksum": checksum(nn.Module(), kept),
    }  # fmt: skip
    parts = Parts(out, settings)
    with parts.held():
        measured = []
        for step, source in sorted(pairs, key=lambda pair: pair[0]):

            def measure(step: int = step, source: Any = source) -> dict[str, Any]:
                say(f"step {step}")
                model = source if isinstance(source, nn.Module) else source()
                return _row(model, kept, parsed, step, gradients, loss)

            measured.append(parts.get(f"step-{step}", measure))
        timeline = _timeline(measured, name, about)
        if out is not None:
            from skipless.report.timeline_page import write_timeline

            write_timeline(timeline, Path(out) / "index.html")
    return timeline


def _timeline(measured: list[dict[str, Any]], name: str, about: str) -> Timeline:
    """Rows of `_row`, in the order of steps, over time."""
    losses = [(row["step"], row["loss"]) for row in measured if row["loss"] is not None]
    rows = [{k: v for k, v in row.items() if k not in ("loss", "missing")} for row in measured]
    return make_timeline(
        rows, name=name,
        about=f"{counted(len(rows), 'checkpoint')} measured on {about or 'the same batches'}",
        losses={"held_out_loss": losses} if losses else {},
        missing=list(dict.fromkeys(text for row in measured for text in row["missing"])),
    )  # fmt: skip


def _row(
    model: nn.Module,
    batches: Sequence[Any],
    schemes: Sequence[Scheme],
    step: int,
    gradients: bool,
    loss: Loss | None,
) -> dict[str, Any]:
    """One checkpoint as a row of probes.jsonl, with "loss" and "missing" besides."""
    check_finite(model)
    with evaluation_mode(model):
        found = site_rows(model, batches, schemes, None, 30.0, remedies=False)
        causal = predicts_tokens(model, batches[0])
        value = sequence_losses(model, batches).nats if causal else None
    sites = []
    for row in found["rows"]:
        numbers = {key: row[key] for key in ("site", "kind", "layer", "sublayer", *KEPT)}
        for ratio in ("sqnr", "token_sqnr"):
            numbers |= {f"{ratio} {scheme}": value_ for scheme, value_ in row[ratio].items()}
        sites.append(numbers)
    whole = {"step": step, "sites": sites, "loss": value, "missing": found["missing"]}
    if gradients:
        try:
            back = gradient_rows(model, first_sequences(batches[0], GRADIENT_SEQUENCES), loss)
        except UserError as error:
            return whole | {"missing": [*found["missing"], f"gradients: {error}"]}
        by_site = {row["site"]: row for row in back["sites"]}
        for numbers in sites:
            row = by_site.get(numbers["site"])
            if row is not None:
                numbers |= {"gradient_norm": row["norm"], "gradient_kurtosis": row["kurtosis"]}
        whole["gradient_norms"] = {
            f"{row['stack']}.{row['layer']}".lstrip("."): row["norm"]
            for row in back["depth"] if row["of"] == "parameters"
        }  # fmt: skip
    return whole


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint on disk."""

    step: int
    path: Path
    name: str
    """What `load_subject` takes."""

    def load(self) -> Subject:
        """The model, its tokenizer and what else `load_subject` knows."""
        return load_subject(self.name)

    @property
    def stamp(self) -> list[list[Any]]:
        """Names, sizes and times of its files."""
        files = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        states = [(file, file.stat()) for file in files if file.is_file()]
        return [[file.name, state.st_size, state.st_mtime_ns] for file, state in states]


def find_checkpoints(path: str | Path, wanted: Sequence[str] = (ALL,)) -> list[Saved]:
    """The checkpoints that a run directory of ours keeps, or the folders checkpoint-N of a
    Trainer; `wanted` are steps or "all".

    Raises UserError for a folder without checkpoints, a step that is not there, and fewer than two.
    """
    path = Path(path)
    known = _known(path)
    if not known:
        raise UserError(
            f"{path} keeps no checkpoints ({CHECKPOINTS}/step-N of ours, or checkpoint-N as "
            "transformers' Trainer writes them); name the folder of a training"
        )
    steps = list(known) if ALL in wanted else [_step(word) for word in wanted]
    for step in steps:
        if step not in known:
            raise UserError(
                f"{path} keeps no checkpoint of step {step}; it keeps steps "
                f"{', '.join(map(str, known))}"
            )
    if len(set(steps)) < 2:
        raise UserError(
            f"{path} has one checkpoint to measure (step {steps[0]}), so that nothing can be seen "
            "to move; keep more with --train.keep_checkpoints, or diagnose that one without "
            "--checkpoints"
        )
    return [known[step] for step in sorted(set(steps))]


def _known(path: Path) -> dict[int, Saved]:
    if (path / CONFIG).exists() and RunDir(path).is_ours():
        from skipless.train import checkpoint_steps

        found = checkpoint_steps(path)
        return {
            step: Saved(step=step, path=place, name=str(path if place.is_file() else place))
            for step, place in found.items()
        }
    found = {}
    for place in path.glob("checkpoint-*"):
        digits = place.name.removeprefix("checkpoint-")
        if digits.isdigit() and (place / CONFIG).exists():
            found[int(digits)] = Saved(step=int(digits), path=place, name=str(place))
    return dict(sorted(found.items()))


def _step(word: str) -> int:
    if not word.isdigit():
        raise UserError(f"--checkpoints is {word!r}; give steps, such as 100,200, or {ALL}")
    return int(word)
