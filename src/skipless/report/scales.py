"""Logarithmic axes with numbers that can be read. Read by whatever draws."""

from __future__ import annotations

import math
from typing import Any


def log_scale(axes: Any) -> None:
    """A logarithmic y axis with plain numbers: 1, 2, 5, 10; only powers of ten when it is long."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_plain)


def log_scale_if_wide(axes: Any) -> None:
    """Logarithmic when positive values span more than a factor of 20; else linear from 0."""
    values = [y for line in axes.lines for y in line.get_ydata() if math.isfinite(y)]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        log_scale(axes)
    elif values:
        axes.set_ylim(bottom=min(0.0, *values))


def signed_log_scale(axes: Any, *, linear: float) -> None:
    """Logarithmic on both sides of a linear stretch of +-`linear`, with a line at 0; linear where
    no value is ten times that, since the logarithmic part would have no number to read then."""
    from matplotlib.ticker import SymmetricalLogLocator

    values = [abs(y) for line in axes.lines for y in line.get_ydata() if math.isfinite(y)]
    axes.axhline(0, color=axes.spines["left"].get_edgecolor(), linewidth=1)
    if max(values, default=0.0) <= 10 * linear:
        return
    axes.set_yscale("symlog", linthresh=linear)
    if max(values) < 1e3 * linear:
        subs = (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=subs))
    axes.yaxis.set_major_formatter(_plain)


def _plain(value: float, _: object) -> str:
    return f"{value:,.10g}"
