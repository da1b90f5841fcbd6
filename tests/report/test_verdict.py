"""The verdict follows the numbers: turn the numbers round and the sentences turn round."""

import math

import pytest

from skipless.config import ConnectionConfig
from skipless.report import compare, load_runs, verdict

FREE = ConnectionConfig(kind="none")


def say(runs, topic=None):
    """All sentences, or those under one topic, as one text."""
    found = verdict(compare(load_runs(runs)))
    chosen = [s for s in found if topic in (None, s.topic)]
    return " ".join(" ".join((s.lead, *s.sentences)) for s in chosen)


@pytest.fixture
def pair(make, tmp_path):
    """Make a residual row and a residual-free row from the numbers that matter."""
    count = iter(range(100))

    def build(*, loss=(4.5, 4.6), damage=(1.0, 0.4), kurtosis=(9.0, 0.2), error=(1.0, 0.6), **more):
        base = tmp_path / str(next(count))
        kinds = ({"label": "with"}, {"label": "without", "connection": FREE})
        return [
            make(base / kind["label"], loss=loss[i], damage=damage[i], kurtosis=kurtosis[i],
                 error=error[i], **kind, **more)
            for i, kind in enumerate(kinds)
        ]  # fmt: skip

    return build


def test_the_lowest_loss_comes_first_and_flips(pair):
    topic = "Full precision"
    assert "Lowest held-out loss: with," in say(pair(), topic)
    assert "Lowest held-out loss: without," in say(pair(loss=(4.6, 4.5)), topic)


def test_the_gap_flips(pair):
    topic = "The price of no skip"
    worse, better = say(pair(), topic), say(pair(loss=(4.6, 4.5)), topic)
    assert "With Muon: 4.600 against 4.500, 2.2% higher (worse) at equal tokens" in worse
    assert "With Muon: 4.500 against 4.600, 2.2% lower (better) at equal tokens" in better
    assert "met" in worse and "met" in better
    assert "missed" in say(pair(loss=(4.5, 4.9)), topic)


def test_a_difference_within_the_error_is_no_difference(pair):
    assert "no established difference" in say(pair(standard_error=0.08))
    assert "no established difference" not in say(pair(standard_error=0.01))
    assert "Not to be told apart from it" in say(pair(standard_error=0.08))


def test_rounding_flips(pair):
    topic = "Rounded to few bits"
    less, more = say(pair(), topic), say(pair(damage=(0.4, 1.0)), topic)
    assert "at W4A4 it loses less, +0.400 against +1.000, and ends ahead (5.000 against" in less
    assert "at W4A4 it loses more, +1.000 against +0.400, and ends behind (5.600 against" in more
    assert "at W8A6 it loses less" in less and "at W8A6 it loses more" in more


def test_less_damage_can_still_end_behind(pair):
    text = say(pair(damage=(0.5, 0.45)), "Rounded to few bits")
    assert "at W4A4 it loses less" in text and "ends behind" in text


def test_kurtosis_is_never_judged_alone(pair):
    text = say(pair(), "Inside the models")
    assert "mean |kurtosis|" in text
    assert "R_N, is" in text
    assert "does not decide the loss" in text
    assert "aim: below 1, met" in text
    assert "aim: below 1, missed" in say(pair(kurtosis=(9.0, 3.0)), "Inside the models")


def test_the_summary_of_one_pair_flips(pair):
    text = say(pair(), "In short")
    assert "held-out loss was 2.2% higher than with them" in text
    assert "lost less and ended with the lower loss" in text
    flipped = say(pair(loss=(4.6, 4.5), damage=(0.4, 1.0)), "In short")
    assert "held-out loss was 2.2% lower than with them" in flipped
    assert "lost more and ended with the higher loss" in flipped


def test_the_summary_of_several_counts(four):
    text = say(four, "In short")
    assert "higher in both comparisons (+2.0% to +3.1%" in text
    assert "lost less in 1 of 2 and ended with the lower loss in 1 of 2" in text


def test_a_row_far_behind_does_not_win_by_having_nothing_to_lose(pair):
    text = say(pair(loss=(4.5, 6.5), damage=(1.0, 0.01)), "In short")
    assert "Not counted for rounding: without" in text
    assert "lost less" not in text


def test_one_seed_is_said(pair):
    assert "One seed a row" in say(pair(), "How sure this is")


def test_several_seeds_are_said(make, tmp_path):
    runs = [make(tmp_path / f"s{seed}", label="row", seed=seed, loss=4.5 + 0.01 * seed)
            for seed in range(3)]  # fmt: skip
    text = say(runs, "How sure this is")
    assert "3 seeds a row" in text and "standard error over seeds" in text
    assert "One seed" not in text


def test_a_diverged_row_is_named_and_not_ranked(pair):
    text = say(pair(loss=(4.5, math.nan)))
    assert "without did not train: its held-out loss is not finite" in text
    assert "no comparison" in text
    assert "nan" not in text.lower().replace("finance", "")


def test_without_a_twin_there_is_no_price(make, tmp_path):
    runs = [make(tmp_path / "a", optimizer="adamw"), make(tmp_path / "b", connection=FREE)]
    assert "cannot be told from these runs" in say(runs)


def test_without_quantisation_nothing_is_claimed(pair):
    text = say(pair(without=("quant.json",)))
    assert "nothing can be said about rounding" in text
    assert "lost less" not in text


def test_the_harshest_scheme_stands_in_for_w4a4(pair, edit):
    runs = pair()
    keep = ("W8A12", "W8A8")
    for run in runs:
        edit(run, "quant.json", lambda q: q.update(
            rows=[r for r in q["rows"] if r["scheme"] in keep]))  # fmt: skip
    assert "at W8A8 it loses less" in say(runs)
