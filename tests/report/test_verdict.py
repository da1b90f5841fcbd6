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
    assert "At equal tokens: Muon +2.2% (4.600 against 4.500); positive is worse" in worse
    assert "At equal tokens: Muon -2.2% (4.500 against 4.600)" in better
    assert "is met with Muon" in worse and "is met with Muon" in better
    assert "is missed with Muon" in say(pair(loss=(4.5, 4.9)), topic)


def test_a_difference_within_the_error_is_no_difference(pair):
    assert "no established difference" in say(pair(standard_error=0.08))
    assert "no established difference" not in say(pair(standard_error=0.01))
    assert "Not to be told apart from it" in say(pair(standard_error=0.08))
    assert "aim" not in say(pair(standard_error=0.08), "The price of no skip")
    short = say(pair(standard_error=0.08), "In short")
    assert "no established difference" in short and "higher than" not in short


def test_rounding_flips(pair):
    topic = "Rounded to few bits"
    less, more = say(pair(), topic), say(pair(damage=(0.4, 1.0)), topic)
    assert "At W4A4 it loses less with Muon (+0.400 against +1.000)" in less
    assert "At W4A4 it ends ahead with Muon (5.000 against" in less
    assert "At W4A4 it loses more with Muon (+1.000 against +0.400)" in more
    assert "At W4A4 it ends behind with Muon (5.600 against" in more
    assert "At W8A6 it loses less" in less and "At W8A6 it loses more" in more


def test_what_is_within_noise_is_neither_less_nor_more(pair, edit):
    topic = "Rounded to few bits"
    same = "At W8A6 it loses as much, within noise, with Muon."
    assert same in say(pair(damage=(1.0, 1.004)), topic)  # +0.0500 and +0.0502
    runs = pair(damage=(1.0, 0.8))
    assert "At W8A6 it loses less with Muon (+0.040 against +0.050)" in say(runs, topic)
    for run in runs:
        edit(run, "quant.json", lambda q: [r.update(standard_error=0.01) for r in q["rows"]] and q)
    assert same in say(runs, topic) and "At W4A4 it loses less" in say(runs, topic)


def test_no_number_is_minus_nothing(pair):
    text = say(pair(damage=(-1e-4, 1.0)))
    assert "against +0.000)" in text and "-0.000" not in text


def test_w4a4_and_block_scope_are_explained_where_they_are_met_first(pair, make, tmp_path):
    told = "4-bit weights and 4-bit activations, everything between embedding and head is rounded"
    for text in (say(pair()), say([make(tmp_path / "alone")])):
        first = min(text.index("W4A4"), text.index("block scope"))
        assert first < text.index(told) < first + 60


def test_many_pairs_do_not_make_many_sentences(four):
    found = verdict(compare(load_runs(four)))
    assert all(len(s.sentences) <= 5 for s in found)
    assert all(s.sentences.count(x) == 1 for s in found for x in s.sentences)
    price = say(four, "The price of no skip")
    assert "KL-Shampoo +2.0% (4.640 against 4.550) and Muon +3.1% (4.630 against 4.490)" in price
    assert "is met with KL-Shampoo and Muon" in price
    rounded = say(four, "Rounded to few bits")
    assert "At W4A4 it loses less with Muon (+0.450 against +1.010); more with KL-Sh" in rounded


def test_too_little_training_is_said_first(pair, make, tmp_path):
    small = verdict(compare(load_runs(pair(loss=(5.9, 6.0)))))[0]
    assert small.topic == "In short"
    assert small.sentences[0].startswith("Too small for conclusions: the best row is only 0.20")
    assert "Too small" not in say(pair(loss=(4.5, 4.6)))
    noted = make(tmp_path / "noted", loss=5.9)
    (noted / "data.json").write_text('{"unigram_loss": 6.5}')  # measured, not estimated
    assert "Too small" not in say([noted])


def test_an_unfinished_run_is_said_first_and_not_compared(pair):
    runs = pair(steps=40)
    (runs[1] / "train.json").unlink()
    (runs[1] / "metrics.jsonl").write_text('{"step": 29, "tokens": 29696, "loss": 4.6}\n')
    text = say(runs, "In short")
    assert text.strip().startswith("Not finished and so not compared: without (step 29 of 40).")
    assert "lost less" not in text and "higher" not in text


def test_less_damage_can_still_end_behind(pair):
    text = say(pair(damage=(0.5, 0.45)), "Rounded to few bits")
    assert "At W4A4 it loses less" in text and "At W4A4 it ends behind" in text


def test_kurtosis_is_never_judged_alone(pair):
    text = say(pair(), "Inside the models")
    assert "Mean |kurtosis|: Muon 0.1" in text
    assert "R_N: Muon 0." in text
    assert "does not decide the loss" in text
    assert "aim: below 1, met" in text
    assert "aim: below 1, missed with Muon" in say(pair(kurtosis=(9.0, 3.0)), "Inside the models")


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


def test_a_row_that_learned_little_does_not_win_by_having_nothing_to_lose(pair):
    runs = pair(loss=(4.5, 6.5), damage=(1.0, 0.01))
    text = say(runs, "In short")
    assert "Left out of the comparisons: without (6.500 nats), having learned less" in text
    assert "lost less" not in text and "higher" not in text
    assert "cannot be told from these runs" in say(runs, "The price of no skip")


def test_a_row_that_is_left_out_is_in_no_order(make, tmp_path):
    """One that is unfinished, or learned little, leads no list."""
    rows = {"adamw": {"loss": 4.5, "damage": 1.0, "kurtosis": 9.0, "error": 1.0},
            "soap": {"loss": 4.6, "damage": 0.9, "kurtosis": 5.0, "error": 0.8},
            "muon": {"loss": 4.7, "damage": 0.8, "kurtosis": 1.0, "error": 0.6},
            "shampoo": {"loss": 6.5, "damage": 0.01, "kurtosis": 0.1, "error": 0.1}}  # fmt: skip
    text = say([make(tmp_path / name, label=name, optimizer=name, **values)
                for name, values in rows.items()])  # fmt: skip
    assert "smallest first: muon +0.800, soap +0.900 and adamw +1.000." in text
    assert "Left out of the comparisons: shampoo" in text and "Over these 4 rows" not in text


def test_losses_say_of_how_many_tokens_they_are(pair, edit):
    runs = pair()
    for run, count in zip(runs, (4096, 4096), strict=True):
        edit(run, "eval.json", lambda e, count=count: e.update(num_tokens=count))
    assert "Held-out losses are means over 4,096 tokens." in say(runs, "How sure this is")
    edit(runs[0], "eval.json", lambda e: e.update(num_tokens=2048))
    assert "means over 2,048 to 4,096 tokens." in say(runs, "How sure this is")
    (runs[0] / "eval.json").unlink()  # then quant.json counts
    edit(runs[0], "quant.json", lambda q: q.update(num_tokens=1024))
    assert "means over 1,024 to 4,096 tokens." in say(runs, "How sure this is")


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
    assert "At W8A8 it loses less" in say(runs)
    assert "Rounded to W8A8 at block scope (8-bit weights" in say(runs, "In short")
