"""Quantisation, simulated and executed: integers of 2 to 16 bits by plain uniform rounding.

fake.py         fake_quantize: rounding, codes, straight-through gradient (Q1, Q3)
ranges.py       the range of a group: absmax, percentile, MSE-best, Gaussian
gaussian.py     the Gaussian yardstick (S11)
targets.py      which weights and sites a scope covers (Q2)
convolutions.py kernels as matrices and their inputs as sites
observers.py    static ranges, streaming
calibrate.py    running calibration batches
activations.py  the hooks
replacing.py    what hooks share
weights.py      one quantised parameter and its codes
record.py       what quantize did, and what is refused meanwhile
apply.py        quantize, restore, quantized, paused
training.py     training with quantisation (Q3)
subclasses.py   layers with another forward in their place
transforms/     changes that leave the function as it is: scales and rotations (Q5)
methods/        GPTQ, SmoothQuant, AWQ, rotations, outlier columns, codebooks
integers/       the same layers computed with integers (Q4): engines, C++ kernels, fused steps
kvcache.py      packed keys and values
bits.py         weight codes in a file
saved.py        a quantised model as tensors and settings, and back
"""

from skipless.quant.apply import (
    Quantization,
    measured,
    paused,
    quantization,
    quantize,
    quantized,
    restore,
)
from skipless.quant.calibrate import evaluation_mode, placed, run_batch
from skipless.quant.fake import Codes, clip_range, fake_quantize, integer_codes
from skipless.quant.gaussian import gaussian_clip, gaussian_mse, gaussian_sqnr
from skipless.quant.integers.layers import (
    IntegerLinear,
    executed,
    from_integer,
    integer_layers,
    to_integer,
)
from skipless.quant.methods import METHODS
from skipless.quant.observers import RangeObserver
from skipless.quant.targets import SCOPES
from skipless.quant.training import QuantizedTraining, train_quantized
from skipless.quant.weights import quantize_weight
from skipless.scheme import Scheme

__all__ = [
    "METHODS",
    "SCOPES",
    "Codes",
    "IntegerLinear",
    "Quantization",
    "QuantizedTraining",
    "RangeObserver",
    "Scheme",
    "clip_range",
    "evaluation_mode",
    "executed",
    "fake_quantize",
    "from_integer",
    "gaussian_clip",
    "gaussian_mse",
    "gaussian_sqnr",
    "integer_codes",
    "integer_layers",
    "measured",
    "paused",
    "placed",
    "quantization",
    "quantize",
    "quantize_weight",
    "quantized",
    "restore",
    "run_batch",
    "to_integer",
    "train_quantized",
]
