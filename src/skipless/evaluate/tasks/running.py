"""Scoring a model on tasks, in full precision and under schemes: `score_tasks`.

The result is one JSON-ready dict (tasks.json); `tables.py` shows it. Read by the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from skipless.errors import UserError
from skipless.evaluate.tasks.asking import Questions, ask
from skipless.evaluate.tasks.catalog import Task, find_tasks
from skipless.evaluate.tasks.encoding import Coder
from skipless.evaluate.tasks.scoring import (
    BATCH_TOKENS,
    Mode,
    Scores,
    choose_mode,
    score_requests,
)
from skipless.evaluate.tasks.statistics import (
    ROUNDING,
    Answers,
    Continuations,
    accuracy_with_error,
    bootstrap_interval,
    compare,
)
from skipless.pretrained.positions import num_positions
from skipless.quant import Scheme, executed
from skipless.quant.targets import find_targets

FULL = "full precision"
MOST_TIES = 20  # listed by number; their count is whole


@dataclass(frozen=True, kw_only=True)
class TaskResults:
    """What `score_tasks` returns."""

    summary: dict[str, Any]
    """JSON-ready: settings, and a row a scheme with accuracies and comparisons by task."""
    documents: list[dict[str, Any]]
    """A row a scheme and question: task, number, gold; by choice log-likelihoods, is_greedy, and
    lengths in characters, by which acc_norm divides."""


def score_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Iterable[str] = ("core8",),
    *,
    schemes: Sequence[Scheme | str] = (),
    scope: str = "linear",
    calibration: Iterable[Any] | None = None,
    source: str = "wheel",
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    mode: Mode = "auto",
    batch_tokens: int = BATCH_TOKENS,
    say: Callable[[str], None] = lambda text: None,
) -> TaskResults:
    """Zero-shot (or few-shot) accuracy on tasks, and what schemes do to it.

    `model` is a causal language model of ours or of Hugging Face's, as it is: in full precision,
    or quantised already. Each of `schemes` is then compared with it question by question.
    `max_length` is the longest input in tokens; None asks the model's config. `limit` takes the
    first questions of each task, and of each subject of MMLU. `calibration`: batches, for static
    schemes. Raises UserError for tasks, sources and schemes that do not exist, before anything is
    scored.
    """
    wanted = scored_tasks(tasks)
    for name, value, least in (
        ("limit", limit, 1), ("num_fewshot", num_fewshot, 0), ("max_length", max_length, 1),
        ("batch_tokens", batch_tokens, 1),
    ):  # fmt: skip
        if value is not None and (type(value) is not int or value < least):
            raise UserError(f"{name} is {value!r}; a whole number of at least {least} was expected")
    parsed = parse_schemes(model, schemes, scope, calibration)
    calibration = None if calibration is None else list(calibration)
    coder, num_fewshot = Coder(tokenizer, max_length or num_positions(model)), num_fewshot or 0
    asked = [
        ask(task, coder, source=source, limit=limit, num_fewshot=num_fewshot) for task in wanted
    ]
    rows, documents = [], []
    reference: list[Answers | Continuations] = []
    for scheme in (None, *parsed):
        name = FULL if scheme is None else str(scheme)
        with under(scheme, model, scope, calibration):
            found, answers, how = _one_scheme(model, asked, name, mode, batch_tokens, say)
        if scheme is None:
            reference = answers
        rows.append(_row(name, asked, found, answers, None if scheme is None else reference))
        rows[-1] |= {"scoring": how[0], "note": how[1]}
        documents += _documents(name, asked, found)
    summary = {
        "tasks": [_about(questions) for questions in asked],
        "source": source, "limit": limit, "num_fewshot": num_fewshot, "scope": scope,
        "max_length": coder.max_length, "backend": "own", "rows": rows,
    }  # fmt: skip
    return TaskResults(summary=summary, documents=documents)


def scored_tasks(names: Iterable[str]) -> list[Task]:
    """As `find_tasks`. Raises UserError for a task whose answers are written, too."""
    found = find_tasks(names)
    for task in found:
        if task.output_type == "generate_until":
            raise UserError(
                f"{task.name} has the model write its answer, which our scorer does not judge; add "
                "--backend lm-eval"
            )
    return found


def parse_schemes(
    model: nn.Module, schemes: Sequence[Scheme | str], scope: str, calibration: Any
) -> list[Scheme]:
    """Schemes that `model` can be quantised by. Raises UserError for others, for one that is named
    twice, and for static ranges without batches to calibrate them on."""
    parsed = [Scheme.parse(scheme) for scheme in schemes]
    names = [str(scheme) for scheme in parsed]
    for scheme in parsed:
        if names.count(str(scheme)) > 1:
            raise UserError(f"{scheme} is named twice among the schemes; leave one out")
        find_targets(model, scheme, scope)
        if scheme.needs_calibration and calibration is None:
            raise UserError(
                f"{scheme} fixes activation ranges beforehand; give text to calibrate on, or leave "
                "out -static"
            )
    return parsed


def under(
    scheme: Scheme | None, model: nn.Module, scope: str, calibration: Any
) -> AbstractContextManager[Any]:
    """`model` quantised by `scheme` for the length of a with statement; as it is for None."""
    if scheme is None:
        return nullcontext()
    return executed(model, scheme, scope, calibration=calibration)


def _one_scheme(
    model: nn.Module, asked: list[Questions], name: str, mode: Mode, batch_tokens: int,
    say: Callable[[str], None],
) -> tuple[list[tuple[Scores, float]], list[Answers | Continuations], tuple[str, str]]:  # fmt: skip
    """Scores and seconds by task, the answers, and how it was scored and why not faster."""
    found, answers, note = [], [], ""
    if mode == "auto":
        everything = [q for questions in asked for q in questions.encoded]
        mode, note = choose_mode(model, everything, batch_tokens)
    for questions in asked:
        start = time.perf_counter()
        scores = score_requests(model, questions.encoded, mode=mode, batch_tokens=batch_tokens)
        found.append((scores, time.perf_counter() - start))
        answers.append(_answers(questions, scores))
        right = answers[-1].right(norm=questions.task.reports_norm)
        say(
            f"{name}: {questions.task.name} {right.mean():.3f} "
            f"({len(questions.items)} questions, {found[-1][1]:.0f} s)"
        )
    return found, answers, (mode, note)


def _answers(questions: Questions, scores: Scores) -> Answers | Continuations:
    if questions.task.output_type == "loglikelihood":
        ones = [q[0] for q in scores.scores]
        return Continuations(
            log_likelihoods=np.array([s.log_likelihood for s in ones]),
            is_greedy=np.array([s.is_greedy for s in ones]),
        )
    return Answers(
        log_likelihoods=[np.array([s.log_likelihood for s in q]) for q in scores.scores],
        lengths=[np.array([float(len(c)) for c in i.choices]) for i in questions.items],
        gold=np.array([item.gold for item in questions.items]),
    )


def _row(
    name: str, asked: list[Questions], found: list[tuple[Scores, float]],
    answers: list[Answers | Continuations], reference: list[Answers | Continuations] | None,
) -> dict[str, Any]:  # fmt: skip
    by_task = {}
    for number, (questions, (_, seconds), answer) in enumerate(
        zip(asked, found, answers, strict=True)
    ):
        norm = questions.task.reports_norm
        ties, near = answer.ties(), answer.ties(ROUNDING, norm=norm)
        acc, acc_error = accuracy_with_error(answer.right())
        entry: dict[str, Any] = {"acc": acc, "acc_stderr": acc_error}
        if norm:
            entry["acc_norm"], entry["acc_norm_stderr"] = accuracy_with_error(
                answer.right(norm=True)
            )
        if isinstance(answer, Continuations):
            entry["perplexity"], entry["perplexity_stderr"] = answer.perplexity()
        if questions.task.subject_column:
            entry["subjects"] = _by_subject(questions, answer.right())
        entry |= {
            "num_ties": len(ties), "ties": [questions.numbers[i] for i in ties[:MOST_TIES]],
            "num_near_ties": len(near),
            "near_ties": [questions.numbers[i] for i in near[:MOST_TIES]],
            "seconds": round(seconds, 3),
        }  # fmt: skip
        if reference is not None:
            entry["against_full_precision"] = compare(reference[number], answer, norm=norm)
        by_task[questions.task.name] = entry
    best = _best(asked, answers)
    row: dict[str, Any] = {
        "scheme": name, "tasks": by_task,
        "average_acc": float(np.mean([a.right().mean() for a in answers])),
        "average": float(np.mean([group.mean() for group in best])),
    }  # fmt: skip
    if reference is not None:
        pairs = zip(best, _best(asked, reference), strict=True)
        differences = [after - before for after, before in pairs]
        row["average_difference"] = float(np.mean([d.mean() for d in differences]))
        row["average_interval"] = list(bootstrap_interval(differences))
    return row


def _by_subject(questions: Questions, right: np.ndarray) -> dict[str, dict[str, Any]]:
    subjects = np.array([item.subject for item in questions.items])
    found = {}
    for subject in dict.fromkeys(subjects.tolist()):
        of_it = right[subjects == subject]
        found[subject] = {"acc": float(of_it.mean()), "num_questions": len(of_it)}
    return found


def _best(asked: list[Questions], answers: list[Answers | Continuations]) -> list[np.ndarray]:
    """Right answers by task: acc_norm where lm-eval reports it, else acc."""
    pairs = zip(asked, answers, strict=True)
    return [answer.right(norm=questions.task.reports_norm) for questions, answer in pairs]


def _about(questions: Questions) -> dict[str, Any]:
    sizes = [len(item.choices) for item in questions.items]
    return {
        "name": questions.task.name, "split": questions.split, "where": questions.where,
        "licence": questions.task.licence, "num_questions": len(questions.items),
        "chance": float(np.mean([1 / size if size > 1 else 0 for size in sizes])),
        "num_truncated": questions.num_truncated, "left_out": questions.left_out,
    }  # fmt: skip


def _documents(
    name: str, asked: list[Questions], found: list[tuple[Scores, float]]
) -> list[dict[str, Any]]:
    return [
        {
            "scheme": name, "task": questions.task.name, "number": number, "gold": item.gold,
            "log_likelihoods": [s.log_likelihood for s in row],
            "is_greedy": [s.is_greedy for s in row],
            "lengths": [len(choice) for choice in item.choices],
        }
        for questions, (scores, _) in zip(asked, found, strict=True)
        for number, item, row in zip(questions.numbers, questions.items, scores.scores, strict=True)
    ]  # fmt: skip
