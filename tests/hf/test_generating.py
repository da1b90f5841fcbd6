"""Generation in transformers equals our own decoder: caches, beams, padding, attention dispatch."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, StaticCache

from skipless.errors import UserError
from skipless.hf import QuantizedCache
from skipless.hf.past import CACHE_NAME

from .hf_models import KINDS, SMALL, build, ids, own

GREEDY = {"max_new_tokens": 12, "do_sample": False}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_own_decoder(kind):
    model, x = build(kind), ids()
    expected = own(model).generate(x, GREEDY["max_new_tokens"])
    assert torch.equal(model.generate(x, **GREEDY), expected)
    assert torch.equal(model.generate(x, use_cache=False, **GREEDY), expected)
    static = model.generate(x, cache_implementation="static", **GREEDY)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_with_a_cache_are_those_without(kind):
    model = build(kind)
    options = {**GREEDY, **BEAMS}
    cached = model.generate(ids(), **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))
    assert cached.shape == (4, 21)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_left_padded_batch_equals_its_texts_alone(kind, position):
    model = build(kind, position=position)
    texts = [ids(1, 4, seed=2), ids(1, 9, seed=3), ids(1, 1, seed=4)]
    batch, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        batch[row, 9 - text.shape[1] :], mask[row, 9 - text.shape[1] :] = text, 1
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        found = model.generate(batch, attention_mask=mask, pad_token_id=0, **GREEDY, **options)
        for row, text in enumerate(texts):
            alone = own(model).generate(text, GREEDY["max_new_tokens"])
            assert torch.equal(found[row, 9 - text.shape[1] :], alone[0]), (row, options)


@pytest.mark.parametrize("kind", ["none", "universal"])
def test_assisted_decoding_gives_the_same_text(kind):
    model, helper = build(kind), build("none", seed=5)
    found = model.generate(ids(1), assistant_model=helper, **GREEDY)
    assert torch.equal(found, model.generate(ids(1), **GREEDY))


@pytest.mark.parametrize("kind", ["none", "universal"])
@pytest.mark.parametrize("cut", [1, 5])
def test_a_text_in_two_calls_equals_one(kind, cut):
    model, x = build(kind), ids()
    cache = StaticCache(config=model.config, max_cache_len=16) if cut == 1 else DynamicCache()
    with torch.no_grad():
        whole = model(x, use_cache=False).logits
        first = model(x[:, :cut], past_key_values=cache)
        second = model(x[:, cut:], past_key_values=cache)
    assert int(cache.get_seq_length()) == 9
    both = torch.cat((first.logits, second.logits), 1)
    assert torch.allclose(both, whole, rtol=1e-4, atol=1e-5)


def test_a_cache_of_packed_integers_serves():
    model = build()
    cache = QuantizedCache(bits=8)
    found = model.generate(ids(), past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 20 and found.shape == (2, 21)


def test_layers_without_attention_keep_nothing_in_the_cache():
    rule = {"connection": {"kind": "fixed", "a": 1.0, "b": 0.0}, "sublayer": "attention"}
    model = build("residual", num_hidden_layers=3, connection_overrides=[{**rule, "layers": [0]}])
    cache = DynamicCache()
    found = model.generate(ids(), past_key_values=cache, **GREEDY)
    assert torch.equal(found, own(model).generate(ids(), 12)) and len(cache) == 2
    without = build("residual", connection_overrides=[rule])
    expected = own(without).generate(ids(), 12)
    assert torch.equal(without.generate(ids(), use_cache=False, **GREEDY), expected)
    assert torch.equal(without.generate(ids(), **GREEDY), expected)
    out = without(ids(), use_cache=True)
    assert getattr(out, CACHE_NAME) is None
    with pytest.raises(UserError, match="no layer of this model has attention.*use_cache=False"):
        without(ids(), past_key_values=DynamicCache())


def test_sampling_follows_torchs_seed_and_embeddings_may_start():
    model = build()
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append(model.generate(ids(), max_new_tokens=8, do_sample=True, top_k=5))
    assert torch.equal(*texts)
    embedded = model.get_input_embeddings()(ids())
    found = model.generate(inputs_embeds=embedded, **GREEDY)
    assert torch.equal(found, model.generate(ids(), **GREEDY)[:, 9:])


# --- attention dispatch ---------------------------------------------------------------------------


def plain_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """What somebody registers: softmax(scaling q k^T) v, hidden keys as the boolean mask says."""
    CALLS.append(attention_mask)
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is None:
        rows, columns = scores.shape[-2:]
        attention_mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    scores = scores.masked_fill(~attention_mask, -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


CALLS: list = []
AttentionInterface.register("plain_for_tests", plain_attention)


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2},
                                     {"attention_temperature": {"kind": "learned_head"}},
                                     {"kind": "universal"}])  # fmt: skip
def test_every_implementation_computes_the_same(options):
    model, x = build(**options), ids()
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    seen = {}
    for name in ("sdpa", "eager", "plain_for_tests"):
        CALLS.clear()
        model.set_attn_implementation(name)
        with torch.no_grad():
            seen[name] = (
                model(x).logits, model(x, attention_mask=mask).logits[mask.bool()],
                model.generate(x, **GREEDY),
            )  # fmt: skip
        assert bool(CALLS) is (name == "plain_for_tests")
    for other in ("eager", "plain_for_tests"):
        for a, b in zip(seen["sdpa"], seen[other], strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-4), other


@pytest.mark.slow
def test_flex_attention_computes_the_same():
    model, x = build(), ids()
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(x, attention_mask=mask).logits[mask.bool()]
        model.set_attn_implementation("flex_attention")
        found = model(x, attention_mask=mask).logits[mask.bool()]
    assert torch.allclose(found, expected, atol=1e-4)


def test_padding_on_the_right_is_refused_where_a_text_is_continued_and_computed_elsewhere():
    model, x = build(), ids(1, 5)
    alone = model(x).logits
    batch = torch.cat((ids(1, 9, seed=3), torch.nn.functional.pad(x, (0, 4))))
    mask = torch.ones_like(batch)
    mask[1, 5:] = 0
    assert torch.allclose(model(batch, attention_mask=mask).logits[1, :5], alone, atol=1e-5)
    words = r"1 of 2 prompts end in padding.*tokenizer.padding_side = .left."
    refused(words, lambda: model.generate(batch, attention_mask=mask, **GREEDY))
    refused(words, lambda: model.generate(input_ids=batch, attention_mask=mask, num_beams=2))
    refused(words, lambda: model.generate(batch, pad_token_id=0, **GREEDY))  # told by the id


def test_a_length_beyond_the_context_is_refused_before_anything_is_computed():
    model, x = build(), ids()
    embeds = model.get_input_embeddings()(x)
    longest = SMALL["max_position_embeddings"] + 1  # the last token is not read again
    assert model.generate(x, max_new_tokens=longest - 9, do_sample=False).shape == (2, longest)
    assert model.generate(x, max_length=longest, do_sample=False).shape == (2, longest)
    model.model.forward = None  # nothing may call it
    for options in ({"max_new_tokens": 33}, {"max_length": 42}, {"max_new_tokens": 33} | BEAMS):
        refused(
            "a prompt of 9 tokens and 33 new ones exceed the 40.*set max_new_tokens to 32 at most",
            lambda options=options: model.generate(x, **options),
        )
    refused("a prompt of 9", lambda: model.generate(inputs_embeds=embeds, max_new_tokens=33))
    refused("of 9 .* 33 new", lambda: model.generate(inputs_embeds=embeds, max_length=42))
    model.generation_config.max_new_tokens = 33
    refused("a prompt of 9 tokens and 33 new ones", lambda: model.generate(x))


# --- sentences ------------------------------------------------------------------------------------


def refused(match, call):
    with pytest.raises(UserError, match=match):
        call()


def test_what_cannot_be_computed_is_refused_in_a_sentence():
    model, x = build(), ids()
    context = SMALL["max_position_embeddings"]
    refused("token id 50 .* outside the vocabulary of 50", lambda: model(torch.full((1, 2), 50)))
    long = ids(1, context + 1)
    refused(f"{context + 1} tokens exceed model.max_position_embeddings", lambda: model(long))
    refused(
        "has 41 tokens, padding included, and the model takes 40",
        lambda: model.generate(long, max_new_tokens=1),
    )
    refused("neither of input_ids and inputs_embeds", lambda: model())
    refused("both of input_ids", lambda: model(x, inputs_embeds=torch.zeros(2, 9, 32)))
    refused("inputs_embeds have shape", lambda: model(inputs_embeds=torch.zeros(2, 9)))
    four = torch.ones(2, 1, 9, 9)
    refused(r"attention_mask is of shape \[2, 1, 9, 9\]", lambda: model(x, attention_mask=four))
    refused("attention_mask has shape", lambda: model(x, attention_mask=torch.ones(2, 8)))
    added = torch.zeros(2, 9)
    added[0, :3] = -1e9
    refused("holds -1e[+]09 to 0; 1 on tokens", lambda: model(x, attention_mask=added))
    refused(
        "attention_mask holds 1 to 2",
        lambda: model(x, attention_mask=torch.tensor([[1] * 4 + [2] * 5] * 2)),
    )
    refused(r"input_ids are float32 of shape \[2, 9\]", lambda: model(x.float()))
    refused(r"input_ids are int64 of shape \[9\]", lambda: model(x[0]))
    refused(r"\[batch, tokens, 32\] was", lambda: model(inputs_embeds=torch.zeros(2, 9, 31)))
    refused(r"shape \[2, 9\] were expected, the input_ids", lambda: model(x, labels=x[:, 1:]))
    refused("labels hold 50; 0 to 49", lambda: model(x, labels=torch.where(x == x[0, 0], 50, x)))
    refused("labels hold -1; 0 to 49", lambda: model(x, labels=torch.full_like(x, -1)))
    refused("cache holds 2 rows and the batch has 1",
            lambda: model(x[:1], past_key_values=model(x).past_key_values))  # fmt: skip
    two = DynamicCache()
    refused("two names of one", lambda: model(x, past_key_values=two, cache=DynamicCache()))
    refused("position_ids hold 40", lambda: model(x, position_ids=torch.arange(32, 41)[None]))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    refused("packed documents", lambda: model(x, position_ids=packed))
    small = StaticCache(config=model.config, max_cache_len=8)
    refused("room for 8 tokens and 9", lambda: model(x, past_key_values=small))
    refused("makes no attention probabilities", lambda: model(x, output_attentions=True))
    encoder = build(causal=False)
    refused("bidirectional model cannot use a cache", lambda: encoder(x, use_cache=True))
    biased = build(init={"identity_bias": 5.0})
    biased.set_attn_implementation("plain_for_tests")
    refused("no place for the identity bias", lambda: biased(x))
    training = build().train()
    training.gradient_checkpointing_enable({"use_reentrant": False})
    refused("fill the cache twice", lambda: training(x, past_key_values=DynamicCache()))
    universal, filled = build("universal"), DynamicCache()
    model(x, past_key_values=filled)
    refused("the cache holds 9 tokens", lambda: universal(x, past_key_values=filled))
