"""Which requests are computed together, so that forward passes cost least. Read by `scoring.py`.

A question's requests share a prefix. Questions are grouped: one pass over a prefix of equal length
of each, then passes over what follows, in batches that waste little on padding. Where sharing saves
less than its second pass costs, requests are scored whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from skipless.evaluate.tasks.encoding import Encoded, shared_length

PASS_TOKENS = 20
"""A forward pass reads every weight, which takes a CPU as long as computing so many tokens."""


@dataclass(frozen=True)
class Group:
    """Questions that are scored together. A shorter prefix than a question shares is right too, and
    costs tokens that are computed for each of its requests; a group of its own costs two passes."""

    numbers: list[int] = field(default_factory=list)
    num_requests: int = 0
    length: int = 0
    """Of the prefix."""
    total: int = 0
    """Tokens of all requests."""

    @property
    def widths(self) -> tuple[int, int]:
        """Tokens of prefixes, and of what follows them."""
        return len(self.numbers) * self.length, self.total - self.num_requests * self.length

    @property
    def cost(self) -> int:
        """In tokens; 0 for no questions. Answers of one token need no second pass."""
        return sum(width + PASS_TOKENS for width in self.widths if width)

    def with_(self, other: Group) -> Group:
        """Both, where `other` has the shorter prefix."""
        return Group(
            self.numbers + other.numbers, self.num_requests + other.num_requests, other.length,
            self.total + other.total,
        )  # fmt: skip


def plan(
    questions: Sequence[Sequence[Encoded]],
    batch_tokens: int,
    *,
    only_equal: bool = False,
    always: bool = False,
) -> tuple[list[Group], list[int]]:
    """Groups of questions, and the numbers of those whose requests are scored whole.

    `only_equal` groups questions only where they share equally much; `always` shares wherever there
    is anything to share, worth it or not.
    """
    shared = {n: shared_length(r) for n, r in enumerate(questions) if len(r) > 1}
    whole = [n for n in range(len(questions)) if not shared.get(n)]
    groups, group = [], Group()
    for number in sorted((n for n in shared if shared[n]), key=lambda n: -shared[n]):
        requests = questions[number]
        total = sum(len(r.inputs) for r in requests)
        one = Group([number], len(requests), shared[number], total)
        both = group.with_(one)
        joins = group.length == one.length if only_equal else both.cost < group.cost + one.cost
        if joins and max(both.widths) <= batch_tokens:
            group = both
        else:
            groups.append(group)
            group = one
    groups.append(group)
    kept = []
    for group in groups:
        if group.numbers and (always or group.cost < group.total):
            kept.append(group)
        else:
            whole += group.numbers
    return kept, whole


def pieces(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Places of rows of these lengths, cut into batches so that padding and passes cost least.

    Rows are sorted, longest first; a batch costs its rows times its longest, and PASS_TOKENS, and
    has at most `batch_tokens` unless it is one row. Of rows of one length a batch takes as many as
    it may: handing it one more of an earlier batch never costs more. So it starts where lengths
    change, or as early as it may, and thousands of equal rows take no time.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [lengths[i] for i in order]
    changes = [i for i in range(len(sizes)) if i == 0 or sizes[i] != sizes[i - 1]]
    best: list[tuple[int, int]] = [(0, 0)]  # of the first n rows: cost, where the last batch starts
    earliest = 0
    for end in range(1, len(sizes) + 1):
        while earliest < end - 1 and (end - earliest) * sizes[earliest] > batch_tokens:
            earliest += 1  # too wide for good: later ends make it wider
        starts = changes[bisect_right(changes, earliest) : bisect_left(changes, end)]
        best.append(
            min(
                (best[start][0] + (end - start) * sizes[start] + PASS_TOKENS, start)
                for start in (earliest, *starts)
            )
        )
    found, end = [], len(sizes)
    while end:
        start = best[end][1]
        found.append(order[start:end])
        end = start
    return found[::-1]
