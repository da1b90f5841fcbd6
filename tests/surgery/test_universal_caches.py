"""Universal interpolation in Hugging Face models: padding, caches and generation give what
recomputation without them gives.

GPT-2 where float64 counts: Llama's norms compute in float32 whatever the weights are.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.surgery import find_stacks, patch, unpatch
from skipless.surgery.universal.causality import is_causal

from .universal_models import (
    ALIGNERS,
    PADDED,
    build,
    cached,
    config,
    difference,
    gradients,
    ids,
    lively,
)

GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("aligner", ALIGNERS)
def test_cached_equals_full_and_left_padding_equals_alone(tiny, aligner):
    model, tokens = build(tiny, "gpt2", config(aligner)), ids()
    with torch.no_grad():
        full = model(tokens, use_cache=False).logits
        for pieces in ((9,), (1,) * 9, (2, 1, 4, 2)):
            assert difference(cached(model, tokens, pieces)[0], full) < 1e-10, pieces
        mask = PADDED
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = model(tokens[1:, 3:]).logits
        assert difference(padded[1:, 3:], alone) < 1e-10
        assert difference(padded[:1], full[:1]) < 1e-10
        other = tokens.clone()
        other[1, :3] = 5
        again = model(other, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert torch.equal(again[1, 3:], padded[1, 3:])
        assert difference(padded[1:, 3:], full[1:, 3:]) > 1e-3  # the mask matters
        for pieces in ((9,), (4,) + (1,) * 5, (2, 4, 3)):
            found = cached(model, tokens, pieces, mask)[0]
            assert difference(found[0], padded[0]) < 1e-10
            assert difference(found[1, 3:], padded[1, 3:]) < 1e-10, pieces


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "whisper"])
def test_cached_equals_full_in_other_decoders(tiny, family):
    extra = {"sliding_window": 4} if family == "mistral" else {}
    model, tokens = build(tiny, family, **extra), ids()
    arguments = {}
    if family == "whisper":
        sound = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).double()
        arguments["encoder_outputs"] = model.model.encoder(sound)
    name = "decoder_input_ids" if family == "whisper" else "input_ids"
    with torch.no_grad():
        full = model(**{name: tokens}, **arguments, use_cache=False).logits
        found, cache = [], None
        for t in range(9):
            out = model(**{name: tokens[:, t : t + 1]}, **arguments, cache=cache, use_cache=True)
            cache = out.cache
            found.append(out.logits)
    assert difference(torch.cat(found, 1), full) < 1e-10


def test_bert_as_a_decoder_is_causal(tiny):
    import transformers

    model = transformers.BertLMHeadModel(tiny.build("bert", is_decoder=True).config).eval()
    model, tokens = lively(patch(model, config())).double(), ids()
    assert is_causal(model, find_stacks(model)[0])
    with torch.no_grad():
        full = model(tokens, use_cache=False).logits
        assert difference(cached(model, tokens, (4, 1, 4))[0], full) < 1e-10


def test_right_padding_equals_alone_in_encoders_and_decoders(tiny):
    mask = PADDED.flip(1)
    for family in ("llama", "bert", "clip"):
        model = build(tiny, family)
        body = model.text_model if family == "clip" else model
        with torch.no_grad():
            padded = body(ids(), attention_mask=mask)[0]
            assert difference(padded[1:, :6], body(ids()[1:, :6])[0]) < 1e-10
            assert difference(padded[:1], body(ids()[:1])[0]) < 1e-10


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_pieces_padding_and_rows_equal_the_full_pass(tiny, data):
    aligner = data.draw(st.sampled_from(ALIGNERS))
    model = build(tiny, "gpt2", config(aligner))
    pads = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    mask = torch.stack([(torch.arange(10) >= n).long() for n in pads])
    tokens, split = ids(10, batch=3), data.draw(st.integers(1, 8))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
    drop = data.draw(st.integers(0, split - 1))
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        _, cache = cached(model, tokens, (split,), mask)
        cache.reorder_cache(rows)
        cache.crop(-drop)
        rest, mask, positions = tokens[rows], mask[rows], positions[rows]
        rest = torch.cat((rest[:, : split - drop], ids(10 - split + drop, len(rows), seed=4)), 1)
        found, _ = cached(model, rest[:, split - drop :], (1, 9 - split + drop), mask, cache)
        full = model(rest, attention_mask=mask, position_ids=positions, use_cache=False).logits
    real = mask[:, split - drop :].bool()
    assert difference(found[real], full[:, split - drop :][real]) < 1e-10


def test_operations_on_caches(tiny):
    model, tokens = build(tiny, "gpt2"), ids()
    rest = ids(4, seed=5)

    def go_on(cache, rows):
        return cached(model, rest[rows], (1, 3), cache=cache)[0]

    def fresh(rows, length=5):
        return model(torch.cat((tokens[rows, :length], rest[rows]), 1)).logits[:, length:]

    with torch.no_grad():
        _, cache = cached(model, tokens[:, :5], (3, 2))
        kept = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        assert type(cache).__name__ == "DynamicCache"
        assert difference(go_on(cache, [0, 1]), fresh([0, 1])) < 1e-10
        cache.crop(-2)  # as assisted decoding does after a wrong guess
        assert cache.get_seq_length() == 7
        again = cached(model, rest[:, 2:], (2,), cache=cache)[0]
        assert difference(again, fresh([0, 1])[:, 2:]) < 1e-10
        for change, rows in (
            (lambda c: c.reorder_cache(torch.tensor([1, 1])), [1, 1]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_select_indices(torch.tensor([True, False])), [0]),
        ):
            one = copy.deepcopy(kept)
            change(one)
            assert difference(go_on(one, rows), fresh(rows)) < 1e-10
        cache.reset()
        assert (
            difference(cached(model, tokens, (4, 5), cache=cache)[0], model(tokens).logits) < 1e-10
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "mixtral"])
def test_generation_is_the_same_with_every_cache(tiny, family):
    extra = {"sliding_window": 5} if family == "mistral" else {}
    model = build(tiny, family, dtype=torch.float32, **extra)
    mask = PADDED[:, :6]
    batch = {"input_ids": ids(6), "attention_mask": mask, "pad_token_id": 0, **GREEDY}
    plain = unpatch(copy.deepcopy(model)).generate(**batch)
    without = model.generate(**batch, use_cache=False)
    assert not torch.equal(without, plain)
    assert torch.equal(model.generate(**batch), without)
    assert torch.equal(model.generate(**batch, cache_implementation="static"), without)
    alone = model.generate(batch["input_ids"][1:, 3:], **GREEDY)
    assert torch.equal(alone[0], without[1, 3:])
    beams = {**batch, "num_beams": 3, "num_return_sequences": 2}
    without = model.generate(**beams, use_cache=False)
    assert torch.equal(model.generate(**beams), without)
    assert torch.equal(model.generate(**beams, cache_implementation="static"), without)


def test_assisted_generation_crops_and_agrees(tiny):
    model, assistant = build(tiny, dtype=torch.float32), build(tiny, dtype=torch.float32)
    lively(assistant, seed=8)  # guesses wrongly now and then
    batch = {"input_ids": ids(6, batch=1), **GREEDY, "max_new_tokens": 12}
    alone = model.generate(**batch)
    assert not torch.equal(alone, assistant.generate(**batch))
    assert torch.equal(model.generate(**batch, assistant_model=assistant), alone)


def test_whisper_generates_the_same_with_and_without_cache(tiny):
    model, batch = build(tiny, "whisper", dtype=torch.float32), tiny.inputs("whisper")
    arguments = {"input_features": batch["input_features"], "max_new_tokens": 6,
                 "decoder_input_ids": batch["decoder_input_ids"][:, :1]}  # fmt: skip
    for beams in (1, 3):
        found = model.generate(**arguments, num_beams=beams)
        assert torch.equal(found, model.generate(**arguments, num_beams=beams, use_cache=False))


def test_training_with_a_cache_has_the_gradients_of_training_without(tiny):
    tokens = ids()
    for aligner in ALIGNERS:
        model = build(tiny, "gpt2", config(aligner)).train()
        with_cache, without = (
            gradients(model, lambda m=model, c=c: m(tokens, use_cache=c).logits.square().mean())
            for c in (True, False)
        )
        assert with_cache.keys() == without.keys()
        for name, gradient in without.items():
            # diagonal: the variance of one token is rounding, over an epsilon of 1e-8
            limit = (1e-7 if aligner == "diagonal" else 1e-11) * gradient.abs().max()
            assert difference(with_cache[name], gradient) <= limit, (aligner, name)
