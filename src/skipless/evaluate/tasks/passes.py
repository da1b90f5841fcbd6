"""Forward passes over requests, in the ways of `scoring.py`.

A request's log-likelihood is the same in each up to the rounding of float32; what differs is how
much is computed again, and how much is padded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.evaluate.tasks.calling import Caller
from skipless.evaluate.tasks.encoding import Encoded
from skipless.evaluate.tasks.planning import pieces, plan
from skipless.evaluate.tasks.trees import grow, plan_trees, plan_trunks
from skipless.quant import quantization

LONG_ANSWER = 48
"""Tokens from which on an answer is scored plainly where others are in trees. It sums the rounding
of as many predictions, which other sums in attention move further (by 1e-4 nats of 270, SmolLM2)
than sharing a short context is worth."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model says of one request."""

    log_likelihood: float
    """Natural logarithm, of the whole continuation."""
    is_greedy: bool
    """Whether every token of it is the likeliest."""


class Worker:
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
        if not always:
            long = [place for place in places if len(self.at(place).targets) >= LONG_ANSWER]
            self.all_plain(long, batch_tokens)
            places = [place for place in places if len(self.at(place).targets) < LONG_ANSWER]
        requests = [self.at(place) for place in places]
        trunks = [(0, list(range(len(requests))))]
        if self.caller.has_cache:
            most, least = (0, 1) if always else (batch_tokens, None)
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
