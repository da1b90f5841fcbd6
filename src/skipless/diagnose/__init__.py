"""Diagnose a model: which layer breaks when quantised, which channel, which token, what would help.

    skipless.diagnose(model, batches, ["W8A8"]) -> Diagnosis      any nn.Module
    skipless.diagnose.compare(a, b, batches) -> Difference        two of them

site_rows.py    the table of sites, by one pass over the data
collect.py      one pass: S1-S3 of every site, extreme and sampled tokens
kernel.py       largest values, sums and noise of that pass in C++, where there is a compiler
streaming.py    models larger than memory: a block at a time from disk
anatomy.py      outlier channels and outlier tokens of one tensor
remedies.py     what clipping, token scales, rotation, smoothing, columns would give, in dB
weights.py      the same questions of weight matrices
gradients.py    one backward pass, on request
damage.py       loss, or distance of outputs where there is no loss
by_layer.py     what takes a pass a layer, in order
sensitivity.py  one layer at a time; milder schemes
block_noise.py  which layers that will be: noise of every block's output, by two passes
parts.py        finished parts on disk
batches.py      what is refused before a model sees it
running.py      the order of all that: start here
result.py       Diagnosis: tables, ten lines
plots.py, page.py, writing.py    figures, one HTML page, all files
checkpoints.py  several steps of one training by the same pass
comparison/     two models, site by site
loading.py      a run directory, a folder, a name: the model of the command line
texts.py, media.py, media_files.py    its batches: text; images and sound
"""

import sys
from types import ModuleType
from typing import Any

from skipless.diagnose.checkpoints import measure_checkpoints
from skipless.diagnose.comparison import Difference, compare, compare_diagnoses, read_diagnosis
from skipless.diagnose.result import Diagnosis
from skipless.diagnose.running import diagnose

__all__ = [
    "Diagnosis",
    "Difference",
    "compare",
    "compare_diagnoses",
    "diagnose",
    "measure_checkpoints",
    "read_diagnosis",
]


class _Room(ModuleType):
    """So that `skipless.diagnose(model, batches)` is the function."""

    def __call__(self, *args: Any, **options: Any) -> Diagnosis:
        return diagnose(*args, **options)


sys.modules[__name__].__class__ = _Room
