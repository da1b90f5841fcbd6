"""The one pass in C++ (kernels/sums.cpp): largest values, powers and rounding noise (S1, S3).

Compiled on first use, like the integer kernel and into the same folder of the cache; without a
compiler, for other dtypes than float32 and away from the CPU `fused_sums` gives None, and torch
does the same, several times slower. Read by `collect.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipless.data import cache_dir
from skipless.errors import UserError
from skipless.files import atomic_path
from skipless.locking import locked
from skipless.probes.outliers import Fused
from skipless.quant.integers.building import find_compiler, supported_levels

SOURCE = Path(__file__).parent / "kernels" / "sums.cpp"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_LEVELS = {
    "vnni": ("-mavx2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2",),
    "plain": (),
}


def fused_sums(rows: Tensor, levels: list[int]) -> Fused | None:
    """`probes.outliers.Fused` of float32 rows [n, D] on the CPU; None where it does not apply."""
    if rows.dtype != torch.float32 or rows.device.type != "cpu":
        return None
    kernel = load()
    if kernel is None:
        return None
    rows = rows.contiguous()
    n, width = rows.shape
    # Named, since torch's defaults are the user's and C++ writes what it is made for.
    narrow: Any = {"dtype": torch.float32, "device": "cpu"}
    wide: Any = {"dtype": torch.float64, "device": "cpu"}
    largest, noise = torch.empty(n, **narrow), torch.empty(len(levels), n, **narrow)
    channels, tokens = torch.zeros(4, width, **wide), torch.empty(4, n, **wide)
    counts = torch.tensor(levels, **wide)
    finite = kernel(
        rows.data_ptr(), n, width, counts.data_ptr(), len(levels), largest.data_ptr(),
        channels.data_ptr(), tokens.data_ptr(), noise.data_ptr(),
    )  # fmt: skip
    return Fused(largest, (channels, tokens, noise) if finite else None)


@lru_cache(maxsize=1)
def load() -> Any:
    """The compiled function, or None; tried once a process."""
    try:
        function = ctypes.CDLL(str(build())).skipless_sums
    except (UserError, OSError, AttributeError, subprocess.SubprocessError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_int64
    function.restype = ctypes.c_int
    function.argtypes = [address, size, size, address, size, *[address] * 4]
    return function


def build() -> Path:
    """The library, compiled now if it is not there. Raises UserError without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise UserError("no C++ compiler was found; install one, or set CXX")
    level = supported_levels()[0]
    command = [*compiler, *_FLAGS, *_LEVELS[level]]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    path = cache_dir() / "kernels" / f"sums-{level}-{key}.so"
    if not path.exists():
        with locked(path.with_suffix(".lock"), what="compiling the kernel of sums", timeout=600):
            if not path.exists():
                with atomic_path(path) as temporary:
                    subprocess.run(
                        [*command, str(SOURCE), "-o", str(temporary)], check=True,
                        capture_output=True, timeout=600,
                    )  # fmt: skip
    return path
