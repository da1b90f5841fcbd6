"""The page and files of a comparison: heat maps place by layer, tables that sort.

    comparison.json    every number, written last
    sites.csv, weights.csv, depth.csv    a line a site, parameter, place of the stream
    NAME.png, index.html

Read by comparing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from skipless.diagnose.comparison.difference import KEYS, RATIOS, Difference, Row
from skipless.diagnose.page import GLOSSARY as TERMS
from skipless.diagnose.writing import write_files
from skipless.report.canvas import Pen, Series, render, series_rows
from skipless.report.frame import document, glossary, listed, number, sortable, word
from skipless.report.heat import heat_figure
from skipless.report.html import figure_html, section
from skipless.report.load import RESIDUAL_FREE
from skipless.report.plots import Figure

RESULT = "comparison.json"
SERIES = (Series("distance of the streams", RESIDUAL_FREE, "KL-Shampoo"),)
NO_LAYER = "–"
GLOSSARY = {
    "Change": "B minus A; a positive change of a ratio in dB says that B rounds better, a positive "
    "one of kurtosis that its tails are heavier.",
    "Relative distance": "Length of B's values minus A's over the length of A's: 0 is equal, 1 as "
    "far apart as A is from zero.",
    "KL divergence": "Of the next-token distributions, from A to B, in nats a token: 0 is equal.",
    "Gained, lost": "Outlier channels and tokens that only B, only A has; tokens as "
    "sequence:position, both from 0.",
    **{
        term: TERMS[term]
        for term in (
            "Site", "Signal to rounding noise (SQNR)", "Every token alike", "Excess kurtosis",
            "max / sd", "S2", "Outlier token", "Outlier channel",
        )
    },
}  # fmt: skip


def write(result: Difference, out: Path) -> Path:
    """Write all files into the folder `out`; returns the page's path."""
    figures, without = draw(result)
    text = page(result, figures, without)
    return write_files(out, RESULT, figures, tables(result), text, result.to_dict())


def tables(result: Difference) -> dict[str, list[Row]]:
    """The flat tables: "kurtosis a", "kurtosis b", "kurtosis change"; lists as words."""
    return {
        "sites": [_flat(row) for row in result.sites],
        "weights": [_flat(row) for row in result.weights],
        "depth": result.depth,
    }


def _flat(row: Row) -> Row:
    flat: Row = {}
    for key, value in row.items():
        if key in ("channels", "tokens"):
            for how in ("gained", "lost"):
                flat[f"{key} {how}"] = "" if value is None else _entries(value[how], key)
        elif isinstance(value, dict):
            flat |= {f"{key} {inner}": number_ for inner, number_ in value.items()}
        else:
            flat[key] = value
    return flat


def _entries(entries: Sequence[Any], key: str) -> str:
    if key == "channels":
        return " ".join(map(str, entries))
    return " ".join(f"{sequence}:{position}" for sequence, position in entries)


def draw(result: Difference) -> tuple[list[Figure], list[str]]:
    """(figures, titles of those that have no numbers)."""
    key = result.key()
    wanted: list[tuple[str, Figure | None]] = []
    if key is not None:
        title = f"Change of the ratio to rounding noise, every token alike, at {key.split(' ')[1]}"
        wanted.append((title, _map(result, "rounding", title, "B minus A (dB)", lambda row: (
            row[key]["change"]))))  # fmt: skip
    title = "Change of the tails"
    wanted.append((title, _map(result, "tails", title, "sign × log10(1 + |kurtosis|), B minus A",
                               lambda row: _tails(row["kurtosis"]))))  # fmt: skip
    title = "Where the streams part"
    wanted.append((title, _depth(result, title)))
    found = [figure for _, figure in wanted if figure is not None]
    return found, [title for title, figure in wanted if figure is None]


def _tails(pair: Row) -> float | None:
    """Change of the signed logarithm, so that a giant does not outshine all other sites."""
    if pair["change"] is None:
        return None
    a, b = (math.copysign(math.log10(1 + abs(pair[key])), pair[key]) for key in "ab")
    return b - a


def _map(
    result: Difference, name: str, title: str, unit: str, of: Callable[[Row], float | None]
) -> Figure | None:
    """Places down, layers across; what belongs to no layer has a column of its own."""
    cells: dict[str, dict[Any, float]] = {}
    for row in result.sites:
        value, layer = of(row), row["layer"]
        if value is not None:
            place = row["site"]
            if layer is not None:
                place = re.sub(rf"(^|\.){layer}(?=[.:]|$)", r"\1*", place, count=1)
            cells.setdefault(place, {})[NO_LAYER if layer is None else layer] = value
    layers = sorted({k for by in cells.values() for k in by if k != NO_LAYER})
    across = ([NO_LAYER] if any(NO_LAYER in by for by in cells.values()) else []) + layers
    values = [[by.get(layer, math.nan) for layer in across] for by in cells.values()]
    return heat_figure(
        values, list(cells), across, name=name, title=title, unit=unit, centred=True,
        low_is_red=name == "rounding",
        caption="A row a place, a column a layer (–: belongs to none); red is worse in B, empty is "
        "not measured.",
        labels=("layer", "place"), subject=_subject(result),
    )  # fmt: skip


def _subject(result: Difference) -> str:
    return f"A {Path(result.a).name}, B {Path(result.b).name}"


def _depth(result: Difference, title: str) -> Figure | None:
    rows = series_rows(SERIES)
    points = [(i, r["distance"]) for i, r in enumerate(result.depth) if r["distance"] is not None]

    def on(pen: Pen, axes: Any) -> None:
        (panel,) = axes
        if points:
            pen.line(panel, rows.rows[0], [float(x) for x, _ in points], [y for _, y in points])
            panel.set_ylim(bottom=0)
        panel.set(xlabel="place in order of computation", ylabel="|x_B - x_A| / |x_A|")

    both = render(rows, on, 1, name="depth", title=title, subject=_subject(result))
    if both is None:
        return None
    caption = "On the first sequences, after every block (or sublayer, or linear layer)."
    return Figure(name="depth", title=title, caption=caption, svg=both[0], png=both[1])


def page(result: Difference, figures: Sequence[Figure], without: Sequence[str]) -> str:
    """The whole HTML text; `without` names figures that had no numbers."""
    missing = [*result.missing, *(f"figure “{title}”: no numbers" for title in without)]
    alone = [f"A: {name}" for name in result.only_a] + [f"B: {name}" for name in result.only_b]
    parts = [
        "<h1>Two models, site by site</h1>",
        f"<p>A: {escape(result.a)}<br>B: {escape(result.b)}</p><p>{escape(result.about)}; changes "
        "are B minus A.</p>",
        section("Worst first", listed(result.lines(), ordered=True)),
        section("Outputs", _outputs(result)),
        section("Figures", "".join(map(figure_html, figures))),
        section("Sites", _sites(result)),
        section("Outliers gained and lost", _outliers(result)),
        section("Stream by depth", _depth_table(result)),
        section("Parameters", _weights(result)),
        section("Sites of one model only", listed(alone)),
        section("What could not be measured", listed(missing)),
        section("What the numbers mean", glossary(GLOSSARY)),
    ]
    return document("Two models, site by site", parts, series_rows(SERIES).rows)


def _outputs(result: Difference) -> str:
    found = result.outputs
    if found is None:
        return ""
    words = {
        "distance": "relative distance of the outputs", "loss_a": "loss of A (nats a token)",
        "loss_b": "loss of B (nats a token)", "loss_change": "loss, B minus A",
        "standard_error": "its paired standard error", "kl": "KL divergence (nats a token)",
        "agreement": "share of tokens with the same most likely next one",
    }  # fmt: skip
    body = [
        [word(text), number(found[key], ".1%" if key == "agreement" else ".4g")]
        for key, text in words.items() if found[key] is not None
    ]  # fmt: skip
    return sortable(["what", "value"], body) if body else ""


def _sites(result: Difference) -> str:
    forms = dict.fromkeys(KEYS, ".2f") | {"max_abs": ".4g", "std": ".4g"}
    keys = [f"{ratio} {scheme}" for scheme in result.schemes for ratio in RATIOS]
    keys = [key for key in keys if any(key in row for row in result.sites)]
    forms |= dict.fromkeys(keys, ".1f")
    names = {key: key.replace("_", " ") for key in forms} | {
        key: f"{'every token alike' if key.startswith('token') else 'SQNR pooled'}, "
        f"{key.split(' ')[1]} (dB)"
        for key in keys
    }
    order = [*keys[:1], "kurtosis", "max_over_std", "channel_energy", *keys[1:],
             "kurtosis_per_token", "max_abs", "std"]  # fmt: skip
    head = ["site", "kind", "layer"]
    for key in order:
        head += [names[key], "in A", "in B"]
    body = []
    for row in result.sites:
        cells = [word(row["site"]), word(row["kind"].replace("_", " ")),
                 number(row["layer"], ".0f")]  # fmt: skip
        for key in order:
            form = forms[key]
            sign = f"+{form}"
            cells += [number(row[key]["change"], sign), number(row[key]["a"], form),
                      number(row[key]["b"], form)]  # fmt: skip
        body.append(cells)
    return sortable(head, body)


def _outliers(result: Difference) -> str:
    body = []
    for row in result.tensors():
        found = [row[key] for key in ("channels", "tokens")]
        if any(pair and (pair["gained"] or pair["lost"]) for pair in found):
            body.append([word(row["site"]), *(
                word("–" if pair is None else _entries(pair[how], key))
                for key, pair in zip(("channels", "tokens"), found, strict=True)
                for how in ("gained", "lost")
            )])  # fmt: skip
    if not body:
        return "<p>No tensor gained or lost an outlier channel or an outlier token.</p>"
    head = ["tensor", "channels gained", "channels lost", "tokens gained", "tokens lost"]
    return sortable(head, body)


def _depth_table(result: Difference) -> str:
    body = [
        [word(r["site"]), number(r["layer"], ".0f"), number(r["distance"], ".4g")]
        for r in result.depth
    ]
    return sortable(["site", "layer", "relative distance"], body) if body else ""


def _weights(result: Difference) -> str:
    body = [
        [word(r["site"]), word(" × ".join(map(str, r["shape"]))), number(r["distance"], ".4g"),
         *(number(r[key][side]) for key in ("kurtosis", "max_over_std") for side in "ab")]
        for r in result.weights
    ]  # fmt: skip
    head = ["parameter", "shape", "relative distance", "excess kurtosis in A", "in B",
            "max / sd in A", "in B"]  # fmt: skip
    return sortable(head, body) if body else ""
