"""The tables of the page as HTML, and how a number stands in a cell.

Cells are escaped here; nothing that comes from a run directory reaches the page unescaped. Read by
html and text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from skipless.report.style import Look
from skipless.report.tables import Comparison, Pair, Row

PRECISION_NOTE = (
    "<p class=quiet>Held-out loss in nats, below it the increase over full precision. Bold: the "
    "lowest loss of a column. Embedding and head stay in full precision.</p>"
)
OPTIMISER = "optimiser<small>learning rate</small>"
CONNECTION = "connection<small>tokens seen</small>"
TEXT_HEADINGS = (OPTIMISER, CONNECTION, "device", "verdict")


def show(value: float | None, form: str = ".3f", *, absent: str = "–") -> str:
    """A number for a table cell; a dash when not measured, words when not finite.

    What rounds to zero has no minus.
    """
    if value is None:
        return absent
    if not math.isfinite(value):
        return "not finite"
    text = format(value, form)
    return text if set(text) & set("123456789") else format(0.0, form)


def swatch(look: Look) -> str:
    """The row's line as it looks in the figures."""
    pattern = look.line[1] if isinstance(look.line, tuple) else ()
    dashes = f' stroke-dasharray="{" ".join(f"{2 * d:g}" for d in pattern)}"' if pattern else ""
    return (
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><line x1="1" y1="5" x2="33" '
        f'y2="5" stroke="var({look.variable})" stroke-width="3"{dashes}/></svg>'
    )


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in a box that scrolls sideways; cells are ready-made HTML."""
    kinds = {heading: "" for heading in head} | dict.fromkeys(TEXT_HEADINGS, " class=text")
    top = "".join(f"<th scope=col{kinds[heading]}>{heading}</th>" for heading in head)
    lines = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in body)
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table></div>"
    )


def row_name(row: Row, styles: dict[str, Look]) -> str:
    """The heading cell of a row: its line, its label, and whether it is not finished."""
    mark = f"<small>not finished: {escape(row.unfinished)}</small>" if row.unfinished else ""
    return f"<th scope=row><span>{swatch(styles[row.label])}{escape(row.label)}</span>{mark}</th>"


def cell(text: str, small: str = "", *, best: bool = False, wide: bool = False) -> str:
    """One cell, escaped; `small` is a quiet second line."""
    kind = ' class="best"' if best else ' class="text"' if wide else ""
    note = f"<small>{escape(small)}</small>" if small else ""
    return f"<td{kind}>{escape(text)}{note}</td>"


def _lowest(rows: Iterable[Row], of: Callable[[Row], float | None]) -> float | None:
    values = [v for row in rows if (v := of(row)) is not None and math.isfinite(v)]
    return min(values) if len(values) > 1 else None


def _doubt(pair: Pair) -> str:
    """Why a gap is not to be built upon; empty where it may be."""
    if pair.gap is None:
        return ""
    if pair.row.learned_little or pair.reference.learned_little:
        return "learned too little"
    if pair.established:
        return ""
    return "error not known" if pair.standard_error is None else "not established"


def rows_table(comparison: Comparison, styles: dict[str, Look]) -> str:
    """The main table, a line a row, and the rows' notes under it."""
    gaps = {pair.row.label: pair for pair in comparison.pairs}
    best_loss = _lowest(comparison.rows, lambda r: r.loss)
    best_error = _lowest(comparison.rows, lambda r: r.error)
    body = []
    for row in comparison.rows:
        pair, worst = gaps.get(row.label), row.worst_site
        seeds = f"{row.num_seeds} seeds" if row.num_seeds > 1 else "one seed"
        plus = "" if row.standard_error is None else f" ± {show(row.standard_error)}"
        loss = show(row.loss) + (plus if row.loss is not None and not row.diverged else "")
        body.append(
            [
                row_name(row, styles),
                cell(loss, seeds, best=row.loss is not None and row.loss == best_loss),
                cell(
                    show(pair.gap if pair else None, "+.1%"),
                    "" if pair is None else _doubt(pair),
                ),
                cell(
                    show(row.perplexity, ".1f"),
                    "" if row.bits_per_byte is None else f"{show(row.bits_per_byte)} bits/byte",
                ),
                cell(show(row.kurtosis, ".2f" if (row.kurtosis or 0) < 100 else ",.0f")),
                cell(
                    "–" if worst is None else f"{show(worst['sqnr'], '.1f')} dB",
                    "" if worst is None else f"{show(worst['gap'], '.1f')} dB below ideal",
                ),
                cell(
                    show(row.error, ".2f"), best=row.error is not None and row.error == best_error
                ),
                cell(row.optimizer, f"lr {row.learning_rate:g}", wide=True),
                cell(row.connection, f"{row.tokens:,} tokens", wide=True),
            ]
        )
    scheme = next((r.worst_site["scheme"] for r in comparison.rows if r.worst_site), None)
    at = f"<small>at {escape(str(scheme))}</small>" if scheme else ""
    error_at = comparison.error_scheme
    error = f"<small>at {escape(error_at)}</small>" if error_at else ""
    head = [
        "model",
        "held-out loss<small>nats per token</small>",
        "gap<small>to its residual twin</small>",
        "perplexity",
        "mean |kurtosis|<small>middle third</small>",
        f"worst tensor{at}",
        f"R_N{error}",
        OPTIMISER,
        CONNECTION,
    ]
    notes = [
        f"<li>{escape(row.label)}: {escape(row.note)}</li>" for row in comparison.rows if row.note
    ]
    listed = f'<ul class="note">{"".join(notes)}</ul>' if notes else ""
    return table(head, body) + listed


def precision_tables(comparison: Comparison, styles: dict[str, Look]) -> str:
    """A table a scope: loss at every scheme, below it the increase; empty without quant.json."""
    parts = []
    for scope in comparison.scopes():
        schemes = comparison.schemes(scope)
        best = {
            s: _lowest(comparison.rows, lambda r, s=s, scope=scope: r.loss_under(s, scope))
            for s in schemes
        }
        lowest = _lowest(comparison.rows, lambda r: r.loss)
        body = []
        for row in comparison.rows:
            full = row.loss is not None and row.loss == lowest
            cells = [row_name(row, styles), cell(show(row.loss), best=full)]
            for scheme in schemes:
                loss = row.loss_under(scheme, scope)
                increase = row.increase(scheme, scope)
                cells.append(
                    cell(
                        show(loss),
                        "" if increase is None else show(increase, "+.3f"),
                        best=loss is not None and loss == best[scheme],
                    )
                )
            body.append(cells)
        parts.append(
            f"<h3>{escape(scope)} scope</h3>"
            + table(["model", "full", *map(escape, schemes)], body)
        )
    if not parts:
        return ""
    return PRECISION_NOTE + "".join(parts)
