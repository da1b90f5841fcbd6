"""A run directory as a model: `load_run(path)`.

A finished run is read from model.safetensors, an unfinished one from its newest usable checkpoint.
Tokeniser and data are opened when asked for, so a run copied to another machine still loads; the
tokeniser lies in the run. Read by evaluation, quantisation and export commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from skipless.config import RunConfig
from skipless.data import PreparedData, load_tokenizer, prepare
from skipless.data.tokenizer import tokenizer_hash
from skipless.errors import UserError
from skipless.files import atomic_path, write_atomic
from skipless.log import say
from skipless.model import Transformer
from skipless.rundir import CHECKPOINTS, DATA, TOKENIZER, WEIGHTS, RunDir, continue_command
from skipless.train import checkpoint
from skipless.train.distributed import World, whole
from skipless.train.result import check_weights, read_result
from skipless.train.states import model_state

FREQUENCY_TOKENS = 20_000_000
"""Enough to know frequencies by; counting them takes a tenth of a second."""


@dataclass(kw_only=True)
class LoadedRun:
    """What `load_run` found. `model` is in eval mode, on the CPU unless asked otherwise."""

    path: Path
    config: RunConfig
    model: Transformer
    step: int
    """Training steps behind these weights."""
    is_finished: bool

    @cached_property
    def data(self) -> PreparedData:
        """The prepared text of this run; prepared again if it is gone."""
        return open_text(RunDir(self.path), self.config)

    @cached_property
    def tokenizer_path(self) -> Path:
        """The run's own copy of its tokenizer.json; of a run without one, that of its text.

        Raises UserError for a copy that is another tokenizer.
        """
        own, noted = self.path / TOKENIZER, _note(RunDir(self.path)).get("sha256", {})
        if not own.is_file():
            return self.data.tokenizer_path
        if noted.get("tokenizer") not in (None, tokenizer_hash(own)):
            raise UserError(
                f"{own} is not the tokenizer that the run was trained with; delete it to take that "
                "of its text again"
            )
        return own

    @cached_property
    def tokenizer(self) -> Any:
        """`encode(text) -> list[int]`, `decode(ids) -> str`."""
        return load_tokenizer(self.tokenizer_path)


def load_run(path: str | Path, *, device: str | torch.device = "cpu") -> LoadedRun:
    """Read the model of a run, and say so on stderr if it is not finished.

    Raises UserError if there is no run or it has no weights yet.
    """
    run = RunDir.open(path)
    config = run.config()
    model = Transformer(config.model, seed=config.train.seed)
    finished = read_result(run, config)
    if finished:
        load_weights(run / WEIGHTS, model)
        step = finished.step
    else:
        position = checkpoint.restore(run / CHECKPOINTS, model, None, World())
        if position is None:
            raise UserError(
                f"{run.path} has no weights yet (no checkpoint, no {WEIGHTS}); train it first: "
                f"`{continue_command(run.path)}`"
            )
        step = position.step
        say(
            f"{run.path}: step {step} of {config.train.num_steps}: not finished; continue with: "
            f"{continue_command(run.path)}"
        )
    model.set_training_progress(step / config.train.num_steps)
    return LoadedRun(
        path=run.path, config=config, model=model.to(device).eval(), step=step,
        is_finished=bool(finished),
    )  # fmt: skip


def checkpoint_steps(path: str | Path) -> dict[int, Path]:
    """{step: where its weights are} of everything a run keeps, in order: its checkpoints, and the
    weights of the last step once it is finished. Raises UserError if there is no run."""
    run = RunDir.open(path)
    found = {
        int(digits): folder for folder in checkpoint.found(run / CHECKPOINTS)
        if (digits := folder.name.removeprefix("step-")).isdigit()
    }  # fmt: skip
    finished = read_result(run, run.config())
    if finished:
        found[finished.step] = run / WEIGHTS
    return dict(sorted(found.items()))


def load_step(path: str | Path, step: int, *, device: str | torch.device = "cpu") -> LoadedRun:
    """Read the model that a run had at `step`.

    Raises UserError if there is no run, it keeps no such step, or that checkpoint is damaged.
    """
    run, known = RunDir.open(path), checkpoint_steps(path)
    config = run.config()
    if step not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise UserError(
            f"{run.path} keeps no checkpoint of step {step}; it keeps steps {listed} "
            "(train.keep_checkpoints says how many are kept)"
        )
    model = Transformer(config.model, seed=config.train.seed)
    if known[step].name == WEIGHTS:
        load_weights(known[step], model)
    else:
        checkpoint.read_model(known[step], model)
    model.set_training_progress(step / config.train.num_steps)
    return LoadedRun(
        path=run.path, config=config, model=model.to(device).eval(), step=step,
        is_finished=known[step].name == WEIGHTS,
    )  # fmt: skip


def open_text(run: RunDir, config: RunConfig) -> PreparedData:
    """The text a run was trained on: the folder it noted, or the same prepared again.

    Raises UserError if what can be had is other text.
    """
    directory = _note(run).get("directory")
    if directory and (Path(directory) / "prepared.json").is_file():
        data = PreparedData.open(directory)
    else:
        data = prepare(config.data, config.model.vocab_size)
    check_text(run, data)
    return data


def check_text(run: RunDir, data: PreparedData) -> None:
    """Raise UserError if the run noted other tokens than those of `data`."""
    noted = _note(run).get("sha256")
    for split, found in _hashes(data).items():
        if noted and noted.get(split) != found:
            raise UserError(
                f"{run.path} was trained on other text: the SHA-256 of its {split} is "
                f"{str(noted.get(split))[:12]} and that of {data.directory} is {found[:12]}; bring "
                "the former text back or start anew with --fresh"
            )


def note_text(run: RunDir, data: PreparedData) -> None:
    """Write data.json (where the text is, what it is, how far token frequencies alone get), and
    the tokenizer beside it, so that a run that is moved can still read and write text."""
    write_atomic(run / TOKENIZER, data.tokenizer_path.read_bytes())
    note = {"directory": str(data.directory), "sha256": _hashes(data)}
    run.write_json(DATA, {**note, "unigram_loss": unigram_loss(data)})


def unigram_loss(data: PreparedData) -> float:
    """Held-out cross-entropy in nats a token of the training text's token frequencies.

    The yardstick for a model that has learned nothing of context. Frequencies get one count more
    each, so that no token is impossible.
    """
    most = FREQUENCY_TOKENS
    size = max(data.train.vocab_size, data.held_out.vocab_size)
    counts = np.bincount(data.train.tokens[:most], minlength=size) + 1.0
    seen = np.bincount(data.held_out.tokens[:most], minlength=size)
    return float(seen @ np.log(counts.sum() / counts) / seen.sum())


def _hashes(data: PreparedData) -> dict[str, str]:
    return {
        "train": data.train.header.sha256,
        "held_out": data.held_out.header.sha256,
        "tokenizer": data.train.header.tokenizer_sha256,
    }


def _note(run: RunDir) -> dict[str, Any]:
    note = run.read_json(DATA, {})
    fits = isinstance(note, dict) and isinstance(note.get("directory", ""), str)
    if not fits or not isinstance(note.get("sha256", {}), dict):
        raise UserError(
            f"{run / DATA} does not note a folder of text; delete it to prepare the text of the "
            "settings again"
        )
    return note


def save_weights(path: Path, model: nn.Module, world: World) -> None:
    """Write all weights and buffers as one safetensors file, a tied tensor once. Every rank calls.

    Sharded tensors are gathered one at a time and kept on rank 0's CPU.
    """
    from safetensors.torch import save

    tensors = {}
    for key, tensor in model_state(model).items():
        full = whole(tensor)
        if world.is_main:
            tensors[key] = full.cpu().contiguous()

    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(save(tensors, metadata={"format": "pt"}))

    world.first(write)


def load_weights(path: Path, model: nn.Module) -> None:
    """Read what `save_weights` wrote. Raises UserError if the file does not fit the model."""
    from safetensors.torch import load_file

    check_weights(path, model)
    tensors = load_file(path)
    # Not strict: the second name of a tied tensor is not in the file.
    model.load_state_dict(tensors, strict=False)
