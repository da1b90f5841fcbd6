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

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.evaluate.tasks.calling import Caller, depends_on_batch
from skipless.evaluate.tasks.encoding import Encoded, shared_length
from skipless.evaluate.tasks.planning import pieces, plan
from skipless.evaluate.tasks.trees import TRUNK, common_length, grow, plan_trees, plan_trunks
from skipless.quant import evaluation_mode, quantization

Mode = Literal["auto", "tree", "shared", "plain", "single"]
BATCH_TOKENS = 1024
"""Tokens a forward pass, padding included: at 50,000 words that is 200 MB of logits."""
_FP32_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.5  # nats, to tell a broken cache from rounding


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model says of one request."""

    log_likelihood: float
    """Natural logarithm, of the whole continuation."""
    is_greedy: bool
    """Whether every token of it is the likeliest."""


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
        mode, note = choose_mode(model, questions)
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
        worker = _Worker(caller, questions, found, on_scored)
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


def choose_mode(model: nn.Module, questions: Sequence[Sequence[Encoded]]) -> tuple[Mode, str]:
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
    sample = _sample(sharing or list(questions), is_rounded)
    expected, note = _score(model, sample, "plain"), ""
    for mode, is_there in ways:
        if not is_there:
            continue
        try:
            gap = max(
                _gap(_score(model, sample, mode, always=always), expected)
                for always in ((False, True) if mode == "tree" else (True,))
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


class _Worker:
    """Forward passes; fills `found` by (question, request)."""

    def __init__(
        self, caller: Caller, questions: Sequence[Sequence[Encoded]],
        found: dict[tuple[int, int], Score], on_scored: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.caller, self.questions = caller, questions
        self.found, self.on_scored = found, on_scored

    def at(self, place: tuple[int, int]) -> Encoded:
        return self.questions[place[0]][place[1]]

    def all_plain(self, places: list[tuple[int, int]], batch_tokens: int) -> None:
        """Longest first, so that memory runs out at once or never."""
        places = sorted(places, key=lambda place: -len(self.at(place).inputs))
        while places:
            size = max(1, batch_tokens // len(self.at(places[0]).inputs))
            self.plain(places[:size])
            places = places[size:]

    def plain(self, places: list[tuple[int, int]]) -> None:
        requests = [self.at(place) for place in places]
        keep = len(requests[0].targets) if len(requests) == 1 else 0
        logits = self.caller.logits(_padded([r.inputs for r in requests]), keep)
        for row, place, request in zip(logits, places, requests, strict=True):
            end = keep or len(request.inputs)
            self.put(place, row[end - len(request.targets) : end])

    def all_shared(self, batch_tokens: int, always: bool) -> None:
        """Questions in groups, each in two passes: prefixes of one length, then what follows.

        A quantised model's are grouped only where they share equally much: recomputing the end of a
        prefix in another batch moves the last digits of sums, which tips rounding to few bits.
        """
        only_equal = quantization(self.caller.model) is not None
        groups, whole = plan(
            self.questions, batch_tokens, only_equal=only_equal, always=always or only_equal
        )
        self.all_plain([(n, i) for n in whole for i in range(len(self.questions[n]))], batch_tokens)
        for group in groups:
            self.shared(group.numbers, group.length, batch_tokens)

    def shared(self, numbers: list[int], length: int, batch_tokens: int) -> None:
        """Questions that all share at least their first `length` tokens."""
        prefixes = [self.questions[n][0].inputs[:length] for n in numbers]
        last, cache = self.caller.begin(torch.tensor(prefixes))
        rows, places = [], []
        for row, number in enumerate(numbers):
            for i, request in enumerate(self.questions[number]):
                if len(request.inputs) == length:  # a single token is asked for: nothing to go on
                    self.put((number, i), last[row : row + 1])
                else:
                    rows.append(row)
                    places.append((number, i))
        batches = pieces([len(self.at(place).inputs) - length for place in places], batch_tokens)
        for batch in batches:
            held = cache if batch is batches[-1] else copy.deepcopy(cache)
            rests = [self.at(places[i]).inputs[length:] for i in batch]
            logits = self.caller.go_on(_padded(rests), held, torch.tensor([rows[i] for i in batch]))
            for line, i, rest in zip(logits, batch, rests, strict=True):
                request = self.at(places[i])
                first = len(request.inputs) - len(request.targets) - length
                here = line[max(first, 0) : len(rest)]
                before = last[rows[i] : rows[i] + 1]
                self.put(places[i], here if first >= 0 else torch.cat((before, here)))

    def all_trees(self, places: list[tuple[int, int]], batch_tokens: int, always: bool) -> None:
        """Every token once, in rows of whole requests, or of what follows their trunk."""
        requests = [self.at(place) for place in places]
        trunks = [(0, list(range(len(requests))))]
        if self.caller.has_cache:
            most, least = (0, 1) if always else (batch_tokens, TRUNK)
            trunks = plan_trunks(requests, most, least=least)
            batch_tokens = 1 if always else batch_tokens  # several rows after a trunk, to try it
        for length, numbers in trunks:
            trunk = None
            if length:
                ids = torch.tensor([requests[numbers[0]].inputs[:length]])
                trunk = self.caller.begin(ids)[1], length
            rests = [replace(requests[n], inputs=requests[n].inputs[length:]) for n in numbers]
            for row in plan_trees(rests, batch_tokens):
                self.tree([places[numbers[i]] for i in row], [rests[i] for i in row], trunk)

    def tree(
        self, places: list[tuple[int, int]], rests: list[Encoded], trunk: tuple[Any, int] | None
    ) -> None:
        tree = grow(rests)
        keep, found = torch.tensor(sum(tree.predicting, [])).unique(return_inverse=True)
        logits = self.caller.tree(tree, keep, trunk)
        sizes = [len(rest.targets) for rest in rests]
        for place, rows in zip(places, found.split(sizes), strict=True):
            self.put(place, logits[rows.to(logits.device)])

    def put(self, place: tuple[int, int], logits: Tensor) -> None:
        """Score the request at `place` by logits [targets, V]."""
        targets = torch.tensor(self.at(place).targets, device=logits.device)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = wide.log_softmax(-1)
        chosen = log_probs.gather(1, targets[:, None]).sum()
        if not bool(torch.isfinite(chosen)):
            raise UserError(
                "a log-likelihood is not finite: NaN or infinity in the logits; check the model's "
                "weights, or a wider activation width if it is quantised"
            )
        greedy = bool((log_probs.argmax(-1) == targets).all())
        self.found[place] = Score(log_likelihood=float(chosen), is_greedy=greedy)
        self.on_scored(1)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """int64 [B, T], the shorter rows filled on the right with a token that nobody looks at."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, filled in zip(rows, ids, strict=True):
        filled[: len(row)] = torch.tensor(row)
    return ids
