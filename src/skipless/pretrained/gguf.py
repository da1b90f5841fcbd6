"""Reading GGUF, llama.cpp's file of weights, with numpy.

    "GGUF", u32 version, u64 tensors, u64 entries
    entry:  string key, u32 type, value        (string: u64 length, UTF-8; array: u32 type, u64 n)
    tensor: string name, u32 rank, u64 sizes (fastest first), u32 kind, u64 offset
    padding to general.alignment (32), then the data; all little-endian

Kinds read here: float32, float16, and blocks of 32 numbers with one scale: Q8_0 (w = d q), Q4_0
(w = d (q - 8)), Q4_1 (w = d q + m). The libraries do the same, some hundred times slower where a
vocabulary is read string by string into arrays. Read by `converting.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from skipless.errors import UserError

__all__ = ["Gguf", "read_gguf"]

_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32
_KINDS: dict[int, tuple[str, np.dtype]] = {
    0: ("F32", np.dtype("<f4")),
    1: ("F16", np.dtype("<f2")),
    2: ("Q4_0", np.dtype([("d", "<f2"), ("q", "u1", _BLOCK // 2)])),
    3: ("Q4_1", np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", _BLOCK // 2)])),
    8: ("Q8_0", np.dtype([("d", "<f2"), ("q", "i1", _BLOCK)])),
}


@dataclass(frozen=True)
class Gguf:
    """A parsed file. `tensors` holds (shape slowest first, kind, offset into `content`)."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    content: bytes

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor as fp32. Raises UserError for a kind that is not read here."""
        shape, kind, offset = self.tensors[name]
        if kind not in _KINDS:
            known = ", ".join(label for label, _ in _KINDS.values())
            raise UserError(f"{name} has the GGUF kind {kind}; those read here are {known}")
        label, dtype = _KINDS[kind]
        count = int(np.prod(shape))
        if label in ("F32", "F16"):
            return np.frombuffer(self.content, dtype, count, offset).astype("f4").reshape(shape)
        blocks = np.frombuffer(self.content, dtype, count // _BLOCK, offset)
        scale = blocks["d"].astype("f4")[:, None]
        if label == "Q8_0":
            return (scale * blocks["q"].astype("f4")).reshape(shape)
        nibbles = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype("f4")
        if label == "Q4_0":
            return (scale * (nibbles - 8)).reshape(shape)
        return (scale * nibbles + blocks["m"].astype("f4")[:, None]).reshape(shape)


def read_gguf(content: bytes) -> Gguf:
    """Parse a GGUF file, version 2 or 3. Raises UserError for anything else."""
    if content[:4] != b"GGUF":
        raise UserError(f"the file begins with {content[:4]!r}; a GGUF file begins with b'GGUF'")
    reader = _Reader(content)
    version = reader.plain("I")
    if version not in (2, 3):
        raise UserError(f"the GGUF file has version {version}; 2 and 3 are read")
    num_tensors, num_entries = reader.plain("Q"), reader.plain("Q")
    metadata = {}
    for _ in range(num_entries):
        key = reader.string()
        metadata[key] = reader.value(reader.plain("I"))
    found = []
    for _ in range(num_tensors):
        name = reader.string()
        sizes = [reader.plain("Q") for _ in range(reader.plain("I"))]
        found.append((name, tuple(reversed(sizes)), reader.plain("I"), reader.plain("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-reader.at // alignment) * alignment
    tensors = {name: (shape, kind, start + offset) for name, shape, kind, offset in found}
    return Gguf(metadata, tensors, content)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 4

    def plain(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.content, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        length = self.plain("Q")
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.plain("I"), self.plain("Q")
            return [self.value(inner) for _ in range(count)]
        return self.plain(_PLAIN[kind])
