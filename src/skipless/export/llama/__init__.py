"""What llama.cpp and stock transformers read: plain decoders with ordinary skips.

plain.py       a run, a patched model or a Llama of the disk, folded to a class of transformers
tensors.py     its weights under the names and in the order of GGUF
vocabulary.py  its tokenizer as GGUF has it
writing.py     export_gguf, and reading the file back
"""

from skipless.export.llama.plain import Plain, export_llama, open_plain
from skipless.export.llama.writing import WrittenGguf, export_gguf

__all__ = ["Plain", "WrittenGguf", "export_gguf", "export_llama", "open_plain"]
