"""`Difference`: two tables of sites aligned by name, B minus A, and the ten lines that matter.

Numbers only, no torch. Read by comparing and page.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipless.diagnose.result import ROUNDED
from skipless.report.cells import show

KEYS = ("kurtosis", "kurtosis_per_token", "max_over_std", "max_abs", "std", "channel_energy")
RATIOS = ("token_sqnr", "sqnr")
"""By scheme, in dB: "token_sqnr W8A8"."""
NUM_LINES = 10
NUM_GROUPS = 3
LEAST_DB = 0.1
"""Smaller changes of a ratio get no line."""
LEAST_DISTANCE = 1e-6
"""A relative distance below it is rounding of float32."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What `compare` found: B minus A. Lists hold one dict a row."""

    a: str
    b: str
    about: str
    """What both were measured on, in words."""
    schemes: list[str]
    sites: list[Row]
    """Those that both have, in A's order: site, kind, layer, sublayer, tensor; for each of KEYS and
    "RATIO SCHEME" a dict {a, b, change}; channels and tokens {gained, lost}, None where it is not
    known."""
    only_a: list[str]
    only_b: list[str]
    weights: list[Row]
    """site, shape, distance (None for two folders), {a, b, change} of kurtosis, max_over_std."""
    outputs: Row | None
    """`Outputs.found`; None for two folders."""
    depth: list[Row]
    """site, layer, sublayer, distance of the stream (S9)."""
    missing: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The same as a plain dict."""
        return dataclasses.asdict(self)

    def key(self) -> str | None:
        """The ratio that ranks: of every token alike, at the first scheme that has one."""
        names = [f"token_sqnr {scheme}" for scheme in self.schemes]
        known = [n for n in names if any(r[n]["change"] is not None for r in self.sites if n in r)]
        return known[0] if known else None

    def tensors(self) -> list[Row]:
        """The rows of `sites`, each tensor once."""
        return _once(self.sites)

    def lines(self) -> list[str]:
        """At most ten lines, worst first: outputs, tensors that round worse in B, outliers gained,
        tails, stream, weights, and what B does better."""
        lines = self._output_line()
        worse, better = self._by_ratio()
        lines += [self._ratio_line(group) for group in worse[:NUM_GROUPS]]
        lines += self._outlier_lines() + self._tail_line() + self._depth_line()
        lines += self._weight_line() + [self._ratio_line(g, "better") for g in better[:1]]
        lines += self._alone_line()
        return lines[:NUM_LINES] or [f"none of the {len(self.sites)} sites differs"]

    def _output_line(self) -> list[str]:
        found, parts = self.outputs or {}, []
        if found.get("loss_change"):
            error = found["standard_error"]
            parts.append(
                f"loss {found['loss_a']:.4f} in A, {found['loss_b']:.4f} in B "
                f"({found['loss_change']:+.4f}{'' if error is None else f' ± {error:.4f}'} nats a "
                "token)"
            )
        if found.get("kl"):
            parts.append(
                f"KL divergence {found['kl']:.3g} nats a token, the same most likely token in "
                f"{found['agreement']:.1%}"
            )
        if found.get("distance"):
            parts.append(f"relative distance {found['distance']:.3g}")
        return [f"outputs: {'; '.join(parts)}"] if parts else []

    def _by_ratio(self) -> tuple[list[list[Row]], list[list[Row]]]:
        """Tensors that round worse in B and better, places of different layers together."""
        key = self.key()
        if key is None:
            return [], []
        known = [r for r in self.sites if key in r and r[key]["change"] is not None]
        rows = _once([r for r in known if r["kind"] in ROUNDED["all"]] or known)
        worse = sorted(rows, key=lambda r: r[key]["change"])
        found: list[list[list[Row]]] = []
        for sign, ordered in ((-1, worse), (1, worse[::-1])):
            groups: dict[str, list[Row]] = {}
            for row in ordered:
                if sign * row[key]["change"] >= LEAST_DB:
                    groups.setdefault(re.sub(r"\d+", "*", row["site"]), []).append(row)
            found.append(list(groups.values()))
        return found[0], found[1]

    def _ratio_line(self, group: list[Row], how: str = "worse") -> str:
        key, row = self.key(), group[0]
        assert key is not None, "the group was made by it"
        ratio, kurtosis = row[key], row["kurtosis"]
        layers = {r["layer"] for r in group if r["layer"] is not None} - {row["layer"]}
        also = f" (and {len(layers)} more layer{'s' * (len(layers) > 1)})" if layers else ""
        text = (
            f"{how}: {row['site']}{also}: {ratio['b']:.1f} dB in B at {key.split(' ')[1]}, "
            f"{ratio['a']:.1f} in A ({ratio['change']:+.1f}); kurtosis {_short(kurtosis['b'])}, "
            f"{_short(kurtosis['a'])} in A"
        )
        for what in ("channels", "tokens"):
            changed = row[what] or {}
            for how_many in ("gained", "lost"):
                if changed.get(how_many):
                    text += f"; {how_many} {_named(changed[how_many], what)}"
        return text

    def _outlier_lines(self) -> list[str]:
        lines = []
        for what in ("channels", "tokens"):
            rows = [r for r in self.tensors() if r[what] and (r[what]["gained"] or r[what]["lost"])]
            gained = [r for r in rows if r[what]["gained"]]
            lost = [r for r in rows if r[what]["lost"]]
            parts = []
            for how, group in (("gained", gained), ("lost", lost)):
                if group:
                    row = max(group, key=lambda r, how=how: len(r[what][how]))
                    parts.append(
                        f"{how} at {len(group)} tensor{'s' * (len(group) > 1)}, most at "
                        f"{row['site']}: {_named(row[what][how], what)}"
                    )
            if parts:
                lines.append(f"outlier {what} {'; '.join(parts)}")
        return lines

    def _tail_line(self) -> list[str]:
        rows = [r for r in self.tensors() if r["kurtosis"]["change"]]
        if not rows:
            return []
        row = max(rows, key=lambda r: abs(r["kurtosis"]["change"]))
        k, m = row["kurtosis"], row["max_over_std"]
        return [
            f"tails changed most at {row['site']}: kurtosis {_short(k['a'])} in A, "
            f"{_short(k['b'])} in B; max / sd {_short(m['a'])} and {_short(m['b'])}"
        ]

    def _depth_line(self) -> list[str]:
        rows = [r for r in self.depth if r["distance"] is not None]
        if not rows or max(r["distance"] for r in rows) < LEAST_DISTANCE:
            return []
        values = [r["distance"] for r in rows]
        steps = [b - a for a, b in zip([0.0, *values], values, strict=False)]
        at = rows[steps.index(max(steps))]
        return [
            f"the streams part most at {at['site']} ({max(steps):+.3g}); relative distance "
            f"{values[-1]:.3g} at {rows[-1]['site']}"
        ]

    def _weight_line(self) -> list[str]:
        rows = [r for r in self.weights if r["distance"]]
        if not rows:
            return []
        row = max(rows, key=lambda r: r["distance"])
        return [
            f"{len(rows)} of {len(self.weights)} parameters differ, {row['site']} most: relative "
            f"distance {row['distance']:.3g}"
        ]

    def _alone_line(self) -> list[str]:
        parts = [
            f"{len(names)} site{'s' * (len(names) > 1)} only in {which}, such as {names[0]}"
            for which, names in (("A", self.only_a), ("B", self.only_b)) if names
        ]  # fmt: skip
        return ["; ".join(parts)] if parts else []


def _once(rows: Sequence[Row]) -> list[Row]:
    """The first row of every tensor."""
    return list({row["tensor"]: row for row in reversed(rows)}.values())[::-1]


def site_differences(a: Sequence[Row], b: Sequence[Row], schemes: Sequence[str]) -> list[Row]:
    """Rows of sites of both tables, in the order of `a`: see `Difference.sites`."""
    theirs, rows = {row["site"]: row for row in b}, []
    for mine in a:
        other = theirs.get(mine["site"])
        if other is None:
            continue
        row = {key: mine[key] for key in ("site", "kind", "layer", "sublayer", "tensor")}
        row |= {key: change(mine.get(key), other.get(key)) for key in KEYS}
        for ratio in RATIOS:
            for scheme in schemes:
                pair = mine[ratio].get(scheme), other[ratio].get(scheme)
                row[f"{ratio} {scheme}"] = change(*pair)
        same = mine["channels"] == other["channels"]
        row["channels"] = _sets(mine, other, "all_channels") if same else None
        row["tokens"] = _sets(mine, other, "all_tokens")
        rows.append(row)
    return rows


def change(a: float | None, b: float | None) -> dict[str, float | None]:
    """{a, b, change: b - a}; None where one of them is."""
    return {"a": a, "b": b, "change": None if a is None or b is None else b - a}


def _sets(a: Row, b: Row, key: str) -> dict[str, list] | None:
    """What of the anatomy's list only B has (gained) and only A (lost); None if one lacks it."""
    of_a, of_b = a["anatomy"], b["anatomy"]
    if any(found and key not in found for found in (of_a, of_b)):
        return None  # a table of an earlier version
    one, two = of_a.get(key, []), of_b.get(key, [])
    return {
        "gained": [entry for entry in two if entry not in one],
        "lost": [entry for entry in one if entry not in two],
    }


def _named(entries: Sequence[Any], what: str) -> str:
    """Channels by number, tokens by sequence and position."""
    word = what if len(entries) > 1 else what[:-1]
    if what == "channels":
        listed = [str(entry) for entry in entries[:4]]
    else:
        listed = [f"{sequence}:{position}" for sequence, position in entries[:4]]
    return f"{word} {', '.join(listed)}{', ...' if len(entries) > 4 else ''}"


def _short(value: float | None) -> str:
    return show(value, ",.2f" if value is not None and abs(value) < 100 else ",.0f")
