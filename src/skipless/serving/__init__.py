"""A model that writes: opened by name, on the fastest engine that fits, a token at a time.

opening.py   a run, a folder of packed integers or a Hugging Face model, under a scheme; checking.py
             which of them write text
stepping.py  logits of the next token, with whatever cache the model keeps
pieces.py    token ids as text that can be printed at once: whole characters, no stop text
writing.py   one prompt from beginning to end, with the times

    writer = open_writer("runs/mine", scheme="W8A8-KV8")
    written = write(writer, "Once upon a time", Settings(max_new_tokens=50), emit=print)
"""

from skipless.serving.opening import Writer, open_writer
from skipless.serving.pieces import Pieces, StopText
from skipless.serving.stepping import RoundedStore
from skipless.serving.writing import Settings, Written, write

__all__ = [
    "Pieces",
    "RoundedStore",
    "Settings",
    "StopText",
    "Writer",
    "Written",
    "open_writer",
    "write",
]
