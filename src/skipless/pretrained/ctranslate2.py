"""Reading model.bin, CTranslate2's file of weights, with numpy.

    u32 version, string spec, u32 revision, u32 variables
    variable: string name, u8 rank, u32 sizes (slowest first), u8 type, u32 bytes, data
    u32 aliases; alias: string name, string variable       (string: u16 length with its NUL)

Read by `converting.py`, for Whisper.
"""

from __future__ import annotations

import struct

import numpy as np

from skipless.errors import UserError

__all__ = ["read_ctranslate2"]

_VERSION = 6
_TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read_ctranslate2(content: bytes) -> tuple[str, dict[str, np.ndarray]]:
    """(name of the spec, variables by name, in their own dtypes); aliases are left out.

    Raises UserError for another version of the format.
    """
    at = 0

    def plain(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, content, at)
        at += struct.calcsize("<" + form)
        return value

    def string() -> str:
        nonlocal at
        length = plain("H")
        at += length
        return content[at - length : at].rstrip(b"\0").decode("utf-8")

    version = plain("I")
    if version != _VERSION:
        raise UserError(f"model.bin has CTranslate2's version {version}; {_VERSION} is read")
    spec, _, count = string(), plain("I"), plain("I")
    variables = {}
    for _ in range(count):
        name = string()
        shape = [plain("I") for _ in range(plain("B"))]
        dtype, size = np.dtype(_TYPES[plain("B")]), plain("I")
        variables[name] = np.frombuffer(content, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    return spec, variables
