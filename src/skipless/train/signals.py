"""Ctrl-C without loss: the first one is a request, the second one is final.

The loop asks `stop.requested` where it can leave consistently, saves and raises
KeyboardInterrupt. A second signal raises KeyboardInterrupt at once, wherever the program is; files
are written under temporary names, so nothing half-written is left under a real one. Read by
loop.py.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from skipless.log import say


class Interrupted(Exception):
    """Raised inside the loop when a stop was asked for; the loop saves and ends."""


class Stop:
    """Context manager that turns SIGINT and SIGTERM into a flag.

    `alone` tells that this is the only process: then `check` may leave in the middle of a step,
    which several processes can only do together.

    `requested` becomes True at the first signal. Outside the main thread (where Python does not
    allow handlers) it never does, and signals keep their meaning.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.alone = alone
        self.requested = False
        self._former: dict[int, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former = {}

    def check(self) -> None:
        """Raise Interrupted if a stop was asked for and this process is alone."""
        if self.alone and self.requested:
            raise Interrupted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        say(f"{signal.Signals(number).name}: saving and stopping; once more to stop at once")
