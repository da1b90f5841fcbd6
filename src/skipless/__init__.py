"""skipless: transformers without, or with learned, skip connections.

Train them, measure what happens inside, quantise them with plain uniform integers, compare.
Importing the package is cheap; torch is loaded by the rooms that need it (`skipless.model`,
`skipless.optim`, `skipless.probes`, `skipless.quant`, ...).
"""

__version__ = "0.1.0"
