"""The loader: a pure function of (seed, step), each window once an epoch, ranks are slices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.data import Loader, evaluation_batches, write_shard
from skipless.data.loader import permute
from skipless.errors import UserError


@pytest.fixture
def shard(tmp_path):
    """1,000 tokens that are their own positions."""
    return write_shard(tmp_path / "train", [list(range(1000))], vocab_size=1000)


def test_batch_depends_on_seed_and_step_only(shard):
    first = Loader(shard, 10, 4, seed=7)
    for step in (5, 0, 17):
        first.batch(step)  # what was asked before does not matter
    again = Loader(shard, 10, 4, seed=7)
    for step in (0, 3, 24, 25, 1000):
        for one, other in zip(first.batch(step), again.batch(step), strict=True):
            assert torch.equal(one, other)


def test_labels_are_the_next_tokens_of_the_text(shard):
    ids, labels = Loader(shard, 10, 4).batch(3)
    assert ids.dtype == labels.dtype == torch.int64
    assert ids.shape == labels.shape == (4, 10)
    assert torch.equal(labels, ids + 1)  # token = position in this shard
    assert (ids[:, 0] % 10 == 0).all()  # windows do not overlap


@pytest.mark.parametrize("batch_size", [1, 4, 7, 150])
def test_every_window_is_visited_once_an_epoch(shard, batch_size):
    loader = Loader(shard, 10, batch_size)
    assert loader.num_windows == 99
    steps = -(-3 * 99 // batch_size)
    visited = np.concatenate([loader.windows(step) for step in range(steps)])
    epochs = [visited[i * 99 : (i + 1) * 99] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(99))
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_take_slices_of_the_global_batch(shard, world_size):
    whole = Loader(shard, 10, 6, seed=1)
    ranks = [Loader(shard, 10, 6, seed=1, rank=r, world_size=world_size)
             for r in range(world_size)]  # fmt: skip
    for step in (0, 16, 40):
        for part in (0, 1):
            joined = torch.cat([rank.batch(step)[part] for rank in ranks])
            assert torch.equal(joined, whole.batch(step)[part])


def test_seeds_differ(shard):
    a, b = (Loader(shard, 10, 8, seed=s).windows(0) for s in (0, 1))
    assert not np.array_equal(a, b)


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_permutation_is_one_to_one(size, seed, epoch):
    order = permute(np.arange(size), size, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(size))


def test_permutation_is_even():
    """Over many seeds every place is reached about equally often (chi-square, fixed seeds)."""
    size, num_seeds = 10, 4000
    counts = np.zeros((size, size))
    for seed in range(num_seeds):
        counts[np.arange(size), permute(np.arange(size), size, seed=seed, epoch=0)] += 1
    expected = num_seeds / size
    chi2 = ((counts - expected) ** 2 / expected).sum(1)
    assert chi2.max() < 33.7  # 9 degrees of freedom: 1e-4 quantile, ten places


def test_permutation_of_a_large_corpus_costs_only_what_is_asked():
    size = 40_000_000_000
    got = permute(np.arange(1000), size, seed=0, epoch=3)
    assert len(set(got)) == 1000
    assert got.min() >= 0 and got.max() < size


def test_evaluation_batches_cover_the_shard_evenly(shard):
    batches = evaluation_batches(shard, 10, 4, 100)
    assert sum(ids.numel() for ids, _ in batches) == 100
    assert [len(ids) for ids, _ in batches] == [4, 4, 2]
    starts = torch.cat([ids[:, 0] for ids, _ in batches])
    assert starts[0] == 0 and starts[-1] > 800
    assert (starts.diff() > 0).all()


def test_evaluation_over_more_than_there_is_takes_all(shard):
    batches = evaluation_batches(shard, 10, 50, 10**9)
    starts = torch.cat([ids[:, 0] for ids, _ in batches])
    assert torch.equal(starts, torch.arange(99) * 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sequence_length": 1000}, "longer than the text"),
        ({"sequence_length": 0}, "at least 1"),
        ({"batch_size": 6, "world_size": 4}, "multiple of 4"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
    ],
)
def test_impossible_settings_are_refused(shard, arguments, words):
    with pytest.raises(UserError, match=words):
        Loader(shard, **{"sequence_length": 10, "batch_size": 4, **arguments})


def test_longest_possible_window_works(shard):
    ids, labels = Loader(shard, 999, 2).batch(0)
    assert ids[0, 0] == 0 and labels[1, -1] == 999


def test_a_negative_step_and_an_empty_evaluation_are_refused(shard):
    with pytest.raises(UserError, match="counts from 0"):
        Loader(shard, 10, 4).batch(-1)
    with pytest.raises(UserError, match="at least 1"):
        evaluation_batches(shard, 10, 4, 0)
    with pytest.raises(UserError, match="longer than the text"):
        evaluation_batches(shard, 1000, 4, 100)


def test_a_token_beyond_the_vocabulary_is_found_while_loading(shard):
    shard.path.write_bytes(b"\xff\xff" * 1000)
    with pytest.raises(UserError, match="65535, beyond its vocabulary of 1000"):
        Loader(shard, 10, 4).batch(0)
