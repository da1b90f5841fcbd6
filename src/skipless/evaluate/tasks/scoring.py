"""Log-likelihoods of continuations, and whether they are what the model would say itself.

    tree     requests that begin alike are a tree in one row, every token of which is computed once
             and sees what stood before it in its request; keys and values of what many rows begin
             with are kept for them (trees.py)
    shared   what the requests of one question begin with is computed once, its keys and values are
             handed to all of them, and only the rest is computed for each
    plain    every request is a row of a batch, padded on the right, batches sorted by length

The numbers are the same up to float32 rounding: a causal model's row depends on nothing to the
right of it. A model with ranges taken per tensor from the activations as they come (W8A8 as such;
calling.depends_on_batch) goes one request at a time, unpadded, since there a whole batch shares a
step. The others are compared with plain scoring on some questions first; a model that gives other
numbers is scored plainly, and the result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from skipless.errors import UserError
from skipless.evaluate.tasks.calling import Caller, depends_on_batch
from skipless.evaluate.tasks.encoding import Encoded, common_length, shared_length
from skipless.evaluate.tasks.passes import Score, Worker
from skipless.evaluate.tasks.trees import plan_trunks
from skipless.quant import evaluation_mode, quantization

Mode = Literal["auto", "tree", "shared", "plain", "single"]
BATCH_TOKENS = 1024
"""Tokens a forward pass, padding included: at 50,000 words that is 200 MB of logits."""
_FP32_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.5  # nats, to tell a broken cache from rounding


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The score of every request, and how they were computed."""

    scores: list[list[Score]]
    """By question and request."""
    mode: str
    note: str = ""
    """Why it was not shared, where it was not."""


def score_requests(
    model: nn.Module,
    questions: Sequence[Sequence[Encoded]],
    *,
    mode: Mode = "auto",
    batch_tokens: int = BATCH_TOKENS,
    on_scored: Callable[[int], None] = lambda count: None,
) -> Scores:
    """Score the requests of every question; those of one question may share a prefix.

    `mode` "auto" is what `choose_mode` says; the others are as in the module's text, unchecked,
    "single" one request at a time. Sharing is done where that is less work. Runs in eval mode
    without gradients. `on_scored(count)` is called as requests are done. Raises UserError for a
    model that is not a causal language model and for numbers that are not finite.
    """
    if batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; a positive number was expected")
    note = ""
    if mode == "auto":
        mode, note = choose_mode(model, questions, batch_tokens)
    scores = _score(model, questions, mode, batch_tokens, on_scored)
    return Scores(scores=scores, mode=mode, note=note)


def _score(
    model: nn.Module,
    questions: Sequence[Sequence[Encoded]],
    mode: Mode,
    batch_tokens: int = BATCH_TOKENS,
    on_scored: Callable[[int], None] = lambda count: None,
    always: bool = False,
) -> list[list[Score]]:
    """As `score_requests`; `always` shares wherever there is anything to share, worth it or not."""
    caller = Caller(model)
    caller.check_ids(max((max(*r.inputs, *r.targets) for q in questions for r in q), default=0))
    with evaluation_mode(model):
        flat = [(q, i) for q, requests in enumerate(questions) for i in range(len(requests))]
        found: dict[tuple[int, int], Score] = {}
        worker = Worker(caller, questions, found, on_scored)
        if mode == "single":
            for place in flat:
                worker.plain([place])
        elif mode == "plain":
            worker.all_plain(flat, batch_tokens)
        elif mode == "tree":
            worker.all_trees(flat, batch_tokens, always)
        else:
            worker.all_shared(batch_tokens, always)
    return [[found[q, i] for i in range(len(r))] for q, r in enumerate(questions)]


def choose_mode(
    model: nn.Module, questions: Sequence[Sequence[Encoded]], batch_tokens: int = BATCH_TOKENS
) -> tuple[Mode, str]:
    """The fastest way that keeps the numbers, and why it is not a faster one, where it is not.

    Costs a few passes over two short questions, of a quantised model over four. Raises UserError
    for a model that is not causal.
    """
    caller = Caller(model)
    if depends_on_batch(model):
        return "single", (
            "one request at a time: the scheme takes a range from each whole tensor, so that "
            "batching would change the numbers"
        )
    with evaluation_mode(model):
        caller.check_causal()
    is_rounded = quantization(model) is not None
    sharing = [q for q in questions if len(q) > 1 and shared_length(q)]
    ways: list[tuple[Mode, bool]] = [
        ("tree", caller.has_trees and bool(questions)),  # pads nothing, though nothing is shared
        ("shared", caller.has_cache and bool(sharing)),
    ]
    if not any(is_there for _, is_there in ways):
        return "plain", ""
    trunks = plan_trunks([request for q in questions for request in q], batch_tokens)
    tries = {"tree": (False, True) if any(length for length, _ in trunks) else (False,)}
    sample = _sample(sharing or list(questions), is_rounded)
    expected, note = _score(model, sample, "plain"), ""
    for mode, is_there in ways:
        if not is_there:
            continue
        try:
            gap = max(
                _gap(_score(model, sample, mode, always=always), expected)
                for always in tries.get(mode, (True,))
            )
        except (TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError,
                IndexError, UserError) as error:  # fmt: skip
            note = f"the cache of {type(model).__name__} does not serve ({error})"[:200]
            continue
        half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
        if gap <= (_HALF_TOLERANCE if half else _FP32_TOLERANCE):
            return mode, ""
        if is_rounded:
            return "single", (
                f"one request at a time: in batches float32 sums differ in their last digits, "
                f"which tips rounding to few bits (by {gap:.2g} nats in one request)"
            )
        note = f"the cache of {type(model).__name__} gives other numbers (by {gap:.2g} nats)"
    return "plain", note if caller.has_cache else f"{type(model).__name__} takes no cache"


def _sample(questions: list[Sequence[Encoded]], is_rounded: bool) -> list[Sequence[Encoded]]:
    """The shortest, and the next that parts from it, since what a text must not see may only be
    another question's; where rounding may agree by chance, four of the shorter half."""
    by_size = sorted(questions, key=lambda q: sum(len(request.inputs) for request in q))
    if not is_rounded:
        first = by_size[0][0].inputs
        parting = (
            q for q in by_size
            if common_length(first, q[0].inputs) < min(len(first), len(q[0].inputs))
        )  # fmt: skip
        return [by_size[0], *([other] if (other := next(parting, None)) else [])]
    return by_size[: len(by_size) // 2 + 1 : max(1, len(by_size) // 8)][:4]


def _gap(found: list[list[Score]], expected: list[list[Score]]) -> float:
    """Largest difference in nats, as a share of what was expected where that is more than one."""
    pairs = zip(sum(found, []), sum(expected, []), strict=True)
    return max(
        abs(x.log_likelihood - y.log_likelihood) / max(1.0, abs(y.log_likelihood)) for x, y in pairs
    )
