"""How a run ended: train.json, and whether what lies beside it belongs to the same weights.

A run counts as finished when train.json and the weights can be read. If one is damaged and a
checkpoint is left, the run goes on from that, which makes the files anew. Read by loop.py and
load.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.config import RunConfig
from skipless.errors import UserError
from skipless.log import say
from skipless.model import Transformer
from skipless.rundir import CHECKPOINTS, EVALUATION, QUANTISED, RESULT, SAMPLES, WEIGHTS, RunDir
from skipless.train import checkpoint
from skipless.train.states import model_state


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished run came to; train.json in its directory says the same."""

    path: str
    step: int
    """Optimiser steps in all."""
    tokens: int
    loss: float
    """Of the last training batch, nats per token; NaN if the log does not tell."""
    held_out_loss: float
    """Nats per token, or per label of a classifier."""
    held_out_tokens: int | None = None
    """That it is the mean over, or passages; None in files of before."""
    held_out_bits_per_byte: float | None = None
    """None for a classifier."""
    seconds: float
    """Training time over all resumptions, measurements included."""
    peak_memory_bytes: int = 0
    """Most memory this process (on CUDA: its device) held at once; 0 where that is unknown."""


def read_result(run: RunDir, config: RunConfig) -> TrainResult | None:
    """The result of a finished run; None for one that is not, or must be finished again.

    Raises UserError when its files are damaged and no checkpoint is left to make them from.
    """
    if not (run / RESULT).exists():
        return None
    try:
        result = _parsed(run)
        with torch.device("meta"):
            model = Transformer(config.model)
        check_weights(run / WEIGHTS, model)
    except UserError as error:
        if not checkpoint.found(run / CHECKPOINTS):
            raise UserError(
                f"{error}; no checkpoint is left to make it from, so restore it from a copy or "
                "start anew with --fresh"
            ) from None
        say(f"{error}; taking the last checkpoint instead")
        return None
    return result


def _parsed(run: RunDir) -> TrainResult:
    values = run.read_json(RESULT)
    fields = dataclasses.fields(TrainResult)
    known: dict[str, Any] = {"path": str(run.path)}
    if isinstance(values, dict):
        known |= {f.name: values[f.name] for f in fields if f.name in values and f.name != "path"}
    if known.get("loss", 0) is None:  # NaN in JSON
        known["loss"] = math.nan
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    numbers = [known.get(name) for name in needed - {"path"}]
    whole = all(isinstance(known.get(n), int) for n in ("step", "tokens"))
    if not whole or any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in numbers):
        raise UserError(f"{run / RESULT} is not what training writes")
    return TrainResult(**known)


def drop_stale(run: RunDir, step: int | None) -> None:
    """Remove measurements of other weights than those of `step` (None: all of them).

    A report would show them as those of the end.
    """
    for name in (EVALUATION, QUANTISED, SAMPLES):
        with contextlib.suppress(UserError):
            found = run.read_json(name, {})
            origin = found.get("measured") if isinstance(found, dict) else None
            if isinstance(origin, dict) and origin.get("step") == step:
                continue
        (run / name).unlink(missing_ok=True)


def check_weights(path: Path, model: nn.Module) -> None:
    """Raise UserError unless the file at `path` is whole and has the names and shapes of `model`.

    Reads the header only.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = "it is missing" if not path.exists() else str(error)
        raise UserError(f"cannot read {path} ({reason})") from None
    wanted = {name: tuple(t.shape) for name, t in model_state(model).items()}
    odd = sorted(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))
    if odd:
        name = odd[0]
        raise UserError(
            f"{path} does not fit its config.json: {name} has shape {there.get(name, 'none')} "
            f"there and {wanted.get(name, 'none')} by the settings ({len(odd)} differ)"
        )
