"""Compiles the C++ kernel on first use and loads it; no compiler is a reason, not an error.

    level   flags                                             runs on
    vnni    -mavx512f -mavx512bw -mavx512vl -mavx512vnni ...   Ice Lake, Zen 4 and later
    avx2    -mavx2                                            Haswell, Zen 1 and later
    plain   none                                              anything with a C++17 compiler

A library is kept in $SKIPLESS_CACHE/kernels (default ~/.cache/skipless) under a name made of the
sources, the flags and the compiler's version, so that a changed kernel or another machine on the
same home folder gets its own. It is written under a temporary name and renamed; of two processes
one compiles while the other waits. The compiler is $CXX, else c++, g++ or clang++. Plain C calls
through ctypes, so that no torch header is read: a few seconds a level. Read by `integers.engines`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

from skipless import log
from skipless.errors import UserError
from skipless.files import atomic_path
from skipless.locking import locked

KERNELS = Path(__file__).parent / "kernels"
LEVELS = {
    "vnni": ("-mavx2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    "avx2": ("-mavx2",),
    "plain": (),
}
# No contraction: a fused multiply-add rounds once where torch rounds twice (Q4). No errno: else
# rounding would be a library call per value.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off",
          "-fno-math-errno")  # fmt: skip
_told: set[str] = set()


def supported_levels() -> list[str]:
    """Levels this processor can run, best first; always ends with plain."""
    flags = _processor_flags()
    levels = []
    if {"avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= flags:
        levels.append("vnni")
    if "avx2" in flags:
        levels.append("avx2")
    return [*levels, "plain"]


@lru_cache(maxsize=1)
def _processor_flags() -> frozenset[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass  # macOS: torch knows whether there is AVX2
    capability = torch.backends.cpu.get_cpu_capability()
    return frozenset({"avx2"} if capability.startswith("AVX") else ())


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler as words, or None. $CXX, if set, is not second-guessed."""
    if os.environ.get("CXX"):
        try:
            words = shlex.split(os.environ["CXX"])
        except ValueError:  # a quotation without end
            return None
        return words if words and shutil.which(words[0]) else None
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path), None)


def build(level: str, folder: Path | None = None) -> Path:
    """The path of the library for `level`, compiled now if it is not there yet.

    Raises UserError, in one sentence, when there is no compiler, it fails, or the folder cannot
    be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise UserError(
            f"no C++ compiler ({os.environ.get('CXX') or 'c++, g++ or clang++'}) was found; "
            "install one, or set CXX, to have the fast integer kernel"
        )
    flags = [*_FLAGS, *LEVELS[level]]
    sources = sorted(KERNELS.glob("*.[ch]pp"))
    key = hashlib.sha256()
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key.update(" ".join([*compiler, *flags, platform.machine()]).encode())
    key.update(_output([*compiler, "--version"]).encode())
    folder = folder or _cache()
    path = folder / f"integer-{level}-{key.hexdigest()[:16]}.so"
    if path.exists():
        return path
    with locked(folder / f"{path.stem}.lock", what="compiling the integer kernel", timeout=600):
        if not path.exists():  # else another process made it meanwhile
            log.say(f"compiling the integer kernel ({level}), once: {path}")
            with atomic_path(path) as temporary:
                main = str(KERNELS / "gemm.cpp")
                _output([*compiler, *flags, main, "-o", str(temporary)])
    return path


def _cache() -> Path:
    from skipless.data.fetching import cache_dir

    return cache_dir() / "kernels"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]} did not run ({error}); set CXX to a compiler") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise UserError(
            f"{command[0]} failed on the integer kernel: {lines[0].strip()}; set CXX to another "
            "compiler"
        )
    return done.stdout


@lru_cache(maxsize=8)
def load(level: str) -> tuple[ctypes.CDLL | None, str]:
    """(library, "") or (None, why there is none); builds at most once a process."""
    if level not in supported_levels():
        return None, f"this processor has no {level}"
    try:
        path = build(level)
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # damaged or made for another system: make it anew, once
            path.unlink(missing_ok=True)
            library = ctypes.CDLL(str(build(level)))
    except (UserError, OSError) as error:
        return None, str(error)
    library.skipless_level.restype = ctypes.c_char_p
    if library.skipless_level().decode() != level:
        return None, f"the compiler ignored the flags of {level}"
    address, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    for name, arguments in {
        "multiply": [address, address, number, size, size, size, size, address, size, address,
                     address, address, address, number],
        "linear": [address, size, size, size, number, number, real, address, number, size, size,
                   size, address, address, address, address, number],
        "quantize": [address, size, size, size, size, number, number, real, address, address,
                     number],
        "attention_step": [address, address, size, size, address, address, address, address, size,
                           address, number],
        "mlp_step": [address, address, size, size, address, number],
        "stack_step": [address, size, address, address, size, size, address, address, size,
                       number],
        "dense": [address, address, address, size, size, size, address, number],
        "has_quads": [],
    }.items():  # fmt: skip
        function = getattr(library, f"skipless_{name}")
        function.argtypes = arguments
        function.restype = {
            "has_quads": number, "attention_step": number, "mlp_step": number, "stack_step": size,
        }.get(name)  # fmt: skip
    return library, ""


def loaded(level: str) -> ctypes.CDLL:
    """The kernel's library at `level`. Raises UserError with the reason when there is none."""
    found, reason = load(level)
    if found is None:
        raise UserError(f"the kernel {level} cannot run: {reason}")
    return found


def tell_once(text: str) -> None:
    """Say `text` on stderr the first time it comes up in this process."""
    if text not in _told:
        _told.add(text)
        log.say(text)
