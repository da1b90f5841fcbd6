"""ONNX files of our decoder, in full precision or with quantise/dequantise pairs.

nodes.py     a graph under construction
rounding.py  what a quantised model rounds, as QuantizeLinear and DequantizeLinear
joins.py     connections as nodes
decoder.py   the decoder as nodes: with or without past keys and values
files.py     the file, and the session options that belong to it
checking.py  ONNX Runtime against the model that was written
writing.py   export_onnx

The graph is made by hand from the `onnx` package. A tracing exporter would meet our own autograd
functions and control flow that looks at the data, wants one more package, and would leave the
pairs' places to chance; here they stand at the sites that `quantize` rounded.
"""

from skipless.export.graphs.files import open_session, session_options
from skipless.export.graphs.writing import WrittenOnnx, export_onnx

__all__ = ["WrittenOnnx", "export_onnx", "open_session", "session_options"]
