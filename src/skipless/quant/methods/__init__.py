"""Methods beside rounding to the nearest, a file each; `by_name.py` combines them.

stream.py    one rotation of the residual stream
smooth.py    SmoothQuant
awq.py       AWQ
hadamard.py  a rotation in front of every layer
learned_rotation.py  rotations of the stream and of heads, trained through the rounding
outliers.py  columns in full precision
gptq.py      codes with second-order information
codebook.py  k-means
"""

from skipless.quant.methods.by_name import (
    METHODS,
    Method,
    Rtn,
    looks_ahead,
    method_name,
    needs_data,
    parse_methods,
)

__all__ = ["METHODS", "Method", "Rtn", "looks_ahead", "method_name", "needs_data", "parse_methods"]
