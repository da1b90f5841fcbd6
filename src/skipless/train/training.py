"""`train(config, path)`: a run from its settings to its end.

A tiny run on one CPU core (seconds, once the text is prepared):

    python -c "from skipless import recipes, train; \
        train.train(recipes.get('demo-residual-adamw').replace(train={'num_tokens': 20_000}), \
                    'runs/tiny')"

The same under `torchrun --nproc-per-node 2` shards the model over two processes. Here is what has
to be there before the first step: processes, the directory, its text. The steps are in loop.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from skipless.config import RunConfig
from skipless.data import PreparedData, prepare
from skipless.log import say
from skipless.rundir import RunDir
from skipless.train.distributed import start
from skipless.train.load import check_text, open_text
from skipless.train.loop import Loop
from skipless.train.result import TrainResult, read_result


def train(
    config: RunConfig,
    path: str | Path,
    *,
    fresh: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    data: PreparedData | None = None,
) -> TrainResult:
    """Train `config` into the run directory `path`, or continue where it stopped.

    A finished run is returned at once. `fresh` starts anew. `data` replaces what
    `skipless.data.prepare` makes of `config.data`. `on_step` gets a dict after every step
    (`step, num_steps, tokens, loss, lr, grad_norm, seconds, tokens_per_second`) on rank 0.

    Raises UserError for a directory that holds other settings or is in use, a full disk, or a
    non-finite loss (diagnosis.json tells where from); KeyboardInterrupt after Ctrl-C or SIGTERM,
    with a checkpoint saved.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_threads(config.train.num_threads))
        world = stack.enter_context(start(config.train))
        run = RunDir(path)
        world.first(lambda: run.check(config, fresh=fresh))
        resumes = world.first(lambda: not fresh and run.continues(config))
        finished = world.first(lambda: read_result(run, config)) if resumes else None
        if finished:
            if world.is_main:
                say(f"{path}: finished already, step {finished.step} of {config.train.num_steps}")
            return finished
        resumes = resumes and world.first(run.has_weights)
        if data is None:
            data = world.in_turn(
                lambda: (
                    open_text(run, config)
                    if resumes
                    else prepare(config.data, config.model.vocab_size)
                )
            )
        elif resumes:
            world.agree(lambda: check_text(run, data))
        if world.is_main:
            for note in data.notes:
                say(f"NOTE: {note}")
        # All that can fail by a wrong setting is made before anything is written or removed.
        loop = Loop(config, run, data, world, on_step)
        world.first(lambda: stack.enter_context(RunDir.claim(path, config, fresh=fresh)))
        loop.resume()
        return loop.run()


@contextlib.contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Use so many CPU threads inside (None: as they are)."""
    former = torch.get_num_threads()
    torch.set_num_threads(num_threads or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)
