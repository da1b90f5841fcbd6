"""Task results as text, Markdown, a plot and files. Read by the command line."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skipless.errors import counted
from skipless.evaluate.tasks.catalog import CORE8
from skipless.evaluate.tasks.statistics import ROUNDING
from skipless.files import disk_error, make_directory, to_strict_json, write_atomic

JSON, MARKDOWN, PLOT, DOCUMENTS = "tasks.json", "tasks.md", "tasks.png", "tasks-documents.jsonl"

PAPER = (
    ("residual + AdamW", 0.449, 0.378, 0.369, 0.380),
    ("residual + KL-Shampoo", 0.452, 0.453, 0.402, 0.348),
    ("residual-free + KL-Shampoo", 0.435, 0.433, 0.429, 0.414),
)
"""Averages over the same eight tasks in BF16, W8A12, W8A8 and W8A6, of models of 194 M parameters,
24 layers, 50,000 steps. Source: [RF] of docs/equations.md."""
PAPER_SCHEMES = ("BF16", "W8A12", "W8A8", "W8A6")


def task_lines(summary: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the accuracies: a header, a row a task, the average; a column a scheme."""
    rows = summary["rows"]
    known = {about["name"]: about for about in summary.get("tasks", ())}
    lines = [["task", "questions", "chance", "metric", *(row["scheme"] for row in rows)]]
    for name in rows[0]["tasks"]:
        about = known.get(name, {})
        for metric in ("acc", "acc_norm", *_others(rows[0]["tasks"][name])):
            if metric not in rows[0]["tasks"][name]:
                continue
            cells = [_value(row["tasks"][name], metric) for row in rows]
            size, chance = about.get("num_questions"), about.get("chance")
            lines.append([
                name, "" if size is None else str(size),
                "" if chance is None or not metric.startswith("acc") else f"{chance:.3f}",
                metric, *cells,
            ])  # fmt: skip
    if "average" in rows[0] and len(rows[0]["tasks"]) > 1:
        chance = sum(about["chance"] for about in known.values()) / len(known)
        lines.append(["average", "", f"{chance:.3f}", "acc_norm or acc",
                      *(f"{row['average']:.3f}" for row in rows)])  # fmt: skip
        lines.append(["average", "", f"{chance:.3f}", "acc",
                      *(f"{row['average_acc']:.3f}" for row in rows)])  # fmt: skip
    return lines


def lead_metric(entry: Mapping[str, Any]) -> str | None:
    """The metric of a task that stands for it; None where it has no share of right answers."""
    written = [k for k in entry if k.startswith("exact_match") and not k.endswith("_stderr")]
    return next((key for key in ("acc_norm", "acc", *written) if key in entry), None)


def _others(entry: Mapping[str, Any]) -> list[str]:
    """Numbers that lm-eval gives under other names."""
    own = ("acc", "acc_norm", "num_ties", "seconds", "sample_len", "sample_count")
    return [
        key for key, value in entry.items()
        if key not in own and "stderr" not in key and isinstance(value, float)
    ]  # fmt: skip


def _value(entry: Mapping[str, Any], metric: str) -> str:
    error = entry.get(f"{metric}_stderr")
    form = ".3f" if abs(entry[metric]) < 1e5 else ".2e"  # a perplexity has no end
    shown = f"{entry[metric]:{form}}"
    return f"{shown} ± {error:{form}}" if isinstance(error, float) else shown


def comparison_lines(summary: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the paired differences: a header, a row a scheme and task, averages; [] for none."""
    lines = []
    for row in summary["rows"]:
        for name, entry in row["tasks"].items():
            found = entry.get("against_full_precision")
            if not found:
                continue
            metric = lead_metric(found) or ""
            cell = found.get(metric)
            flips = (cell or {}).get("flips")
            changed = "" if flips is None else f"{flips} of {found['num_questions']}"
            spread = [f"{found[key]:.4f}" if key in found else "" for key in ("kl_mean", "kl_p95")]
            lines.append([row["scheme"], name, metric, *_change(cell), changed, *spread])
            if "log_likelihood" in found:
                nats = _change(found["log_likelihood"])
                lines.append([row["scheme"], name, "log-likelihood, nats", *nats, "", "", ""])
        if "average_difference" in row and len(row["tasks"]) > 1:
            cell = {"difference": row["average_difference"], "interval": row["average_interval"]}
            lines.append([row["scheme"], "average", "acc_norm or acc", *_change(cell), "", "", ""])
    head = ["scheme", "task", "metric", "difference", "95 % interval", "answers changed",
            "KL mean", "KL 95 %"]  # fmt: skip
    return [head, *lines] if lines else []


def _change(cell: Mapping[str, Any] | None) -> list[str]:
    """A difference and its interval; blanks for none."""
    if cell is None:
        return ["", ""]
    low, high = cell["interval"]
    return [f"{cell['difference']:+.3f}", f"[{low:+.3f}, {high:+.3f}]"]


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """What a reader has to know: ties, questions left out or cut, how it was scored."""
    lines = []
    for about in summary.get("tasks", ()):
        if about["left_out"]:
            lines.append(
                f"{about['name']}: {counted(len(about['left_out']), 'question')} left out, whose "
                f"answers are longer than the {summary['max_length']} tokens that the model takes"
            )
        if about["num_truncated"]:
            cut = counted(about["num_truncated"], "question")
            lines.append(f"{about['name']}: {cut} with a context that lost its beginning")
    for row in summary["rows"]:
        if row.get("note"):
            lines.append(f"{row['scheme']}: {row['note']}")
        for key, what in (
            ("num_ties", "equally likely choices, the first taken,"),
            ("num_near_ties", f"choices within {ROUNDING:g} nats, where rounding may decide,"),
        ):
            counts = {name: e[key] for name, e in row["tasks"].items() if e.get(key)}
            if counts:
                told = ", ".join(f"{name} {count}" for name, count in counts.items())
                lines.append(f"{row['scheme']}: {what} in {told}")
    return lines


def markdown(summary: Mapping[str, Any], name: str) -> str:
    """The tables as a Markdown page; with all eight tasks the paper's averages beside ours."""
    limit = summary["limit"]
    shots = summary["num_fewshot"] or 0
    lines = [f"# {name} on zero-shot tasks" if not shots else f"# {name}, {shots} examples", ""]
    lines += [
        f"Scope {summary['scope']}, backend {summary['backend']}, source {summary['source']}"
        + (f", the first {limit} questions of each task." if limit else "."), "",
    ]  # fmt: skip
    lines += [*_table(task_lines(summary)), ""]
    compared = comparison_lines(summary)
    if compared:
        lines += [
            "Against full precision, question by question; intervals by bootstrap. An interval "
            "that holds zero shows no effect.", "", *_table(compared), "",
        ]  # fmt: skip
    if set(CORE8) <= set(summary["rows"][0]["tasks"]):
        lines += [
            "The paper's averages over these eight tasks (194 M parameters, 24 layers, 50,000 "
            "steps; other models than the one above):", "",
            *_table([["model", *PAPER_SCHEMES],
                     *([name, *(f"{x:.3f}" for x in values)] for name, *values in PAPER)]), "",
        ]  # fmt: skip
    lines += [f"- {text}" for text in remarks(summary)]
    return "\n".join(lines).rstrip() + "\n"


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = cells
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def draw(summary: Mapping[str, Any], name: str) -> bytes:
    """PNG: accuracy of the model `name` by task and scheme, chance as a short line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, names = summary["rows"], list(summary["rows"][0]["tasks"])
    chance = {about["name"]: about["chance"] for about in summary.get("tasks", ())}
    figure = Figure(figsize=(max(6.0, 1.2 * len(names) + 2), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width, shown = 0.8 / len(rows), []
    for number, row in enumerate(rows):
        places, heights, errors = [], [], []
        for place, task in enumerate(names):
            entry = row["tasks"][task]
            metric = lead_metric(entry)
            if metric is not None:
                places.append(place - 0.4 + (number + 0.5) * width)
                heights.append(entry[metric])
                shown.append(metric)
                error = entry.get(f"{metric}_stderr")
                errors.append(error if isinstance(error, float) else 0.0)
        axes.bar(places, heights, width, yerr=errors, label=row["scheme"], capsize=2)
    for place, task in enumerate(names):
        if task in chance:
            axes.hlines(chance[task], place - 0.45, place + 0.45, colors="black", linestyles=":")
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_ylabel(" or ".join(dict.fromkeys(shown)) or "no share of right answers")
    axes.set_ylim(0, 1)
    limit, scope = summary["limit"], f"scope {summary['scope']}, " if len(rows) > 1 else ""
    asked = f"the first {limit} questions of each task" if limit else "every question"
    axes.set_title(f"{name}: {scope}{asked}; bars one standard error, dotted guessing", fontsize=9)
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def keep_earlier(folder: Path, summary: Mapping[str, Any]) -> Path | None:
    """Rename earlier results in `folder` that hold what `summary` does not: tasks-1.json and so on.

    Returns the path of their JSON; None where there are none, or all of it was measured again.
    Raises UserError when the disk refuses.
    """
    try:
        earlier = json.loads((folder / JSON).read_text(encoding="utf-8"))
        is_covered = _measured(earlier) <= _measured(summary)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_covered = False  # not of ours: kept all the same
    if is_covered:
        return None
    number = next(n for n in itertools.count(1) if not (folder / f"tasks-{n}.json").exists())
    for name in (DOCUMENTS, PLOT, MARKDOWN, JSON):  # what tells that there is something goes last
        try:
            (folder / name).rename(folder / name.replace("tasks", f"tasks-{number}", 1))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise disk_error(folder / name, error) from None
    return folder / f"tasks-{number}.json"


def _measured(summary: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """What was measured, and of which weights and questions."""
    about = [summary.get(key) for key in ("source", "limit", "num_fewshot", "scope", "backend")]
    settings = json.dumps([*about, summary.get("measured")])
    return {(settings, row["scheme"], task) for row in summary["rows"] for task in row["tasks"]}


def write_results(
    folder: Path, name: str, summary: Mapping[str, Any], documents: Sequence[Mapping[str, Any]] = ()
) -> list[Path]:
    """tasks.json, tasks.md, tasks.png, and tasks-documents.jsonl where there are any, in `folder`.

    Returns the paths. Raises UserError when the disk refuses.
    """
    make_directory(folder)
    paths = [
        write_atomic(folder / JSON, to_strict_json(summary, indent=1) + "\n"),
        write_atomic(folder / MARKDOWN, markdown(summary, name)),
        write_atomic(folder / PLOT, draw(summary, name)),
    ]
    if documents:
        lines = "".join(json.dumps(row) + "\n" for row in documents)
        paths.append(write_atomic(folder / DOCUMENTS, lines))
    else:  # those of an earlier call are of other numbers
        (folder / DOCUMENTS).unlink(missing_ok=True)
    return paths
