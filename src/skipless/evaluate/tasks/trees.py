"""Requests that begin alike as one row of tokens, each of which is computed once.

Requests form a tree: a node is a token, its ancestors are what was read before it, and that is all
it may see. Laid out in one row with such a mask, neither a shared beginning is computed again nor
is anything padded, and few passes are needed. What more requests than a row holds begin with, such
as the same solved examples, is a trunk: computed once, its keys and values are kept for many rows.
Read by `scoring.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipless.evaluate.tasks.encoding import Encoded, common_length
from skipless.evaluate.tasks.planning import PASS_TOKENS

QUADRATIC = 1000
"""A row of n tokens costs n (1 + n / QUADRATIC), since attention computes what the mask hides too.
Tuned on SmolLM2-135M and HellaSwag, whose time is flat from 700 to 1500."""

TRUNK = 128
"""The fewest tokens that are worth a pass of their own before the rows."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Some requests as one row of N tokens, `ids` int64 [N]."""

    ids: Tensor
    positions: Tensor
    """int64 [N], how many ancestors each has."""
    sees: Tensor
    """bool [N, N], whether a token sees another: itself and its ancestors."""
    predicting: list[list[int]]
    """For every request the places that predict its targets."""


def grow(requests: Sequence[Encoded]) -> Tree:
    """The tree of `requests`, which share most where neighbours begin alike."""
    ids: list[int] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    path: list[int] = []
    before: tuple[int, ...] = ()
    for request in requests:
        shared = common_length(before, request.inputs)
        new = range(len(ids), len(ids) + len(request.inputs) - shared)
        ids += request.inputs[shared:]
        depths += range(shared, len(request.inputs))
        path, before = [*path[:shared], *new], request.inputs
        paths.append(path)
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for path in paths:
        places = torch.tensor(path)
        sees[places[:, None], places] = torch.ones(len(path), len(path), dtype=torch.bool).tril()
    return Tree(
        ids=torch.tensor(ids), positions=torch.tensor(depths), sees=sees,
        predicting=[p[-len(r.targets) :] for p, r in zip(paths, requests, strict=True)],
    )  # fmt: skip


def plan_trees(requests: Sequence[Encoded], most: int) -> list[list[int]]:
    """Numbers of requests by tree, of at most `most` tokens each unless it is one request.

    Sorted by their tokens, so that what begins alike comes together, across questions too; a
    request joins the tree before it where that costs less than a row of its own.
    """
    trees: list[list[int]] = []
    size, before = 0, ()
    for number in sorted(range(len(requests)), key=lambda n: requests[n].inputs):
        inputs = requests[number].inputs
        joined = size + len(inputs) - common_length(before, inputs)
        if trees and joined <= most and _cost(joined) <= _cost(size) + _cost(len(inputs)):
            trees[-1].append(number)
            size = joined
        else:
            trees.append([number])
            size = len(inputs)
        before = inputs
    return trees


def plan_trunks(
    requests: Sequence[Encoded], most: int, *, least: int | None = None
) -> list[tuple[int, list[int]]]:
    """(tokens of the trunk, 0 for none, numbers of the requests that have it), each request once.

    Requests that share `least` tokens (TRUNK) have a trunk where one row of `most` tokens does not
    hold them all. It ends before anything is predicted.
    """
    least = TRUNK if least is None else least
    found: list[tuple[int, list[int]]] = [(0, [])]

    def close() -> None:
        if len(run) > 1 and size > most:
            found.append((length, run))
        else:
            found[0][1].extend(run)

    run: list[int] = []
    length = size = 0
    for number in sorted(range(len(requests)), key=lambda n: requests[n].inputs):
        inputs = requests[number].inputs
        before_targets = len(inputs) - len(requests[number].targets)
        shared = common_length(requests[run[-1]].inputs, inputs) if run else 0
        if run and min(length, shared, before_targets) >= least:
            run.append(number)
            length = min(length, shared, before_targets)
            size += len(inputs) - shared
        else:
            close()
            run, length, size = [number], before_targets, len(inputs)
    close()
    return [(length, numbers) for length, numbers in found if numbers]


def _cost(size: int) -> float:
    return size * (1 + size / QUADRATIC) + PASS_TOKENS
