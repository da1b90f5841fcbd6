"""Questions with solved examples before them, as requests.

Examples are drawn for every question from the training split where the source has one, else from
the other questions of the split that is scored (as lm-eval does; which ones it draws is its own
affair). MMLU's are the first of the question's subject. They are joined by blank lines. Read by
`running.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from skipless.errors import UserError
from skipless.evaluate.tasks.catalog import Task
from skipless.evaluate.tasks.encoding import Coder, Encoded
from skipless.evaluate.tasks.posing import Item
from skipless.evaluate.tasks.reading import (
    MissingSplitError,
    Rows,
    first_rows,
    read_items,
    read_rows,
)

SEED = 1234


@dataclass(kw_only=True)
class Questions:
    """What a task asks a model, as text and as token ids."""

    task: Task
    items: list[Item]
    """Those that fit the model."""
    numbers: list[int]
    """Their places in the source."""
    encoded: list[list[Encoded]]
    before: list[str]
    """What stands in front of each: a heading, solved examples."""
    split: str
    where: str
    num_fewshot: int
    left_out: list[int] = field(default_factory=list)
    """Places of questions with a continuation longer than the model takes."""

    @property
    def num_truncated(self) -> int:
        """Questions of which a context lost its beginning."""
        return sum(any(r.is_truncated for r in requests) for requests in self.encoded)


def ask(
    task: Task, coder: Coder, *, source: str = "wheel", limit: int | None = None,
    num_fewshot: int = 0,
) -> Questions:  # fmt: skip
    """The first `limit` questions of `task`, encoded. Raises UserError as `read_rows` does, and
    when no question fits the model."""
    found = read_rows(task, source)
    numbers = first_rows(task, found, limit)
    asked = Questions(task=task, items=[], numbers=[], encoded=[], before=[], split=found.split,
                      where=found.where, num_fewshot=num_fewshot)  # fmt: skip
    examples = _examples(task, source, found) if num_fewshot else None
    for number, item in zip(numbers, read_items(task, found, numbers), strict=True):
        before = item.heading + (examples.before(item, number, num_fewshot) if examples else "")
        pairs = zip(item.contexts, item.continuations, strict=True)
        requests = [coder.encode(before + context, after) for context, after in pairs]
        if any(request is None for request in requests):
            asked.left_out.append(number)
            continue
        asked.items.append(item)
        asked.numbers.append(number)
        asked.before.append(before)
        asked.encoded.append([request for request in requests if request is not None])
    if not asked.items:
        raise UserError(
            f"no question of {task.name} fits the {coder.max_length} tokens that the model takes; "
            "leave the task out"
        )
    return asked


class Examples:
    """Solved questions to put in front of others."""

    def __init__(self, task: Task, items: Sequence[Item], *, are_asked: bool) -> None:
        """`are_asked`: they are the very questions, of which none is its own example."""
        self.task, self.are_asked = task, are_asked
        self.by_subject: dict[str, dict[int, Item]] = {}
        for number, item in enumerate(items):
            self.by_subject.setdefault(item.subject, {})[number] = item

    def before(self, item: Item, number: int, count: int) -> str:
        """`count` examples for question `number`, each followed by a blank line."""
        pool = [
            other
            for place, other in self.by_subject.get(item.subject, {}).items()
            if not (self.are_asked and place == number)
        ]
        if count > len(pool):
            about = f" of {item.subject}" if item.subject else ""
            raise UserError(
                f"--num-fewshot is {count} and there are {len(pool)} examples{about} to draw from; "
                "ask for fewer"
            )
        if self.task.subject_column:
            drawn = pool[:count]
        else:
            places = random.Random(SEED + number).sample(range(len(pool)), count)
            drawn = [pool[place] for place in places]
        return "".join(
            f"{one.contexts[one.gold]}{one.continuations[one.gold]}\n\n" for one in drawn
        )


def _examples(task: Task, source: str, asked: Rows) -> Examples:
    """From the split for examples, or from the questions where the source has no such split."""
    try:
        rows = read_rows(task, source, task.fewshot_split)
    except MissingSplitError:
        return Examples(task, read_items(task, asked), are_asked=True)
    return Examples(task, read_items(task, rows), are_asked=False)
