"""Accuracies with their uncertainty, and a quantised model against its full-precision self.

Both models answer the same questions, so differences are taken question by question: most of the
spread of an accuracy is the choice of questions, and it cancels. Beside the accuracy stand the
answers that changed, and the divergence of the distributions over choices, which moves long before
an answer does. Read by `running.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skipless.errors import UserError

NUM_RESAMPLES = 10_000
ROUNDING = 1e-4
"""Nats by which two scorers in float32 may differ in a request."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Which choice a model took, question by question of one task."""

    log_likelihoods: list[np.ndarray]
    """float64 [choices] of every question."""
    lengths: list[np.ndarray]
    """Characters of each choice."""
    gold: np.ndarray
    """int64 [questions]."""

    def taken(self, *, norm: bool = False) -> np.ndarray:
        """int64 [questions], the likeliest choice, with `norm` the likeliest a character; of equal
        ones the first, as lm-eval takes. A choice of no characters counts as one."""
        pairs = zip(self.log_likelihoods, self.lengths, strict=True)
        return np.array([int(np.argmax(ll / np.maximum(n, 1) if norm else ll)) for ll, n in pairs])

    def ties(self, within: float = 0.0, *, norm: bool = False) -> list[int]:
        """Questions where the order of choices decides, or rounding: another choice would be taken
        if log-likelihoods moved by at most `within` nats each."""
        found = []
        for number, (ll, length) in enumerate(zip(self.log_likelihoods, self.lengths, strict=True)):
            scale = np.maximum(length, 1) if norm else np.ones(len(ll))
            value = ll / scale
            best = int(np.argmax(value))
            slack = within * (1 / scale + 1 / scale[best])
            if np.count_nonzero(value[best] - value <= slack) > 1:
                found.append(number)
        return found

    def right(self, *, norm: bool = False) -> np.ndarray:
        """float64 [questions], 1 where the answer is right."""
        return np.equal(self.taken(norm=norm), self.gold).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """How a model takes the one continuation of each text, as in LAMBADA."""

    log_likelihoods: np.ndarray
    """float64 [questions]."""
    is_greedy: np.ndarray
    """bool [questions], whether the model would have gone on so."""

    def taken(self, *, norm: bool = False) -> np.ndarray:
        """int64 [questions], 1 where the model's own continuation is the text's. Of no length."""
        return self.is_greedy.astype(np.int64)

    def ties(self, within: float = 0.0, *, norm: bool = False) -> list[int]:
        """None: there is nothing to choose between."""
        return []

    def right(self, *, norm: bool = False) -> np.ndarray:
        """float64 [questions], 1 where it is the text's. Of no length."""
        return self.is_greedy.astype(np.float64)

    def perplexity(self) -> tuple[float, float | None]:
        """exp of minus the mean log-likelihood of a continuation, all of its tokens together, as
        lm-eval has it, and its standard error to first order; None for one question."""
        n, value = len(self.log_likelihoods), float(np.exp(-self.log_likelihoods.mean()))
        return value, value * float(self.log_likelihoods.std(ddof=1)) / n**0.5 if n > 1 else None


def accuracy_with_error(right: np.ndarray) -> tuple[float, float | None]:
    """Mean and its standard error (n - 1, as lm-eval's); None for one question."""
    n = len(right)
    return float(right.mean()), float(right.std(ddof=1) / np.sqrt(n)) if n > 1 else None


def bootstrap_interval(
    groups: Sequence[np.ndarray], *, level: float = 0.95, seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> tuple[float, float]:  # fmt: skip
    """Percentile interval of the mean over groups of the mean of each, questions drawn anew.

    `groups` float64 [questions] each, resampled apart: the tasks are given, their questions a
    sample. Drawing n questions with replacement draws how often each distinct value comes up, which
    is done in one go. Raises UserError for nothing to draw from.
    """
    if not groups or any(len(group) == 0 for group in groups):
        raise UserError("there is no question to resample; give at least one a task")
    generator = np.random.default_rng(seed)
    total = np.zeros(num_resamples)
    for group in groups:
        values, counts = np.unique(group, return_counts=True)
        draws = generator.multinomial(len(group), counts / len(group), size=num_resamples)
        total += draws @ values / len(group)
    low, high = np.percentile(total / len(groups), [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def choice_divergences(reference: Answers, other: Answers) -> np.ndarray:
    """KL(reference || other) in nats of the distributions over choices, float64 [questions]."""
    found = []
    for a, b in zip(reference.log_likelihoods, other.log_likelihoods, strict=True):
        p, q = _log_softmax(a), _log_softmax(b)
        found.append(max(0.0, float(np.sum(np.exp(p) * (p - q)))))  # rounding may give -1e-17
    return np.array(found)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def compare(
    reference: Answers | Continuations, other: Answers | Continuations, *, norm: bool
) -> dict[str, Any]:
    """`other` against `reference` on the same questions.

    By metric, acc (and acc_norm): the difference with its 95 % interval; flips: answers that
    changed, those from right to wrong and from wrong to right. Of all: the mean and 95th percentile
    of the divergence, in nats, or of continuations the mean difference of the log-likelihood with
    its interval.
    """
    result: dict[str, Any] = {}
    for name in ("acc", "acc_norm") if norm else ("acc",):
        by_length = name == "acc_norm"
        difference = other.right(norm=by_length) - reference.right(norm=by_length)
        result[name] = {
            "difference": float(difference.mean()),
            "interval": list(bootstrap_interval([difference])),
            "flips": int((reference.taken(norm=by_length) != other.taken(norm=by_length)).sum()),
            "right_to_wrong": int((difference < 0).sum()),
            "wrong_to_right": int((difference > 0).sum()),
        }
    result["num_questions"] = len(reference.taken())
    if isinstance(reference, Answers) and isinstance(other, Answers):
        divergences = choice_divergences(reference, other)
        result["kl_mean"] = float(divergences.mean())
        result["kl_p95"] = float(np.percentile(divergences, 95))
    elif isinstance(reference, Continuations) and isinstance(other, Continuations):
        nats = other.log_likelihoods - reference.log_likelihoods
        result["log_likelihood"] = {
            "difference": float(nats.mean()), "interval": list(bootstrap_interval([nats])),
        }  # fmt: skip
    return result
