"""The frame of pages with tables that sort: document, tables, cells, glossary.

One HTML file with everything inline, that loads nothing. The one script sorts tables; the page's
policy allows it by its hash and nothing else. Read by the pages of `skipless.diagnose` and of logs
over time.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from skipless.report.cells import show
from skipless.report.html import POLICY
from skipless.report.style import css_variables
from skipless.report.stylesheet import css
from skipless.report.tables import Row

SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
    const up = head.getAttribute('aria-sort') !== 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const value = row => {
      const text = row.cells[column].dataset.value;
      return text === '' ? null : isNaN(text) ? text : Number(text);
    };
    const rows = [...table.tBodies[0].rows].map(row => [value(row), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = a < b ? -1 : a > b ? 1 : 0;
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}
document.documentElement.dataset.ready = 'yes';
"""
LONG = 40
"""Characters from which on a cell of text is a sentence."""
STYLE = """
th button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;
 text-align:inherit}
th[aria-sort] button{text-decoration:underline}
th[aria-sort=ascending] button::after{content:" ↑"}
th[aria-sort=descending] button::after{content:" ↓"}
.tall{max-height:40rem;overflow:auto}
.tall thead th{position:sticky;top:0;background:var(--page);z-index:1}
.sortable td.text,.sortable th.text{text-align:left;min-width:0}
.sortable td.text{white-space:nowrap}.sortable td.long{white-space:normal;min-width:24rem}
.lines{padding-left:1.4rem;max-width:none}.lines li{margin:.35rem 0;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
"""


def document(title: str, parts: Sequence[str], rows: Sequence[Row] = ()) -> str:
    """The whole HTML text: `parts` are ready HTML, empty ones are left out; `rows` are those whose
    colours the figures use. What comes from a model or a log has to be escaped by then."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'"
    style = css(*css_variables(rows)) + STYLE
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def listed(lines: Sequence[str], *, ordered: bool = False) -> str:
    """Lines of text as an HTML list; empty without any."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    if not items:
        return ""
    return f'<ol class="lines">{items}</ol>' if ordered else f"<ul>{items}</ul>"


def glossary(terms: Mapping[str, str]) -> str:
    """Terms and what they mean."""
    items = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in terms.items()
    )
    return f'<dl class="glossary">{items}</dl>'


def sortable(head: Sequence[str], body: Sequence[Sequence[tuple[Any, str]]]) -> str:
    """A table whose columns sort: cells are (value to sort by, ready HTML); the first is a name.

    Columns of text stand to the left, long ones in a width in which sentences can be read.
    """
    kinds = ["", *(_kind([row[place][0] for row in body]) for place in range(1, len(head)))]
    top = "".join(
        f"<th scope=col{kind}><button type=button>{escape(text)}</button></th>"
        for text, kind in zip(head, kinds, strict=True)
    )
    lines = []
    for row in body:
        cells = []
        for place, (value, html) in enumerate(row):
            key = "" if value is None else escape(str(value), quote=True)
            tag = "th scope=row" if place == 0 else f"td{kinds[place]}"
            cells.append(f'<{tag} data-value="{key}">{html}</{tag[:2]}>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll tall" tabindex="0"><table class="sortable">\n<thead><tr>{top}</tr>'
        "</thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table></div>"
    )


def _kind(values: Sequence[Any]) -> str:
    """The class of a column's cells, as an attribute."""
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        return ""
    return ' class="text long"' if max(map(len, texts)) > LONG else " class=text"


def number(value: float | None, form: str = ".2f") -> tuple[Any, str]:
    """A cell of a number: what it sorts by, and how it looks."""
    if value is not None and abs(value) >= 1000 and "," not in form:
        form = ",.0f"
    return value, escape(show(value, form))


def word(text: str) -> tuple[Any, str]:
    """A cell of text, escaped."""
    return text, escape(text)
