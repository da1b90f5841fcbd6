"""Keep freed memory between steps, on Linux CPUs.

A training step frees all its activations and the next one asks for the same sizes again. glibc
gives such memory back to the kernel, which then hands it out page by page, zeroed: some 10,000 page
faults and 6 % of a step at D = 256, 4 layers, 1,024 tokens (2 cores, glibc 2.36). Told not to, it
serves the next step from what it has; the peak stays the same. Read by loop.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
NEVER, LARGEST = -1, 1 << 30


def keep_freed_memory() -> bool:
    """Ask the C library not to return freed memory, for the whole process. Returns if it will.

    False on other systems and where the user tunes malloc by environment variables.
    """
    tuned = [name for name in os.environ if name.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC_"))]
    if tuned or platform.libc_ver()[0] != "glibc":
        return False
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, NEVER))
    return False
