"""A run directory as a model: `load_run(path)`.

A finished run is read from model.safetensors, an unfinished one from its newest usable checkpoint.
Tokeniser and data are opened when asked for, so a run copied to another machine still loads. Read
by evaluation, quantisation and export commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.config import RunConfig
from skipless.data import PreparedData, load_tokenizer, prepare
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.rundir import RunDir, atomic_path
from skipless.train import checkpoint
from skipless.train.distributed import World, whole

WEIGHTS, RESULT, DATA = "model.safetensors", "train.json", "data.json"


@dataclass(kw_only=True)
class LoadedRun:
    """What `load_run` found. `model` is in eval mode, on the CPU unless asked otherwise."""

    path: Path
    config: RunConfig
    model: nn.Module
    step: int
    """Training steps behind these weights."""
    is_finished: bool

    @cached_property
    def data(self) -> PreparedData:
        """The prepared text of this run; prepared again if it is gone."""
        record = RunDir(self.path).read_json(DATA, {})
        directory = Path(record.get("directory", ""))
        if record and directory.is_dir():
            return PreparedData.open(directory)
        return prepare(self.config.data, self.config.model.vocab_size)

    @cached_property
    def tokenizer(self) -> Any:
        """`encode(text) -> list[int]`, `decode(ids) -> str`."""
        return load_tokenizer(self.data.tokenizer_path)


def load_run(path: str | Path, *, device: str | torch.device = "cpu") -> LoadedRun:
    """Read the model of a run. Raises UserError if there is no run or it has no weights yet."""
    run = RunDir.open(path)
    config = run.config()
    model = Transformer(config.model, seed=config.train.seed)
    finished = run.read_json(RESULT)
    if finished:
        load_weights(run / WEIGHTS, model)
        step = finished["step"]
    else:
        position = checkpoint.restore(run / "checkpoint", model, None, World())
        if position is None:
            raise UserError(
                f"{run.path} has no weights yet (no checkpoint, no {WEIGHTS}); train it first: run "
                "the same training command again"
            )
        step = position.step
    model.set_training_progress(step / config.train.num_steps)
    return LoadedRun(
        path=run.path, config=config, model=model.to(device).eval(), step=step,
        is_finished=bool(finished),
    )  # fmt: skip


def save_weights(path: Path, model: nn.Module, world: World) -> None:
    """Write all weights and buffers as one safetensors file, a tied tensor once. Every rank calls.

    Sharded tensors are gathered one at a time and kept on rank 0's CPU.
    """
    from safetensors.torch import save

    tensors = {}
    for key, tensor in checkpoint.model_state(model).items():
        full = whole(tensor)
        if world.is_main:
            tensors[key] = full.cpu().contiguous()

    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(save(tensors, metadata={"format": "pt"}))

    world.first(write)


def load_weights(path: Path, model: nn.Module) -> None:
    """Read what `save_weights` wrote. Raises UserError if the file does not fit the model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path} ({error}); train again with --fresh") from None
    wanted = set(checkpoint.model_state(model))
    if wanted != set(tensors):
        odd = sorted(wanted ^ set(tensors))
        raise UserError(f"{path} does not fit its config.json: {odd[0]} and {len(odd) - 1} more")
    # Not strict: the second name of a tied tensor is not in the file.
    model.load_state_dict(tensors, strict=False)
