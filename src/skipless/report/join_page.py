"""The report of `skipless compare-connections`: HTML page, its numbers as JSON, Markdown tables.

Reads files only, so it can be made while rows still train and on another machine. Colours are those
of the other report; each depth has its own, set on the section that holds its figures. Read by
`skipless.connections`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.files import to_strict_json, write_atomic
from skipless.jsonable import leaves, to_json
from skipless.recipes.connections import KINDS
from skipless.report import join_numbers
from skipless.report.build import check_out
from skipless.report.cells import cell, show, swatch, table
from skipless.report.html import POLICY, figure_html, machine, section
from skipless.report.join_numbers import JoinRow, JoinTable, tables
from skipless.report.join_plots import comparison, draw_table, styles
from skipless.report.load import RunData, load_run
from skipless.report.plots import Figure
from skipless.report.style import css_variables
from skipless.report.stylesheet import css

TITLE = "Ways for a sublayer to join the stream"
HOW = (
    "Every row is the same small transformer on the same batches; only the way in which a "
    "sublayer joins the stream differs (and, in the last group, start and optimiser). Numbers are "
    "means over the seeds, ± their standard deviation.",
    "A row keeps up with its baseline, the residual model with the same optimiser, when all of "
    "this holds: its metric is in the same range (within "
    f"{join_numbers.SAME_RANGE:.0%}, or two standard deviations of the difference between seeds), "
    f"it drops by at most {join_numbers.LARGEST_DROP:.0%}, it reached at least "
    f"{join_numbers.SMALLEST_SHARE:.0%} of what the baseline learned over token frequencies (of "
    "a classifier: over guessing), the first layer's gradient norm is within a factor of "
    f"{join_numbers.EVEN:g} of the last layer's (median after warm-up; the baseline's own ratio "
    "comes on top), and gradient norms change from one traced step to "
    f"the next at most {join_numbers.STEADY:g} times as much as the baseline's.",
    "Gradient norms are over all parameters of a layer, its gains included, before clipping. Where "
    "gains start at zero, those of the first step are the gains' alone.",
    "Time per step is the median between training steps that follow each other, peak memory the "
    "largest resident size of the process (on CUDA the largest allocation), both measured while "
    "other rows trained on the same machine.",
)
HEAD = (
    "connection",
    "verdict",
    "{metric}",
    "share<small>of the baseline's</small>",
    "learned<small>of the baseline's gain</small>",
    "gradient first/last<small>first step</small>",
    "gradient first/last<small>after warm-up</small>",
    "oscillation",
    "gains<small>mean at the end</small>",
    "time per step",
    "peak memory",
)


def build_connection_report(run_dirs: Sequence[str | Path], out_html: str | Path) -> Path:
    """Compare runs of `connections-*` recipes in one self-contained HTML file; returns its path.

    Beside `report.html` go `report.json` (every number), `report.md` (the tables) and
    `report-NAME.png`, one a figure; the HTML is written last. Runs of other recipes are passed
    over. Raises UserError when none is left, and as `check_out` does.
    """
    out = check_out(out_html)
    found = tables([load_run(path) for path in run_dirs])
    if not found:
        raise UserError(
            f"none of the {len(run_dirs)} runs is of a recipe connections-*; "
            "`skipless compare-connections` trains them"
        )
    parts, figures = [], []
    for joined in found:
        drawn = comparison(joined)
        own = draw_table(joined, drawn) if drawn.rows else []
        figures += own
        parts.append(_part(joined, drawn, own))
    for figure in figures:
        write_atomic(out.with_name(f"{out.stem}-{figure.name}.png"), figure.png)
    command = shlex.join(["skipless", "compare-connections", "--out", str(out.parent)])
    runs = [run for joined in found for row in joined.rows for run in row.runs]
    numbers = {
        "title": TITLE,
        "verdict": {joined.name: joined.summary for joined in found},
        "criteria": {
            "same_range": join_numbers.SAME_RANGE,
            "largest_drop": join_numbers.LARGEST_DROP,
            "smallest_share_learned": join_numbers.SMALLEST_SHARE,
            "largest_ratio_of_gradients": join_numbers.EVEN,
            "largest_oscillation": join_numbers.STEADY,
        },
        "tables": [
            {
                "name": joined.name,
                "num_layers": joined.num_layers,
                "metric": "accuracy" if joined.authors else "held_out_loss",
                "rows": [row.to_dict() for row in joined.rows],
            }
            for joined in found
        ],
        "figures": [figure.name for figure in figures],
        "machines": {str(run.path): machine(run) for run in runs},
        "command": command,
    }
    write_atomic(out.with_suffix(".json"), to_strict_json(numbers, indent=1) + "\n")
    write_atomic(out.with_suffix(".md"), markdown(found))
    return write_atomic(out, _page(found, parts, runs, command))


def markdown(found: Sequence[JoinTable]) -> str:
    """The tables as Markdown, for documentation."""
    parts = []
    for joined in found:
        head = [heading.partition("<small>") for heading in _head(joined)]
        names = [
            f"{a}, {b.removesuffix('</small>')}" if a.startswith("gradient") else a
            for a, _, b in head
        ]
        lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        lines += ["| " + " | ".join([row.label, *_texts(joined, row)]) + " |"
                  for row in joined.rows]  # fmt: skip
        parts.append(f"### {joined.title}\n\n{joined.summary}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _head(joined: JoinTable) -> list[str]:
    metric = "accuracy" if joined.authors else "held-out loss<small>nats a token</small>"
    return [heading.format(metric=metric) for heading in HEAD]


def _texts(joined: JoinTable, row: JoinRow) -> list[str]:
    """All cells of a row but its name, as plain text."""
    form = ".2%" if joined.authors else ".3f"
    spread = f" ± {show(row.spread, form)}" if row.spread is not None else ""
    gains = ", ".join(f"{name} {show(value, '.3g')}" for name, value in row.gains.items())
    memory = None if row.peak_memory is None else row.peak_memory / 2**20
    return [
        row.verdict,
        show(row.metric, form) + spread,
        show(row.share, ".1%"),
        show(row.learned, ".0%"),
        show(row.first_step_ratio, ".2g"),
        show(row.ratio, ".2g"),
        show(row.oscillation, ".2f"),
        gains or "–",
        "–" if row.step_seconds is None else f"{1000 * row.step_seconds:.0f} ms",
        "–" if memory is None else f"{memory:.0f} MiB",
    ]


def _part(joined: JoinTable, drawn: Any, figures: Sequence[Figure]) -> str:
    """One depth: summary, table, figures, in the colours of its rows."""
    looks = styles(joined, drawn)
    body = []
    for row in joined.rows:
        mark = swatch(looks[row.label]) if row.label in looks else ""
        seeds = f"{row.num_seeds} seeds" if row.num_seeds != 1 else "one seed"
        small = f"<small>{escape(KINDS[row.kind].about)}; {seeds}</small>"
        first = f"<th scope=row><span>{mark}{escape(row.label)}</span>{small}</th>"
        texts = _texts(joined, row)
        cells = [cell(text, wide=place == 0) for place, text in enumerate(texts)]
        body.append([first, *cells])
    shown = "".join(map(figure_html, figures))
    inside = section(
        joined.title,
        f'<p class="lede">{escape(joined.summary)}</p>{table(_head(joined), body)}{shown}',
    )
    return f'<div class="table-{joined.name}">\n{inside}\n</div>'


def _page(
    found: Sequence[JoinTable], parts: Sequence[str], runs: Sequence[RunData], command: str
) -> str:
    light, dark = css_variables([])
    style = css(light, dark) + "\ntd.text{min-width:13rem}"
    for joined in found:
        light, dark = css_variables(comparison(joined).rows)
        scope = f".table-{joined.name}"
        style += f"\n{scope}{{{light}}}\n@media (prefers-color-scheme:dark){{{scope}{{{dark}}}}}"
    how = "".join(f"<p>{escape(sentence)}</p>" for sentence in HOW)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(TITLE)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(TITLE)}</h1>\n{how}\n"
        + "\n".join(parts)
        + section("Settings", _settings(runs))
        + section(
            "Make it again",
            f"<p>The same command trains what is missing and writes this page, its JSON, Markdown "
            f"and PNG files:</p><pre>{escape(command)}</pre>",
        )
        + "\n</main>\n</body>\n</html>\n"
    )


def _settings(runs: Sequence[RunData]) -> str:
    """The first run's settings, and of one run a recipe what differs from them."""
    if not runs:
        return ""
    first = leaves(runs[0].config)
    blocks = [
        f"<details><summary>{escape(runs[0].config.name)}: every setting (JSON)</summary>"
        f"<pre>{escape(to_json(runs[0].config))}</pre></details>"
    ]
    seen = {runs[0].config.name}
    for run in runs[1:]:
        if run.config.name in seen:
            continue
        seen.add(run.config.name)
        changes = [
            f"{key} = {value!r}"
            for key, value in leaves(run.config).items()
            if value != first.get(key) and key not in ("name", "label", "note", "train.seed")
        ]
        blocks.append(
            f"<details><summary>{escape(run.config.name)}</summary>"
            f"<pre>{escape(chr(10).join(changes) or 'no difference')}</pre></details>"
        )
    return "".join(blocks)
