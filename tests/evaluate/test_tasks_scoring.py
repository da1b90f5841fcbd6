"""Scores against one plain float64 pass a request; what cannot be shared is not."""

import copy
import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tasks_material import llama

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.evaluate.tasks import Encoded, score_requests, score_tasks
from skipless.evaluate.tasks.encoding import shared_length
from skipless.evaluate.tasks.planning import PASS_TOKENS, pieces, plan
from skipless.evaluate.tasks.scoring import choose_mode
from skipless.evaluate.tasks.trees import grow, plan_trees, plan_trunks
from skipless.model import Transformer
from skipless.model.cache import KeyValueCache
from skipless.quant import quantized


def request(context, targets):
    return Encoded(inputs=(*context, *targets[:-1]), targets=tuple(targets), is_truncated=False)


def question(seed, context, *lengths):
    """A context of `context` tokens, and a continuation of each length."""
    draw = torch.Generator().manual_seed(seed)
    words = lambda n: torch.randint(1, 61, (n,), generator=draw).tolist()  # noqa: E731
    before = words(context)
    return [request(before, words(length)) for length in lengths]


QUESTIONS = [
    question(0, 5, 3, 1, 4),
    question(1, 5, 2, 2),
    question(2, 9, 1, 1),  # a single token each: no second pass
    question(3, 1, 6, 2),
    [request([7, 8, 9, 4], [5, 6]), request([7, 8, 9, 3, 2], [5, 6])],  # the context differs
    [request([1, 2, 3], [4, 5]), request([2, 2, 3], [4, 5])],  # nothing is shared
    question(4, 6, 3),
]


def oracle(model, questions):
    """Plain passes in float64, one a request, the softmax written out."""
    wide = copy.deepcopy(model).double().eval()
    found = []
    with torch.no_grad():
        for one in (r for requests in questions for r in requests):
            logits = wide(torch.tensor([one.inputs])).logits[0, -len(one.targets) :]
            assert logits.dtype == torch.float64
            probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
            chosen = probs[range(len(one.targets)), list(one.targets)]
            greedy = logits.argmax(-1).tolist() == list(one.targets)
            found.append((float(chosen.log().sum()), greedy))
    return found


def flat(scores):
    return [(s.log_likelihood, s.is_greedy) for row in scores.scores for s in row]


def close(a, b, tolerance):
    assert [g for _, g in a] == [g for _, g in b]
    assert [x for x, _ in a] == pytest.approx([x for x, _ in b], abs=tolerance)


@pytest.mark.parametrize("batch_tokens", [1, 16, 1024])
def test_every_mode_equals_plain_float64_passes(model, batch_tokens):
    expected = oracle(model, QUESTIONS)
    assert choose_mode(model, QUESTIONS) == ("shared", "")
    for mode in ("shared", "plain", "single"):
        found = score_requests(model, QUESTIONS, mode=mode, batch_tokens=batch_tokens)
        assert found.mode == mode
        close(flat(found), expected, 1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 16, 1024])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_scores_the_same_in_every_mode(attention, batch_tokens):
    pytest.importorskip("transformers")
    model = llama()
    model.set_attn_implementation(attention)
    found = score_requests(model, QUESTIONS, batch_tokens=batch_tokens)
    assert found.mode == "tree" and not found.note
    close(flat(found), oracle(model, QUESTIONS), 1e-5)
    for mode in ("shared", "plain", "single"):
        close(flat(score_requests(model, QUESTIONS, mode=mode)), oracle(model, QUESTIONS), 1e-5)


def foreign(name, **settings):
    """A small model of another family."""
    import transformers

    torch.manual_seed(0)
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
              "initializer_range": 0.3}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**common, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("name", "settings", "mode"),
    [
        ("GPTNeoX", {"intermediate_size": 48, "max_position_embeddings": 64}, "tree"),
        ("OPT", {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}, "tree"),
        # positions that are counted from the mask, and a window that such a mask would lose
        ("Bloom", {}, "shared"),
        ("Mistral", {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4},
         "shared"),
    ],
)  # fmt: skip
def test_other_families_are_scored_as_they_allow(name, settings, mode):
    pytest.importorskip("transformers")
    model = foreign(name, **settings)
    found = score_requests(model, QUESTIONS)
    close(flat(found), oracle(model, QUESTIONS), 2e-5)
    assert (found.mode, found.note) == (mode, "")


def test_a_mask_that_is_overlooked_is_noticed():
    pytest.importorskip("transformers")
    model = llama()
    forward = model.forward

    def overlooking(input_ids, attention_mask=None, position_ids=None, logits_to_keep=0):
        return forward(input_ids, attention_mask=torch.ones_like(input_ids),
                       position_ids=position_ids, logits_to_keep=logits_to_keep)  # fmt: skip

    model.forward = overlooking
    alike = [question(n, 5, 1, 1) for n in range(3)]  # within a question there is nothing to hide
    for questions in (QUESTIONS, alike):
        assert choose_mode(model, questions)[0] == "plain"


def test_a_tree_holds_every_token_once():
    requests = [r for q in QUESTIONS for r in q]
    for most in (1, 20, 1000):
        trees = plan_trees(requests, most)
        assert sorted(n for tree in trees for n in tree) == list(range(len(requests)))
        for numbers in trees:
            chosen = [requests[n] for n in numbers]
            tree = grow(chosen)
            beginnings = {r.inputs[: n + 1] for r in chosen for n in range(len(r.inputs))}
            assert len(tree.ids) == len(beginnings) and (len(numbers) == 1 or len(tree.ids) <= most)
            assert torch.equal(tree.sees.sum(1), tree.positions + 1)
            for one, places in zip(chosen, tree.predicting, strict=True):
                seen = tree.sees[places[-1]]
                assert tuple(tree.ids[seen].tolist()) == one.inputs and len(places) == len(
                    one.targets
                )
    assert len(plan_trees(requests, 1000)) == 1


SUBJECTS = [
    [request([*front, *one.inputs[:8], 9], one.targets) for one in question(n, 9, 1, 3)]
    for front in (list(range(1, 41)), list(range(21, 60)))
    for n in range(4)
]
"""Eight questions behind one of two long beginnings."""


def test_a_trunk_is_computed_once(monkeypatch):
    """Rows after it hold only what is new, and the numbers are those of plain passes."""
    pytest.importorskip("transformers")
    model = llama()
    flat_requests = [r for q in SUBJECTS for r in q]
    monkeypatch.setattr("skipless.evaluate.tasks.trees.TRUNK", 30)
    trunks = plan_trunks(flat_requests, 64, least=30)
    assert sorted(length for length, _ in trunks) == [39, 40]
    assert sorted(n for _, numbers in trunks for n in numbers) == list(range(16))
    computed = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(args[0].numel()), with_kwargs=True
    )
    found = score_requests(model, SUBJECTS, mode="tree", batch_tokens=64)
    beginnings = {r.inputs[: n + 1] for r in flat_requests for n in range(len(r.inputs))}
    assert sum(computed) == len(beginnings)
    close(flat(found), oracle(model, SUBJECTS), 1e-5)
    # one row that holds all needs no trunk; none is as long as 50; the last token of a context
    # predicts the first target
    assert [length for length, _ in plan_trunks(flat_requests, 1000, least=30)] == [0]
    assert [length for length, _ in plan_trunks(flat_requests, 64, least=50)] == [0]
    whole = [request([1] * 40, [2, 3, 4]), request([1] * 40, [2, 3, 5])]
    assert plan_trunks(whole, 10, least=30) == [(39, [0, 1])]


def test_long_answers_are_scored_plainly():
    """Whose log-likelihoods are the bits of plain scoring; a tree may round otherwise."""
    pytest.importorskip("transformers")
    model, questions = llama(), [question(0, 5, 48, 2), question(1, 5, 50, 3), question(2, 6, 3, 3)]
    lengths = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append("attention_mask" in kwargs), with_kwargs=True
    )
    found = score_requests(model, questions, mode="tree").scores
    assert lengths == [False, True]  # both long answers in one batch, the rest in one tree
    plain = score_requests(model, [[questions[0][0], questions[1][0]]], mode="plain").scores[0]
    assert [found[0][0], found[1][0]] == plain


def test_a_cache_that_does_not_forget_is_noticed():
    """The rows behind a trunk would see one another."""
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicCache, "crop", lambda self, count: None)
        assert choose_mode(llama(), SUBJECTS)[0] == "tree"  # nothing has a trunk
        patch.setattr("skipless.evaluate.tasks.trees.TRUNK", 30)
        assert choose_mode(llama(), SUBJECTS, 64)[0] != "tree"


def test_the_models_own_greedy_text_is_greedy(model):
    ids = model.generate(torch.tensor([[3, 1, 4]]), 4)[0].tolist()
    other = ids[:-1] + [(ids[-1] + 1) % 61]
    requests = [request(ids[:3], ids[3:]), request(ids[:3], other[3:])]
    scores = score_requests(model, [requests]).scores[0]
    assert [s.is_greedy for s in scores] == [True, False]


def test_training_mode_comes_back(model):
    model.train()
    score_requests(model, QUESTIONS[:1])
    assert model.training and model.layers[0].training


@pytest.mark.parametrize("scheme", ["W4Afp", "W8A6-a:token", "W8A8-KV4-a:token-w:g8"])
def test_sharing_keeps_the_numbers_of_schemes_by_token(model, scheme):
    with quantized(model, scheme, "block"):
        found = score_requests(model, QUESTIONS)
        assert found.mode == "shared"
        close(flat(found), flat(score_requests(model, QUESTIONS, mode="single")), 1e-5)


def test_sharing_keeps_the_numbers_of_static_ranges(model, batches):
    with quantized(model, "W8A6-static", "block", calibration=batches):
        found = score_requests(model, QUESTIONS)
        assert found.mode == "shared"
        close(flat(found), flat(score_requests(model, QUESTIONS, mode="single")), 1e-5)


@pytest.mark.parametrize("scheme", ["W8A4", "W8Afp-KV4"])
def test_ranges_of_whole_tensors_go_one_request_at_a_time(model, scheme):
    with quantized(model, scheme, "block"):
        found = score_requests(model, QUESTIONS)
        assert found.mode == "single" and "one request at a time" in found.note
        alone = [score_requests(model, [[r]], mode="plain") for q in QUESTIONS for r in q]
        assert flat(found) == [flat(one)[0] for one in alone]
        shared = flat(score_requests(model, QUESTIONS, mode="shared"))
        gap = max(abs(a - b) for (a, _), (b, _) in zip(shared, flat(found), strict=True))
        assert gap > 1e-3  # what sharing would have changed


def test_a_cache_that_gives_other_numbers_is_not_used(model):
    class Broken(KeyValueCache):
        def reorder(self, rows):
            super().reorder(rows)
            for store in self.stores.values():
                store.stored = store.stored * 3

    model.new_cache = Broken
    found = score_requests(model, QUESTIONS)
    assert found.mode == "plain" and "gives other numbers" in found.note
    close(flat(found), oracle(model, QUESTIONS), 1e-5)


def test_what_requests_share():
    assert shared_length(QUESTIONS[0]) == 5
    assert shared_length(QUESTIONS[4]) == 3
    assert shared_length(QUESTIONS[5]) == 0
    # the continuations begin alike, but those tokens are asked for
    assert shared_length([request([1, 2], [3, 4, 5]), request([1, 2], [3, 4, 6])]) == 2


def test_models_that_are_no_causal_language_models():
    settings = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=61,
                    max_position_embeddings=16)  # fmt: skip
    with pytest.raises(UserError, match="sees the tokens that it is asked for"):
        score_requests(Transformer(ModelConfig(**settings, causal=False), seed=0), QUESTIONS)
    with pytest.raises(UserError, match="no logits"):
        score_requests(Transformer(ModelConfig(**settings, num_labels=2), seed=0), QUESTIONS)


def test_tokens_beyond_the_vocabulary_and_nan(model):
    with pytest.raises(UserError, match="token 61 is beyond the model's vocabulary of 61"):
        score_requests(model, [[request([1, 2], [61])]])
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        score_requests(model, QUESTIONS, mode="plain")


def test_thousands_of_equal_questions_are_planned_at_once():
    start = time.perf_counter()
    batches = pieces([3] * 20_000, 10**9)
    assert [len(batch) for batch in batches] == [20_000]
    assert len(pieces([3] * 20_000, 1)) == 20_000
    alike = [[request([1] * 30, [5, 6]), request([1] * 30, [5, 7])]] * 5000
    groups, whole = plan(alike, 1, always=True)
    assert len(groups) == 5000 and not whole
    assert time.perf_counter() - start < 5  # minutes, if every pair were looked at


@given(
    st.lists(st.integers(1, 60), max_size=8) | st.lists(st.integers(20, 22), max_size=8),
    st.integers(1, 120),
)
def test_pieces_cost_least_of_all_cuts(lengths, batch_tokens):
    def cost(batches):
        return sum(len(b) * max(b) + PASS_TOKENS for b in batches)

    def allowed(batch):
        return len(batch) == 1 or len(batch) * max(batch) <= batch_tokens

    found = pieces(lengths, batch_tokens)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    batches = [[lengths[i] for i in batch] for batch in found]
    assert all(map(allowed, batches))
    ordered, cheapest = sorted(lengths, reverse=True), []
    for cuts in itertools.product((False, True), repeat=max(len(lengths) - 1, 0)):
        split, start = [], 0
        for end in [i + 1 for i, cut in enumerate(cuts) if cut] + [len(lengths)]:
            split.append(ordered[start:end])
            start = end
        if lengths and all(map(allowed, split)):
            cheapest.append(cost(split))
    assert cost(batches) == min(cheapest, default=0)


def test_a_plan_holds_every_question_once_and_shares_where_that_is_cheaper():
    long = [question(n, 40 + n, 3, 4, 5) for n in range(6)]
    short = [question(9 + n, 2, 20, 20) for n in range(6)]
    groups, whole = plan([*long, *short], 1024)
    assert sorted([*whole, *(n for g in groups for n in g.numbers)]) == list(range(12))
    assert whole == list(range(6, 12))
    assert len(groups) == 1 and groups[0].length == 40  # recomputing 5 tokens is less than a pass
    groups, whole = plan([*long, *short], 1024, only_equal=True, always=True)
    assert not whole and all(len(g.numbers) == 1 for g in groups[:-1])
    assert all(max(g.widths) <= 100 for g in plan(long, 100)[0] if len(g.numbers) > 1)


@pytest.mark.parametrize("name", ["limit", "max_length", "batch_tokens"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_numbers_are_checked_before_anything_is_read(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}; a whole number of at least 1"):
        score_tasks(torch.nn.Linear(1, 1), None, **{name: value})
