"""The tasks: where their rows are, how they are posed, what is asked of a model.

Eight are the paper's (`core8`); LAMBADA, MMLU and GSM8K are beside them. Read by `reading.py` and
`asking.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from skipless.errors import UserError, suggestion
from skipless.evaluate.tasks import posing
from skipless.evaluate.tasks.posing import Item, Row
from skipless.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Task:
    """One benchmark."""

    name: str
    hub: tuple[str, str | None]
    """Data set and configuration on the Hugging Face hub."""
    split: str
    """The split that lm-eval scores."""
    columns: tuple[str, ...]
    reports_norm: bool
    """Whether lm-eval reports acc_norm beside acc."""
    licence: str
    pose: Callable[[Row], Item]
    """Row -> Item."""
    output_type: Literal["multiple_choice", "loglikelihood", "generate_until"] = "multiple_choice"
    """lm-eval's word for what is asked: the likeliest choice, whether the one continuation is what
    the model would say itself, or a written answer, which only lm-eval judges."""
    fewshot_split: str = "train"
    """Where solved examples come from."""
    subject_column: str = ""
    """The column that parts questions by subject: examples are the first of their own subject."""

    def item(self, row: Row) -> Item:
        """The question in `row`. Raises ValueError, KeyError, TypeError, AttributeError or
        IndexError for a row of another form."""
        item = self.pose(row)
        least = 2 if self.output_type == "multiple_choice" else 1
        if len(item.choices) < least or not all(item.choices):
            raise ValueError("fewer than two choices, or an empty one")
        if not 0 <= item.gold < len(item.choices):
            raise ValueError(f"the answer is {item.gold} of {len(item.choices)} choices")
        return item


TASKS: Registry[Task] = Registry("task")
CORE8 = (
    "arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "social_iqa",
    "winogrande",
)  # fmt: skip
ALIASES = {"siqa": "social_iqa", "obqa": "openbookqa", "arc_c": "arc_challenge",
           "arc_e": "arc_easy", "lambada": "lambada_openai"}  # fmt: skip


def find_tasks(names: Iterable[str]) -> list[Task]:
    """The named tasks, each once; `core8` stands for all eight. Raises UserError for others."""
    found: dict[str, Task] = {}
    for name in names:
        ours = named(name)
        if not ours:
            near = suggestion(_plain(name), ("core8", *TASKS.names()))
            raise UserError(f"unknown task {name!r}; {near} (--backend lm-eval has others)")
        found |= {one: TASKS.get(one) for one in ours}
    if not found:
        raise UserError("no task was named; name some, or core8 for all eight")
    return list(found.values())


def named(name: str) -> tuple[str, ...]:
    """The tasks of ours that `name` stands for, in any case; () for none."""
    wanted = _plain(name)
    one = ALIASES.get(wanted, wanted)
    return CORE8 if wanted == "core8" else (one,) if one in TASKS.names() else ()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _add(
    name: str, hub: tuple[str, str | None], pose: Callable[[Row], Item], columns: str, licence: str,
    *, split: str = "validation", norm: bool = False, **more: Any,
) -> None:  # fmt: skip
    TASKS.register(name)(
        Task(name=name, hub=hub, split=split, columns=tuple(columns.split()), reports_norm=norm,
             licence=licence, pose=pose, **more)
    )  # fmt: skip


_CARD = "see the data set's card"
_add("arc_challenge", ("allenai/ai2_arc", "ARC-Challenge"), posing.arc,
     "question choices answerKey", "CC BY-SA 4.0", split="test", norm=True)  # fmt: skip
_add("arc_easy", ("allenai/ai2_arc", "ARC-Easy"), posing.arc, "question choices answerKey",
     "CC BY-SA 4.0", split="test", norm=True)  # fmt: skip
_add("boolq", ("aps/super_glue", "boolq"), posing.boolq, "passage question label|answer",
     "CC BY-SA 3.0")  # fmt: skip
_add("hellaswag", ("Rowan/hellaswag", None), posing.hellaswag,
     "activity_label ctx_a ctx_b endings label", "MIT", norm=True)  # fmt: skip
_add("openbookqa", ("allenai/openbookqa", "main"), posing.openbookqa,
     "question_stem choices answerKey", _CARD, split="test", norm=True)  # fmt: skip
_add("piqa", ("baber/piqa", None), posing.piqa, "goal sol1 sol2 label", _CARD, norm=True)
_add("social_iqa", ("lighteval/siqa", None), posing.social_iqa,
     "context question answerA answerB answerC label", _CARD)  # fmt: skip
_add("winogrande", ("allenai/winogrande", "winogrande_xl"), posing.winogrande,
     "sentence option1 option2 answer", "CC BY")  # fmt: skip
_add("lambada_openai", ("EleutherAI/lambada_openai", "default"), posing.lambada, "text", _CARD,
     split="test", output_type="loglikelihood")  # fmt: skip
_add("mmlu", ("cais/mmlu", "all"), posing.mmlu, "question choices subject answer", "MIT",
     split="test", fewshot_split="dev", subject_column="subject")  # fmt: skip
_add("gsm8k", ("openai/gsm8k", "main"), posing.gsm8k, "question answer", "MIT", split="test",
     output_type="generate_until")  # fmt: skip
