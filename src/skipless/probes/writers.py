"""Scalars and histograms to TensorBoard, trackio, or whatever has their methods.

Neither library is needed unless it is named. Read by callbacks.py and `skipless.train`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skipless.errors import UserError
from skipless.packages import install_line


class Writer(Protocol):
    """A place that shows numbers over steps."""

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]
    ) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """A SummaryWriter; `is_ours` if it was opened here."""

    def __init__(self, to: Any, *, is_ours: bool = False) -> None:
        self.to, self.is_ours = to, is_ours

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]
    ) -> None:
        """One step; tags as given."""
        for name, value in scalars.items():
            self.to.add_scalar(name, value, step)
        for name, values in histograms.items():
            self.to.add_histogram(name, values, step)

    def close(self) -> None:
        """Close event files that were opened here; a writer that was given stays open."""
        if self.is_ours:
            self.to.close()


class LogWriter:
    """Anything with `log(dict, step=)`: a trackio run, or the module after `trackio.init`."""

    def __init__(self, to: Any, *, histogram: Any = None, finish: Any = None) -> None:
        self.to, self.histogram, self.finish = to, histogram, finish

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]
    ) -> None:
        """One step; histograms as trackio's own where that is installed, else left out."""
        values: dict[str, Any] = dict(scalars)
        if self.histogram is not None:
            values |= {n: self.histogram(v.tolist()) for n, v in histograms.items()}
        self.to.log(values, step=step)

    def close(self) -> None:
        """Finish a run that was started here."""
        if self.finish is not None:
            self.finish()


def open_writers(
    wanted: Sequence[Any],
    out: Path,
    *,
    after: int = 0,
    config: dict[str, Any] | None = None,
    setting: str = "writers",
) -> list[Writer]:
    """Writers of "tensorboard" (event files under out/tensorboard), "trackio" (project skipless, a
    run named as `out` with the settings `config`), or objects with `add_scalar` or `log`.

    Events beyond the step `after`, from which a training goes on, are hidden. Raises UserError for
    anything else and for a library that is missing, which `setting` named.
    """
    several = [wanted] if isinstance(wanted, str) else wanted
    return [_open(one, out, after, config, setting) for one in several]


def _open(one: Any, out: Path, after: int, config: dict[str, Any] | None, setting: str) -> Writer:
    try:
        if one == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            events = SummaryWriter(
                str(out / "tensorboard"), purge_step=after + 1 if after else None
            )
            return TensorBoardWriter(events, is_ours=True)
        if one == "trackio":
            import trackio

            trackio.init(project="skipless", name=out.name, config=config, resume="allow")
            return LogWriter(trackio, histogram=trackio.Histogram, finish=trackio.finish)
    except ImportError as error:
        raise UserError(
            f"{setting} names {one!r}, which is not installed ({error}); install it with "
            f"`{install_line(one)}`, or leave it out"
        ) from None
    if callable(getattr(one, "add_scalar", None)):
        return TensorBoardWriter(one)
    if callable(getattr(one, "log", None)):
        return LogWriter(one, histogram=getattr(one, "Histogram", None))
    raise UserError(
        f"{one!r} is no writer; give 'tensorboard', 'trackio', a SummaryWriter or an object with "
        "log(dict, step=)"
    )
