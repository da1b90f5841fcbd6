"""Training: `train(config, path)` makes a run directory, `load_run(path)` reads one.

training.py     `train`: processes, directory and text of a run
loop.py         the loop, in the order things happen
distributed.py  one process or many: FSDP2, compile by block, activation checkpointing
precision.py    autocast
checkpoint.py   save, find, restore; a broken one falls back to the one before
manifest.py     whether the files of a checkpoint are whole
states.py       model and optimiser by parameter name
tree.py         a nested state as tensors plus JSON
metrics.py      metrics.jsonl and its mirrors (TensorBoard, trackio)
memory.py       what malloc does between steps
measure.py      held-out loss and probes at a step
diagnose.py     where a non-finite number came from
signals.py      Ctrl-C
result.py       how a run ended, and whether its weights are whole
load.py         a finished (or unfinished) run as a model
"""

from skipless.train.load import LoadedRun, checkpoint_steps, load_run, load_step
from skipless.train.loop import Loop
from skipless.train.measure import measure_sites
from skipless.train.result import TrainResult
from skipless.train.training import train

__all__ = [
    "LoadedRun",
    "Loop",
    "TrainResult",
    "checkpoint_steps",
    "load_run",
    "load_step",
    "measure_sites",
    "train",
]
