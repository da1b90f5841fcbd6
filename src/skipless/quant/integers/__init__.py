"""The quantised layers of a model computed with integers (Q4).

layers.py       to_integer and from_integer
executing.py    what such a layer carries and does
convolving.py   convolutions
codes.py        codes of its input
engines.py      the ways to multiply, all with the same integers (products.py: what they share)
native.py       the C++ ones
onnx_engine.py  ONNX Runtime's
hardware.py     which of them is right and fast on this machine
packing.py      codes as bytes
building.py     compiling kernels/ on first use
fused.py        one new token through attention or an MLP in one C++ call
stacked.py      through a whole stack in one
structures.py   what those calls are told
"""
