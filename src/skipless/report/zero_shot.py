"""Zero-shot tasks of the rows: a table and a figure, where tasks.json is there.

`skipless eval RUN --tasks` writes it; few runs have one, so that a report without says nothing of
it. Read by html, plots and build.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from skipless.report.canvas import Pen
from skipless.report.cells import cell, row_name, show, table
from skipless.report.load import RunData, number
from skipless.report.measures import mean
from skipless.report.style import Look
from skipless.report.tables import Comparison, Row

FULL, AVERAGE = "full precision", "average"
NOTE = (
    "<p class=quiet>Share of questions answered right, ± its standard error over questions; "
    "acc_norm where lm-eval reports it, else acc or exact_match. Under a scheme, in small, the "
    "change to full precision on the same questions, with its 95 % interval: one that holds 0 "
    "shows nothing.</p>"
)
Numbers = dict[str, dict[str, dict[str, float | None]]]
"""{scheme: {task or "average": {"value", "error", "difference", "low", "high", "chance"}}}"""


def task_numbers(row: Row) -> Numbers:
    """What the tasks of a row came to; of several seeds the means, without errors."""
    found = [numbers for run in row.runs if (numbers := _of_run(run))]
    if len(found) < 2:
        return found[0] if found else {}
    joined: Numbers = {}
    for scheme in found[0]:
        for task in found[0][scheme]:
            each = [f[scheme][task] for f in found if task in f.get(scheme, {})]
            joined.setdefault(scheme, {})[task] = {
                key: mean(one.get(key) for one in each) for key in ("value", "difference", "chance")
            }
    return joined


def _of_run(run: RunData) -> Numbers:
    """Of tasks.json, if it is of the weights that the run ended with."""
    tasks = run.tasks or {}
    measured = tasks.get("measured")
    step = measured.get("step") if isinstance(measured, dict) else None
    if step is not None and step != run.result.get("step"):
        return {}
    from skipless.evaluate.tasks.tables import lead_metric

    about = {a.get("name"): a for a in _dicts(tasks.get("tasks"))}
    numbers: Numbers = {}
    for row in _dicts(tasks.get("rows")):
        entries = row.get("tasks")
        scheme, of_task = str(row.get("scheme")), {}
        for name, entry in (entries if isinstance(entries, dict) else {}).items():
            metric = lead_metric(entry) if isinstance(entry, dict) else None
            value = number(entry, metric or "acc")
            if value is None:
                continue
            paired = entry.get("against_full_precision")
            paired = paired.get(metric) if isinstance(paired, dict) else None
            of_task[name] = {
                "value": value, "error": number(entry, f"{metric}_stderr"),
                **_difference(paired, "difference", "interval"),
                "chance": number(about.get(name), "chance"),
            }  # fmt: skip
        if len(of_task) > 1:
            average = number(row, "average")  # which lm-eval does not give
            if average is None:
                average = mean(one["value"] for one in of_task.values())
            of_task[AVERAGE] = {
                "value": average, "error": None,
                **_difference(row, "average_difference", "average_interval"),
                "chance": mean(one["chance"] for one in of_task.values()),
            }  # fmt: skip
        numbers[scheme] = of_task
    return {scheme: of_task for scheme, of_task in numbers.items() if of_task}


def _difference(row: Any, key: str, interval: str) -> dict[str, float | None]:
    ends = row.get(interval) if isinstance(row, dict) else None
    ends = dict(enumerate(ends)) if isinstance(ends, list) else {}
    return {
        "difference": number(row, key), "low": number({"v": ends[0]}, "v") if 0 in ends else None,
        "high": number({"v": ends[1]}, "v") if 1 in ends else None,
    }  # fmt: skip


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def task_tables(comparison: Comparison, styles: dict[str, Look]) -> str:
    """A table a scheme, a line a row and a column a task; empty where no run was asked."""
    numbers = {row.label: task_numbers(row) for row in comparison.rows}
    schemes = dict.fromkeys(s for found in numbers.values() for s in found)
    parts = []
    for scheme in schemes:
        asked = [row for row in comparison.rows if scheme in numbers[row.label]]
        tasks = list(dict.fromkeys(t for row in asked for t in numbers[row.label][scheme]))
        tasks = sorted(tasks, key=lambda t: t == AVERAGE)
        body = [
            [row_name(row, styles), *(_cell(numbers[row.label][scheme].get(t, {})) for t in tasks)]
            for row in asked
        ]
        chance = [
            mean(numbers[row.label][scheme].get(t, {}).get("chance") for row in asked)
            for t in tasks
        ]
        guessing = ["<th scope=row>guessing</th>", *(cell(show(value)) for value in chance)]
        parts.append(
            f"<h3>{escape(scheme)}</h3>" + table(["model", *map(escape, tasks)], [*body, guessing])
        )
    return NOTE + "".join(parts) + _paper(numbers) if parts else ""


def _cell(found: dict[str, float | None]) -> str:
    value, error = found.get("value"), found.get("error")
    plus = "" if value is None or error is None else f" ± {show(error)}"
    difference, low, high = (found.get(key) for key in ("difference", "low", "high"))
    small = "" if difference is None else show(difference, "+.3f")
    if small and low is not None and high is not None:
        small += f" [{show(low, '+.3f')}, {show(high, '+.3f')}]"
    return cell(show(value) + plus, small)


def _paper(numbers: dict[str, Numbers]) -> str:
    """The paper's averages, where a row was asked the same eight tasks."""
    from skipless.evaluate.tasks.catalog import CORE8
    from skipless.evaluate.tasks.tables import PAPER, PAPER_SCHEMES

    if not any(set(CORE8) <= set(found.get(FULL, {})) for found in numbers.values()):
        return ""

    body = [
        [f"<th scope=row>{escape(name)}</th>", *(cell(show(value)) for value in values)]
        for name, *values in PAPER
    ]
    return (
        "<h3>The paper's averages over these tasks</h3><p class=quiet>arXiv 2605.25880: 194 M "
        "parameters, 24 layers, 50,000 steps; single tasks are not at hand.</p>"
        + table(["model", *PAPER_SCHEMES], body)
    )


def draw_tasks(pen: Pen, axes: Any) -> None:
    """The average accuracy by scheme, and what guessing gives."""
    (panel,) = axes
    found = {row.label: task_numbers(row) for row in pen.comparison.rows}
    schemes = list(dict.fromkeys(scheme for numbers in found.values() for scheme in numbers))
    chances = []
    for row in pen.comparison.rows:
        points = []
        for place, scheme in enumerate(schemes):
            of_task = found[row.label].get(scheme, {})
            one = of_task.get(AVERAGE) or next(iter(of_task.values()), {})
            value = one.get("value")
            if value is not None and math.isfinite(value):
                points.append((float(place), value))
                chances.append(one.get("chance"))
        if points:
            pen.line(panel, row, [x for x, _ in points], [y for _, y in points])
    chance = mean(chances)
    if chance is not None:
        pen.yardstick(panel, chance, "guessing")
    panel.set_xticks(range(len(schemes)), schemes, rotation=35, ha="right")
    panel.set(ylabel="average accuracy")
