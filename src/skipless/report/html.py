"""The page: one HTML file with everything inline, that loads nothing.

Order: what is compared and why, the verdict, the tables, what is missing, the figures, samples,
glossary, settings, machine, how to make it again. All text from run directories is escaped, and a
content policy forbids scripts and requests besides. Read by build.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import escape

from skipless.jsonable import leaves, to_json
from skipless.report.cells import cell, precision_tables, rows_table, swatch, table
from skipless.report.glossary import GLOSSARY, INTRODUCTION
from skipless.report.load import RunData
from skipless.report.plots import Figure
from skipless.report.style import Look, css_variables, looks
from skipless.report.stylesheet import css
from skipless.report.tables import Comparison
from skipless.report.verdict import Statement
from skipless.report.zero_shot import task_tables

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(
    comparison: Comparison,
    statements: Sequence[Statement],
    figures: Sequence[Figure],
    without: Sequence[str],
    *,
    title: str,
    command: str,
) -> str:
    """The whole HTML text. `without` names figures that had no numbers."""
    styles = looks(comparison.rows)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in INTRODUCTION),
        _verdict(statements),
        section("The rows", rows_table(comparison, styles)),
        section("Loss by precision", precision_tables(comparison, styles)),
        section("Zero-shot tasks", task_tables(comparison, styles)),
        _missing(comparison, without),
        section("Figures", "".join(map(figure_html, figures)) or "<p>No figure has numbers.</p>"),
        _samples(comparison, styles),
        section("What the numbers mean", _glossary()),
        section("Settings", _settings(comparison)),
        section("Machine", _machine(comparison)),
        section("Make it again", _commands(comparison, command)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{css(*css_variables(comparison.rows))}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, body: str) -> str:
    """A section under its heading (escaped); nothing for an empty body."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>" if body else ""


def _verdict(statements: Sequence[Statement]) -> str:
    lede, items = "", []
    for statement in statements:
        if statement.topic == "In short":
            lede = f'<p class="lede">{escape(" ".join(statement.sentences))}</p>'
            continue
        points = "".join(f"<li>{escape(s)}</li>" for s in statement.sentences)
        lead = f"<p class=note>{escape(statement.lead)}</p>" if statement.lead else ""
        items.append(f"<dt>{escape(statement.topic)}</dt><dd>{lead}<ul>{points}</ul></dd>")
    return section("The verdict", f'{lede}\n<dl class="findings">{"".join(items)}</dl>')


def _missing(comparison: Comparison, without: Sequence[str]) -> str:
    lines = [f"{row.label}: {m}" for row in comparison.rows for m in row.missing]
    lines += [f"figure “{title}” left out: no run has its numbers" for title in without]
    if not lines:
        return ""
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="missing">\n<h3>What is missing</h3>\n<ul>{listed}</ul>\n</section>'


def figure_html(figure: Figure) -> str:
    """A figure with its title and caption."""
    return (
        f"<figure>\n<h3>{escape(figure.title)}</h3>\n<figcaption>{escape(figure.caption)}"
        f"</figcaption>\n<div class=plot tabindex=0>\n{figure.svg}\n</div>\n</figure>"
    )


def _samples(comparison: Comparison, styles: dict[str, Look]) -> str:
    cards = []
    for row in comparison.rows:
        for sample in row.runs[0].samples:
            prompt = _prose(sample.get("prompt", ""))
            texts = "".join(
                f"<p class=note>{how}</p><blockquote><b>{prompt}</b>{_prose(sample[key])}"
                "</blockquote>"
                for key, how in (
                    ("greedy", "most likely word each time"),
                    ("sampled", "drawn by chance"),
                )
                if key in sample
            )
            cards.append(
                f'<div class="sample"><h3>{swatch(styles[row.label])}'
                f"{escape(row.label)}</h3>{texts}</div>"
            )
    return section(
        "What they write", f'<div class="samples">{"".join(cards)}</div>' if cards else ""
    )


def _prose(text: object) -> str:
    """Model text as flowing HTML; line breaks are shown as signs, since young models love them."""
    return escape(str(text)).replace("\n", "<i>↵</i> ")


def _glossary() -> str:
    items = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>"
        for term, text in GLOSSARY.items()
    )
    return f'<dl class="glossary">{items}</dl>'


def _settings(comparison: Comparison) -> str:
    first = leaves(comparison.rows[0].runs[0].config)
    blocks = []
    for index, row in enumerate(comparison.rows):
        config = row.runs[0].config
        changes = [
            f"{k} = {v!r}"
            for k, v in leaves(config).items()
            if index and k not in ("name", "label", "note") and v != first[k]
        ]
        head = "every setting below; other rows show what differs from this one"
        if index:
            head = "\n".join(changes) or "no difference from the first row"
        where = ", ".join(str(run.path) for run in row.runs)
        blocks.append(
            f"<details><summary>{escape(row.label)}</summary>\n<p class=note>{escape(where)}</p>"
            f"<pre>{escape(head)}</pre>\n<details><summary>all settings (JSON)</summary>"
            f"<pre>{escape(to_json(config))}</pre></details></details>"
        )
    return "".join(blocks)


def machine(run: RunData) -> dict[str, str]:
    """Versions, processor, threads, time and memory of a run, as text; "–" where not recorded."""
    found = run.environment
    seconds = run.result.get("seconds")
    if seconds is None:
        seconds = next((r["seconds"] for r in reversed(run.metrics) if "seconds" in r), None)
    memory = next(
        (
            v
            for k, v in {**found, **run.result}.items()
            if "memory" in k and isinstance(v, (int, float))
        ),
        None,
    )
    timed = isinstance(seconds, (int, float)) and math.isfinite(seconds)
    device = found.get("cuda") or found.get("processor")
    return {
        "training": f"{seconds:,.0f} s" if timed else "–",
        "peak memory": f"{memory / 2**20:,.0f} MiB" if memory else "–",
        "torch": str(found.get("torch", "–")),
        "Python": str(found.get("python", "–")),
        "device": str(device or "–"),
        "threads": f"{found.get('threads', '–')} of {found.get('cores', '–')}",
        "started": str(found.get("started", "–")),
    }


def _machine(comparison: Comparison) -> str:
    runs = [(row.label, run) for row in comparison.rows for run in row.runs]
    lines = [
        [
            f"<th scope=row>{escape(label)}</th>",
            *(cell(v, wide=k == "device") for k, v in machine(run).items()),
        ]
        for label, run in runs
    ]
    return table(["model", *machine(runs[0][1])], lines)


def _commands(comparison: Comparison, command: str) -> str:
    made = dict.fromkeys(
        # Older runs noted the file that `python -m skipless` starts.
        re.sub(r"^__main__\.py ", "skipless ", str(run.environment["command"]))
        for row in comparison.rows
        for run in row.runs
        if run.environment.get("command")
    )
    listed = escape("\n".join(made))
    trained = f"<p>The runs were made by:</p><pre>{listed}</pre>" if made else ""
    versions = {
        str(run.environment.get("skipless"))
        for row in comparison.rows
        for run in row.runs
        if run.environment.get("skipless")
    }
    by = f" skipless {', '.join(sorted(versions))}." if versions else ""
    return (
        f"{trained}<p>This page, its JSON and its PNG files:</p><pre>{escape(command)}</pre>"
        f"<p class=note>Every number of the tables is also in the JSON file beside this page; "
        f"each run's directory holds its whole configuration.{escape(by)}</p>"
        f"{_json_note(comparison)}"
    )


def _json_note(comparison: Comparison) -> str:
    pairs = {p.row.label: p.reference.label for p in comparison.pairs}
    if not pairs:
        return ""
    return (
        f"<details><summary>which row was compared with which</summary>"
        f"<pre>{escape(json.dumps(pairs, indent=2))}</pre></details>"
    )
