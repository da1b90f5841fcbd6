"""Questions with solved examples before them, as requests.

Examples are drawn for every question from the training split where the source has one, else from
the other questions of the split that is scored (as lm-eval does; which ones it draws is its own
affair). They are joined by blank lines. Read by `running.py` and `harness.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from skipless.errors import UserError
from skipless.evaluate.tasks.catalog import Item, Task
from skipless.evaluate.tasks.encoding import Coder, Encoded
from skipless.evaluate.tasks.reading import read_items, read_rows

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
    """The solved examples in front of each."""
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
    everything = read_items(task, found, None if num_fewshot else limit)
    examples = _examples(task, source) if num_fewshot else None
    asked = Questions(task=task, items=[], numbers=[], encoded=[], before=[], split=found.split,
                      where=found.where, num_fewshot=num_fewshot)  # fmt: skip
    for number, item in enumerate(everything[:limit]):
        pool = examples or [other for i, other in enumerate(everything) if i != number]
        before = prefix(pool, num_fewshot, seed=SEED + number)
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


def prefix(pool: Sequence[Item], count: int, *, seed: int) -> str:
    """`count` solved examples out of `pool`, each followed by a blank line."""
    if not count:
        return ""
    if count > len(pool):
        raise UserError(
            f"--num-fewshot is {count} and there are {len(pool)} examples to draw from; ask for "
            "fewer"
        )
    drawn = random.Random(seed).sample(range(len(pool)), count)
    return "".join(
        f"{item.contexts[item.gold]}{item.continuations[item.gold]}\n\n"
        for item in (pool[i] for i in drawn)
    )


def _examples(task: Task, source: str) -> list[Item] | None:
    """The training split, or None where the source has none."""
    try:
        return read_items(task, read_rows(task, source, "train"))
    except UserError:
        if source == "hub":
            raise
        return None
