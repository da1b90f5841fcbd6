"""Models as folders and files that other programs, and this one, read.

quantized.py           packed integers, scales and the scheme; compressed-tensors on request
compressed_tensors.py  what that layout has words for
graphs/                ONNX
llama/                 plain Llamas, and GGUF
places.py              where a file may go
folders.py             from a run or a folder to each of them: `skipless export`
"""

from skipless.export.folders import FORMATS, Exported, export_folder, export_onnx_of
from skipless.export.graphs import export_onnx, open_session, session_options
from skipless.export.llama import export_gguf, export_llama
from skipless.export.quantized import LAYOUTS, load_quantized, save_quantized

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "Exported",
    "export_folder",
    "export_gguf",
    "export_llama",
    "export_onnx",
    "export_onnx_of",
    "load_quantized",
    "open_session",
    "save_quantized",
    "session_options",
]
