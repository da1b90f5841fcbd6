"""Models as folders that other programs, and this one, read.

quantized.py           packed integers, scales and the scheme; compressed-tensors on request
compressed_tensors.py  what that layout has words for
folders.py             from a run or a folder to a folder: `skipless export`
"""

from skipless.export.folders import Exported, export_folder
from skipless.export.quantized import LAYOUTS, load_quantized, save_quantized

__all__ = ["LAYOUTS", "Exported", "export_folder", "load_quantized", "save_quantized"]
