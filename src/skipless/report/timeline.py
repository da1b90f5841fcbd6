"""What the inside of a model did during training: numbers by site and step, which moved, and when.

    read_timeline("runs/mine")      from probes.jsonl, of our runs and of what `ProbeLog` wrote
    make_timeline(rows, ...)        from rows of that form, such as those of measured checkpoints

How far a site moved is the distance between its smallest and its largest value in orders of
magnitude, so that quantities compare: log10 of positive numbers, sign * log10(1 + |x|) of kurtosis,
decibels over 20. Files only, no torch. Read by timeline_page and `skipless.diagnose`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.errors import UserError, counted
from skipless.report.cells import show
from skipless.report.load import number
from skipless.rundir import CONFIG, RunDir

if TYPE_CHECKING:
    from skipless.probes.heatmap import OverTime

METRICS, PROBES = "metrics.jsonl", "probes.jsonl"
NUM_LINES = 10
AT_MOST = 3
"""Lines about one quantity."""
NOTHING_MOVED = 1e-9


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that is followed over time."""

    words: str
    form: str
    size: Callable[[float], float]
    """Its place on a scale of orders of magnitude; NaN where it has none."""


def _signed(x: float) -> float:
    return math.copysign(math.log10(1 + abs(x)), x)


def _positive(x: float) -> float:
    return math.log10(x) if x > 0 else math.nan


def _decibels(x: float) -> float:
    return x / 20


def _share(x: float) -> float:
    return x


QUANTITIES = {
    "kurtosis": Quantity(words="excess kurtosis", form=",.2f", size=_signed),
    "max_over_std": Quantity(words="max / sd", form=",.1f", size=_positive),
    "rms": Quantity(words="root mean square", form=".3g", size=_positive),
    "sqnr": Quantity(words="SQNR pooled (dB)", form=".1f", size=_decibels),
    "token_sqnr": Quantity(words="SQNR, every token alike (dB)", form=".1f", size=_decibels),
    "channel_energy": Quantity(words="channel energy (S2)", form=",.2f", size=_positive),
    "gradient_norm": Quantity(words="norm of the gradient", form=".3g", size=_positive),
    "gradient_norms": Quantity(words="gradient norm of the parameters", form=".3g", size=_positive),
    "gradient_kurtosis": Quantity(words="kurtosis of the gradient", form=",.2f", size=_signed),
    "first_token_mass": Quantity(words="attention on the first token", form=".1%", size=_share),
    "token_similarity": Quantity(words="similarity of tokens", form=".3f", size=_share),
}
"""By the key of a row, in the order of the page; "token_sqnr W8A8" is a token_sqnr."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Numbers by site and step."""

    name: str
    about: str
    maps: dict[str, OverTime]
    """By key, places in the model's order."""
    moves: list[dict[str, Any]]
    """A row a key and place, those that moved most first: key, place, first_step, first, last_step,
    last, smallest, largest, moved (orders of magnitude), and the steepest stretch between two
    measured steps: from_step, to_step, before, after."""
    losses: dict[str, list[tuple[int, float]]]
    """{"loss" | "held_out_loss": [(step, nats)]}."""
    missing: list[str]

    @property
    def steps(self) -> list[int]:
        """Every measured step."""
        return sorted({step for data in self.maps.values() for step in data.steps})

    def to_dict(self) -> dict[str, Any]:
        """The same as a plain dict."""
        return asdict(self)

    def lines(self) -> list[str]:
        """At most ten lines: what is not finite, then what moved most, places of different layers
        together."""
        lines, taken, seen, same = [], {}, {}, {}
        for move in self.moves:
            # Sites that see one tensor have the same numbers.
            numbers = tuple(move[key] for key in ("key", "first", "last", "smallest", "largest"))
            group = (move["key"], re.sub(r"\d+", "*", move["place"]))
            group = same.setdefault(numbers, group)
            if group in seen:
                seen[group].append(move["place"])
                continue
            if move["moved"] <= NOTHING_MOVED or taken.get(move["key"], 0) >= AT_MOST:
                continue
            taken[move["key"]] = taken.get(move["key"], 0) + 1
            seen[group] = []
            lines.append((move, seen[group]))
        broken = [line for line in self.missing if "NaN" in line]
        texts = [*broken, *(_line(move, len(others)) for move, others in lines)]
        return texts[:NUM_LINES] or [f"nothing moved between steps {self.steps[0]} and "
                                     f"{self.steps[-1]}"]  # fmt: skip


def quantity(key: str) -> Quantity | None:
    """What `key` is; None for a number that is not followed."""
    return QUANTITIES.get(key.split(" ")[0])


def label(key: str) -> str:
    """A key in words, with its scheme."""
    found, _, scheme = key.partition(" ")
    return f"{QUANTITIES[found].words}{' at ' + scheme if scheme else ''}"


def where(place: str) -> str:
    """A place in words: gradient norms are kept by the number of a layer."""
    return f"layer {place}" if place.isdigit() else place


def read_timeline(path: str | Path) -> Timeline:
    """The log of a run directory, ours or one that `ProbeLog` wrote.

    Raises UserError for what has no rows of measurements, saying how to get some.
    """
    from skipless.probes.heatmap import read_log

    path = Path(path)
    run = RunDir(path if path.is_dir() else path.parent)
    if not path.exists():
        raise UserError(f"{path} does not exist; name a run directory or a log of a ProbeLog")
    ours = (run / CONFIG).exists()
    if ours and not (run / PROBES).exists():
        raise UserError(
            f"{path} was trained without probes (no {PROBES}); train with --probe.every above 0, "
            f"or measure its checkpoints: `skipless diagnose {path} --checkpoints all --out DIR`"
        )
    rows = read_log(path)
    metrics = run.read_jsonl(METRICS)
    traced = [
        row for row in metrics if row.get("gradient_norms") and isinstance(row.get("step"), int)
    ]
    about = counted(len(rows), "measurement")
    about += f" between steps {rows[0]['step']} and {rows[-1]['step']}"
    return make_timeline(
        rows, name=str(path), about=f"{about} of {PROBES}", losses=_losses(metrics),
        more=[{"step": row["step"], "gradient_norms": row["gradient_norms"]} for row in traced],
    )  # fmt: skip


def make_timeline(
    rows: Sequence[dict[str, Any]],
    *,
    name: str,
    about: str,
    losses: dict[str, list[tuple[int, float]]],
    more: Sequence[dict[str, Any]] = (),
    missing: Sequence[str] = (),
) -> Timeline:
    """A timeline of rows of the form of probes.jsonl; `more` rows hold gradient norms by layer.

    Raises UserError when the rows hold no number that is followed.
    """
    from skipless.probes.heatmap import from_rows, known_keys

    every = [*rows, *more]
    order = list(QUANTITIES)
    keys = sorted(
        (key for key in known_keys(every) if quantity(key)),
        key=lambda key: order.index(key.split(" ")[0]),
    )
    maps = {key: data for key in keys if (data := from_rows(every, key)) is not None}
    if not maps:
        raise UserError(
            f"{name} holds no number that can be followed over time ({', '.join(order[:3])}, "
            "...); log rows of `Probe.table`, as ProbeLog does"
        )
    moves = [move for data in maps.values() for move in _moves(data)]
    moves.sort(key=lambda move: -move["moved"])
    absent = [*missing, *_nonfinite(rows)]
    steps = {step for data in maps.values() for step in data.steps}
    if len(steps) == 1:
        absent.append(f"there is one measured step ({steps.pop()}): nothing can have moved")
    for key in ("token_sqnr", "gradient_norms"):
        if not any(found.split(" ")[0] == key for found in maps):
            absent.append(f"{QUANTITIES[key].words}: not in the log")
    return Timeline(
        name=name, about=about, maps=maps, moves=moves, losses=losses, missing=absent
    )  # fmt: skip


def _moves(data: OverTime) -> list[dict[str, Any]]:
    what, found = quantity(data.key), []
    assert what is not None, "only followed keys are mapped"
    for place, values in zip(data.places, data.values, strict=True):
        known = [
            (step, value, size)
            for step, value in zip(data.steps, values, strict=True)
            if math.isfinite(value) and math.isfinite(size := what.size(value))
        ]
        if not known:
            continue
        row: dict[str, Any] = {
            "key": data.key, "place": place,
            "first_step": known[0][0], "first": known[0][1],
            "last_step": known[-1][0], "last": known[-1][1],
            "smallest": min(v for _, v, _ in known), "largest": max(v for _, v, _ in known),
            "moved": max(s for _, _, s in known) - min(s for _, _, s in known),
            "from_step": None, "to_step": None, "before": None, "after": None,
        }  # fmt: skip
        if len(known) > 1:
            a, b = max(zip(known, known[1:], strict=False), key=lambda ab: abs(ab[1][2] - ab[0][2]))
            row |= {"from_step": a[0], "to_step": b[0], "before": a[1], "after": b[1]}
        found.append(row)
    return found


def _line(move: dict[str, Any], others: int) -> str:
    what = quantity(move["key"])
    assert what is not None, "it was mapped"
    first, last, before, after = (
        show(move[key], what.form) for key in ("first", "last", "before", "after")
    )
    more = f" ({others} more like it)" if others else ""
    return (
        f"{label(move['key'])} of {where(move['place'])}{more}: {first} at step "
        f"{move['first_step']}, {last} at step {move['last_step']}; most between steps "
        f"{move['from_step']} and {move['to_step']}, {before} to {after}"
    )


def _losses(metrics: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for key in ("loss", "held_out_loss"):
        points = [
            (row["step"], value) for row in metrics
            if isinstance(row.get("step"), int) and (value := number(row, key)) is not None
        ]  # fmt: skip
        if points:
            found[key] = points
    return found


def _nonfinite(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The first step at which a site held NaN or infinities, and the first such site there."""
    for row in rows:
        for site in row.get("sites") or ():
            if site.get("nonfinite"):
                return [f"NaN or infinity at step {row['step']}, first in {site['site']}"]
    return []
