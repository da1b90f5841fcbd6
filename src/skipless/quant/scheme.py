"""`Scheme` under its old room: the parser is `skipless.scheme`, so that settings can be checked
without torch. Read by this room."""

from skipless.scheme import Scheme

__all__ = ["Scheme"]
