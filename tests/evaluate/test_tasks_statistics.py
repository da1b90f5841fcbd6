"""Bootstrap against plain resampling, flips counted by hand, divergences against scipy."""

import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from skipless.errors import UserError
from skipless.evaluate.tasks import Answers, bootstrap_interval, choice_divergences
from skipless.evaluate.tasks.statistics import accuracy_with_error, compare


def answers(log_likelihoods, gold, lengths=None):
    lengths = lengths or [[1.0] * len(row) for row in log_likelihoods]
    return Answers(
        log_likelihoods=[np.array(row, float) for row in log_likelihoods],
        lengths=[np.array(row, float) for row in lengths], gold=np.array(gold),
    )  # fmt: skip


def resampled(groups, num_resamples, seed):
    """What a bootstrap is: questions drawn with replacement, one by one."""
    generator = np.random.default_rng(seed)
    means = np.zeros(num_resamples)
    for group in groups:
        draws = generator.integers(0, len(group), (num_resamples, len(group)))
        means += group[draws].mean(1)
    return np.percentile(means / len(groups), [2.5, 97.5])


@pytest.mark.parametrize("sizes", [(80,), (80, 30)])
def test_the_interval_is_that_of_plain_resampling(sizes):
    draw = np.random.default_rng(3)
    groups = [draw.choice([-1.0, 0.0, 1.0], size, p=[0.2, 0.7, 0.1]) for size in sizes]
    found = bootstrap_interval(groups, num_resamples=40_000)
    # the ends of an interval of 40,000 draws are sure to about a hundredth of its width
    width = found[1] - found[0]
    assert found == pytest.approx(resampled(groups, 40_000, 1), abs=0.06 * width)
    normal = np.sqrt(sum(g.var() / len(g) for g in groups)) / len(groups)
    assert width == pytest.approx(2 * 1.96 * normal, rel=0.1)


def test_an_interval_of_equal_differences_is_a_point_and_of_none_an_error():
    assert bootstrap_interval([np.zeros(9)]) == (0.0, 0.0)
    assert bootstrap_interval([np.ones(3), np.zeros(3)]) == (0.5, 0.5)
    with pytest.raises(UserError, match="no question to resample"):
        bootstrap_interval([np.zeros(0)])


def test_accuracy_and_error_are_numpys():
    right = np.array([1.0, 0.0, 1.0, 1.0])
    assert accuracy_with_error(right) == (0.75, np.std(right, ddof=1) / 2)
    assert accuracy_with_error(right[:1]) == (1.0, None)


def test_picks_by_character_ties_and_right_answers():
    found = answers(
        [[-4, -6], [-3, -3], [-9, -2], [-2, -2]], [1, 0, 1, 1], [[2, 6], [1, 3], [1, 1], [4, 2]]
    )
    assert found.taken().tolist() == [0, 0, 1, 0]  # of equal ones the first
    assert found.taken(norm=True).tolist() == [1, 1, 1, 0]  # -2 against -1, -3 against -1, ...
    assert found.ties() == [1, 3] and found.ties(norm=True) == []
    assert found.right().tolist() == [0, 1, 1, 0]
    assert found.right(norm=True).tolist() == [1, 0, 1, 0]


def test_near_ties_are_those_that_rounding_may_turn():
    found = answers([[-4.0, -4.0001], [-4.0, -4.0003], [-4.0, -12.0001]], [0, 0, 0],
                    [[1, 1], [1, 1], [1, 3]])  # fmt: skip
    assert found.ties(1e-4) == [0] and found.ties() == []
    assert found.ties(1e-4, norm=True) == [0, 2]  # -4 against -4.00003 a character


def test_divergences_are_scipys():
    draw = np.random.default_rng(0)
    a, b = ([draw.normal(-30, 3, n) for n in (2, 4, 3)] for _ in range(2))
    found = choice_divergences(answers(a, [0] * 3), answers(b, [0] * 3))
    expected = [rel_entr(softmax(p), softmax(q)).sum() for p, q in zip(a, b, strict=True)]
    assert found == pytest.approx(expected, rel=1e-12)
    # a constant added to all log-likelihoods of a question changes no choice
    moved = answers([row - 800 for row in a], [0] * 3)
    assert choice_divergences(answers(a, [0] * 3), moved) == pytest.approx([0] * 3, abs=1e-12)


def test_flips_are_counted():
    before = answers([[0, -1], [0, -1], [-1, 0], [0, -1], [0, -1, -2]], [0, 1, 1, 0, 2])
    after = answers([[-1, 0], [-1, 0], [-1, 0], [0, -1], [-1, 0, -2]], [0, 1, 1, 0, 2])
    found = compare(before, after, norm=False)
    assert (
        found["acc"]["flips"] == 3 and found["num_questions"] == 5
    )  # two of them change right or wrong
    assert found["acc"]["right_to_wrong"] == 1 and found["acc"]["wrong_to_right"] == 1
    assert found["acc"]["difference"] == 0.0
    low, high = found["acc"]["interval"]
    assert low < 0 < high and "acc_norm" not in found
    divergences = choice_divergences(before, after)
    assert found["kl_mean"] == divergences.mean()
    assert found["kl_p95"] == np.percentile(divergences, 95)
    assert compare(before, before, norm=True)["acc_norm"]["interval"] == [0.0, 0.0]


def test_flips_are_of_their_metric():
    """The likeliest choice stays and the likeliest a character changes."""
    before = answers([[-4, -6.1]], [0], [[2, 3]])
    after = answers([[-4, -5.9]], [0], [[2, 3]])
    found = compare(before, after, norm=True)
    assert found["acc"]["flips"] == 0 and found["acc_norm"]["flips"] == 1
    assert found["acc_norm"]["right_to_wrong"] == 1
