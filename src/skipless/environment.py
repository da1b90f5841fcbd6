"""Where a run was started: what a reader needs to judge its timings and to start it again.

Read by rundir.py, which keeps it as environment.json.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Versions, processor and threads; what a reader needs to judge the timings."""
    import torch

    import skipless

    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "skipless": skipless.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": cuda,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": _command(),
    }


def _command() -> str:
    """The command line of this process, so that it can be typed again."""
    program = Path(sys.argv[0])
    is_module = program.name == "__main__.py" and program.parent.name == "skipless"
    return shlex.join(["skipless" if is_module else program.name, *sys.argv[1:]])


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
