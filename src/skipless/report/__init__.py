"""The report: run directories in, one page that a newcomer understands out. Files only, no torch.

load    directories -> RunData, saying what is missing
measures, inside    numbers and curves of one run
tables, comparing    rows (seeds averaged) and pairs (residual-free beside its residual twin)
verdict sentences from the numbers, whichever way they come out
style, scales, canvas, plots    figures
glossary, stylesheet, cells, html, text, build    the page, the terminal table, and the files
join_*  the report of `skipless compare-connections`
timeline, timeline_page, heat, frame    a log over time; `skipless.diagnose` draws on the latter two
"""

from skipless.report.build import build_report
from skipless.report.comparing import compare
from skipless.report.load import RunData, find_runs, load_run, load_runs
from skipless.report.tables import Comparison, Pair, Row
from skipless.report.text import print_table, summary_table
from skipless.report.verdict import Statement, verdict

__all__ = [
    "Comparison",
    "Pair",
    "Row",
    "RunData",
    "Statement",
    "build_report",
    "compare",
    "find_runs",
    "load_run",
    "load_runs",
    "print_table",
    "summary_table",
    "verdict",
]
