"""From a row of a data set to a question, letter by letter as lm-eval 0.4 puts it.

Most tasks have one context and put the choice after it; WinoGrande puts the choice into the context
and asks for the same ending; LAMBADA has one continuation, a word; GSM8K has the answer written.
Malformed rows raise KeyError, ValueError, TypeError, AttributeError or IndexError. Read by
`catalog.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    heading: str = ""
    """What stands in front of solved examples and the question."""
    subject: str = ""
    """Examples are taken from questions of the same one, and a limit counts each by itself."""


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


def _several(value: Any) -> list[Any]:
    """A list of choices; a text would be a choice a letter."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{str(value)[:40]!r} is {type(value).__name__}, not a list")
    return list(value)


def _number(value: Any) -> int:
    """A whole number, as such or as text; int() would cut 0.9 to 0."""
    if not isinstance(value, str) and value != value // 1:
        raise ValueError(f"the answer is {value!r}, no whole number")
    return int(value)


def _lettered(options: Mapping[str, Any], answer: Any) -> tuple[list[Any], int]:
    """(choices, place of the answer) of ARC and OpenBookQA, where letters name the choices."""
    texts, letters = _several(options["text"]), _several(options["label"])
    if len(texts) != len(letters) or len(set(letters)) < len(letters):
        raise ValueError(f"{len(texts)} choices are named {', '.join(map(str, letters))}")
    return texts, letters.index(answer)


def arc(row: Row) -> Item:
    """A question and the texts of its options; `answerKey` is a label."""
    texts, gold = _lettered(row["choices"], row["answerKey"])
    return _after(f"Question: {_text(row['question'])}\nAnswer:", texts, gold)


def boolq(row: Row) -> Item:
    """A passage, a question, and yes or no."""
    answer = row["label"] if "label" in row else row["answer"]  # super_glue and boolq differ
    context = f"{_text(row['passage'])}\nQuestion: {_text(row['question'])}?\nAnswer:"
    return _after(context, ("no", "yes"), _number(answer))


def hellaswag(row: Row) -> Item:
    """A scene and four ways to go on."""
    ending = row["ctx_b"].capitalize()
    context = _wikihow(f"{row['activity_label']}: {row['ctx_a']} {ending}")
    endings = [_wikihow(ending) for ending in _several(row["endings"])]
    return _after(context, endings, _number(row["label"]))


def _wikihow(text: str) -> str:
    """WikiHow's [title] ends a sentence; other marks in brackets are taken out."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def openbookqa(row: Row) -> Item:
    """The beginning of a sentence and its ends."""
    texts, gold = _lettered(row["choices"], row["answerKey"].lstrip())
    return _after(_text(row["question_stem"]), texts, gold)


def piqa(row: Row) -> Item:
    """A goal and two ways to it."""
    context = f"Question: {_text(row['goal'])}\nAnswer:"
    return _after(context, (row["sol1"], row["sol2"]), _number(row["label"]))


def social_iqa(row: Row) -> Item:
    """A scene, a question about its people, three answers."""
    context = f"Q: {_text(row['context'])} {_text(row['question'])}\nA:"
    choices = (row["answerA"], row["answerB"], row["answerC"])
    return _after(context, choices, _number(row["label"]) - 1)


def winogrande(row: Row) -> Item:
    """The two words in the gap, each asked for the rest of the sentence."""
    sentence = _text(row["sentence"])
    gap = sentence.index("_")
    options = (_text(row["option1"]), _text(row["option2"]))
    ending = sentence[gap + 1 :].strip()
    return Item(
        contexts=tuple(sentence[:gap] + option for option in options),
        continuations=(f" {ending}",) * 2, choices=options, gold=("1", "2").index(row["answer"]),
    )  # fmt: skip


def lambada(row: Row) -> Item:
    """A passage without its last word, and that word."""
    context, _, word = _text(row["text"]).rpartition(" ")
    if not context or not word:
        raise ValueError("the text is a single word, or ends with a space")
    return _after(context, (word,), 0)


def mmlu(row: Row) -> Item:
    """A question with lettered options of its subject, and the letters."""
    subject, choices = _text(row["subject"]), [_text(one) for one in _several(row["choices"])]
    if len(choices) != 4:
        raise ValueError(f"{len(choices)} choices instead of four")
    options = "".join(f"{letter}. {c}\n" for letter, c in zip("ABCD", choices, strict=True))
    context = f"{_text(row['question']).strip()}\n{options}Answer:"
    about = subject.replace("_", " ")
    return replace(
        _after(context, "ABCD", _number(row["answer"])), subject=subject,
        heading=f"The following are multiple choice questions (with answers) about {about}.\n\n",
    )  # fmt: skip


def gsm8k(row: Row) -> Item:
    """A sum in words, and its written solution."""
    return _after(f"Question: {_text(row['question'])}\nAnswer:", (row["answer"],), 0)
