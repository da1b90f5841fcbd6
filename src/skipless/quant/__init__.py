"""Quantisation, simulated and executed: integers of 2 to 16 bits by plain uniform rounding.

scheme.py       Scheme: widths and options as one value, "W8A8" (Q1)
fake.py         fake_quantize: rounding, codes, straight-through gradient (Q1, Q3)
ranges.py       the range of a group: absmax, percentile, MSE-best, Gaussian
gaussian.py     the Gaussian yardstick (S11)
targets.py      which weights and sites a scope covers (Q2)
convolutions.py kernels as matrices and their inputs as sites
observers.py    static ranges, streaming
calibrate.py    running calibration batches
activations.py  the hooks
weights.py      one quantised parameter and its codes
tracing.py      which layers read one tensor
sources.py      into which module before them a factor can be folded
rotation.py     Hadamard matrices of any width
orthogonal.py   orthogonal matrices that learn
changes.py      parameters and inputs that were changed, and how to undo it
streams.py      who reads and writes the residual stream
transforms.py   scaling and rotating without changing the function
turning.py      weights as functions of learned rotations
methods/        GPTQ, SmoothQuant, AWQ, rotations, outlier columns, codebooks
record.py       what quantize did, and what is refused meanwhile
apply.py        quantize, restore, quantized, paused
subclasses.py   layers with another forward in their place
training.py     training with quantisation (Q3)
integer.py      the same layers computed with integers (Q4)
executing.py    what such a layer carries and does
codes.py        codes of their inputs
engines.py      ways to do that, all with the same integers (products.py: what they share)
native.py       the C++ ones
onnx_engine.py  ONNX Runtime's
hardware.py     which of them is right and fast on this machine
packing.py      codes as bytes
building.py     compiling kernels/ on first use
fused.py        one new token through attention or an MLP in one C++ call
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
from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.fake import Codes, clip_range, fake_quantize, integer_codes
from skipless.quant.gaussian import gaussian_clip, gaussian_mse, gaussian_sqnr
from skipless.quant.integer import IntegerLinear, from_integer, integer_layers, to_integer
from skipless.quant.methods import METHODS
from skipless.quant.observers import RangeObserver
from skipless.quant.scheme import Scheme
from skipless.quant.targets import SCOPES
from skipless.quant.training import QuantizedTraining, train_quantized
from skipless.quant.weights import quantize_weight

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
    "fake_quantize",
    "from_integer",
    "gaussian_clip",
    "gaussian_mse",
    "gaussian_sqnr",
    "integer_codes",
    "integer_layers",
    "measured",
    "paused",
    "quantization",
    "quantize",
    "quantize_weight",
    "quantized",
    "restore",
    "run_batch",
    "to_integer",
    "train_quantized",
]
