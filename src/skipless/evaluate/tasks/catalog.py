"""The eight zero-shot tasks as lm-eval 0.4 poses them: columns, prompt, choices, the right answer.

A row of a data set becomes an `Item`: for each choice a context and a continuation. Most tasks have
one context and put the choice after it; WinoGrande puts the choice into the context and asks for
the same ending. Read by `reading.py` and `asking.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skipless.errors import UserError, suggestion
from skipless.registry import Registry

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question: choice i asks how likely continuations[i] is after contexts[i]."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    """With the space that parts them from the context."""
    choices: tuple[str, ...]
    """Their texts; acc_norm divides by the number of characters."""
    gold: int


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
    """Row -> Item. May raise KeyError, ValueError, TypeError or IndexError for a malformed row."""

    def item(self, row: Row) -> Item:
        """The question in `row`. Raises ValueError, KeyError, TypeError, AttributeError or
        IndexError for a row of another form."""
        item = self.pose(row)
        if len(item.choices) < 2 or not all(item.choices):
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
           "arc_e": "arc_easy"}  # fmt: skip


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


def _after(context: str, choices: Iterable[Any], gold: int) -> Item:
    """Choices that follow one context."""
    texts = tuple(_text(choice) for choice in choices)
    return Item(
        contexts=(context,) * len(texts), continuations=tuple(f" {text}" for text in texts),
        choices=texts, gold=gold,
    )  # fmt: skip


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is {type(value).__name__}, not text")
    return value


def _arc(row: Row) -> Item:
    options = row["choices"]
    gold = list(options["label"]).index(row["answerKey"])
    return _after(f"Question: {_text(row['question'])}\nAnswer:", options["text"], gold)


def _boolq(row: Row) -> Item:
    answer = row["label"] if "label" in row else row["answer"]  # super_glue and boolq differ
    context = f"{_text(row['passage'])}\nQuestion: {_text(row['question'])}?\nAnswer:"
    return _after(context, ("no", "yes"), int(answer))


def _hellaswag(row: Row) -> Item:
    ending = row["ctx_b"].capitalize()
    context = _wikihow(f"{row['activity_label']}: {row['ctx_a']} {ending}")
    return _after(context, [_wikihow(ending) for ending in row["endings"]], int(row["label"]))


def _wikihow(text: str) -> str:
    """WikiHow's [title] ends a sentence; other marks in brackets are taken out."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _openbookqa(row: Row) -> Item:
    options = row["choices"]
    gold = list(options["label"]).index(row["answerKey"].lstrip())
    return _after(_text(row["question_stem"]), options["text"], gold)


def _piqa(row: Row) -> Item:
    context = f"Question: {_text(row['goal'])}\nAnswer:"
    return _after(context, (row["sol1"], row["sol2"]), int(row["label"]))


def _social_iqa(row: Row) -> Item:
    context = f"Q: {_text(row['context'])} {_text(row['question'])}\nA:"
    choices = (row["answerA"], row["answerB"], row["answerC"])
    return _after(context, choices, int(row["label"]) - 1)


def _winogrande(row: Row) -> Item:
    sentence = _text(row["sentence"])
    gap = sentence.index("_")
    options = (_text(row["option1"]), _text(row["option2"]))
    ending = sentence[gap + 1 :].strip()
    return Item(
        contexts=tuple(sentence[:gap] + option for option in options),
        continuations=(f" {ending}",) * 2, choices=options, gold=("1", "2").index(row["answer"]),
    )  # fmt: skip


def _add(name: str, hub: tuple[str, str | None], pose: Callable[[Row], Item], columns: str,
         licence: str, *, split: str = "validation", norm: bool = True) -> None:  # fmt: skip
    TASKS.register(name)(
        Task(name=name, hub=hub, split=split, columns=tuple(columns.split()), reports_norm=norm,
             licence=licence, pose=pose)
    )  # fmt: skip


_CARD = "see the data set's card"
_add("arc_challenge", ("allenai/ai2_arc", "ARC-Challenge"), _arc, "question choices answerKey",
     "CC BY-SA 4.0", split="test")  # fmt: skip
_add("arc_easy", ("allenai/ai2_arc", "ARC-Easy"), _arc, "question choices answerKey",
     "CC BY-SA 4.0", split="test")  # fmt: skip
_add("boolq", ("aps/super_glue", "boolq"), _boolq, "passage question label|answer",
     "CC BY-SA 3.0", norm=False)  # fmt: skip
_add("hellaswag", ("Rowan/hellaswag", None), _hellaswag, "activity_label ctx_a ctx_b endings label",
     "MIT")  # fmt: skip
_add("openbookqa", ("allenai/openbookqa", "main"), _openbookqa, "question_stem choices answerKey",
     _CARD, split="test")  # fmt: skip
_add("piqa", ("baber/piqa", None), _piqa, "goal sol1 sol2 label", _CARD)
_add("social_iqa", ("lighteval/siqa", None), _social_iqa,
     "context question answerA answerB answerC label", _CARD, norm=False)  # fmt: skip
_add("winogrande", ("allenai/winogrande", "winogrande_xl"), _winogrande,
     "sentence option1 option2 answer", "CC BY", norm=False)  # fmt: skip
