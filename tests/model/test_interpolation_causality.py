"""Universal interpolation (C8) looks at no later token and at no padding, and the key/value cache
carries its state."""

import pytest
import torch

from skipless.model import KeyValueCache

from .interpolation_models import CAUSAL, VOCABULARY, T, build, ids


class TestCausality:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_later_tokens_change_nothing_before_them(self, aligner, feature):
        model = build(aligner, gate_feature=feature)
        first, mask = ids(), torch.ones(2, T)
        mask[1, :3] = 0
        for t in (0, 3, 7, 12):
            second = first.clone()
            second[:, t + 1 :] = (second[:, t + 1 :] + 7) % VOCABULARY
            for attention_mask in (None, mask):
                one, two = (model(i, attention_mask=attention_mask).logits for i in (first, second))
                assert torch.equal(one[:, : t + 1], two[:, : t + 1])
                assert not torch.equal(one[:, t + 1], two[:, t + 1])

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_nor_does_a_cropped_cache_remember_them(self, aligner):
        model, t = build(aligner, gate_feature="entropy"), 9
        first, second = ids(), ids()
        second[:, t:] = (second[:, t:] + 7) % VOCABULARY
        logits = []
        for text in (first, second):
            cache = KeyValueCache()
            model(text[:, :15], cache=cache)
            cache.crop(t)
            logits.append([model(first[:, i : i + 1], cache=cache).logits for i in range(t, T)])
        for one, two in zip(*logits, strict=True):
            assert torch.equal(one, two)


class TestCache:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_decoding_in_pieces_equals_the_whole(self, aligner, feature):
        model = build(aligner, gate_feature=feature).double()
        whole = model(ids()).logits
        for pieces in ((1,) * T, (5, 1, 3, 1, 1, 8, 3)):
            cache, found = KeyValueCache(), []
            for piece in ids().split(pieces, dim=1):
                found.append(model(piece, cache=cache).logits)
            torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_crop_reorder_and_repeat_carry_the_state(self, aligner):
        model = build(aligner, gate_feature="entropy").double()
        text, rows = ids(), torch.tensor([1, 1, 0])
        cache = KeyValueCache()
        model(text[:, :15], cache=cache)
        cache.crop(6)
        cache.reorder(rows)
        found = [model(text[rows, i : i + 1], cache=cache).logits for i in range(6, T)]
        whole = model(text[rows]).logits[:, 6:]
        torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("aligner", CAUSAL)
    def test_greedy_text_is_the_same_with_and_without(self, aligner):
        model = build(aligner).double()
        prompt = ids(length=4)
        assert torch.equal(model.generate(prompt, 12), model.generate(prompt, 12, use_cache=False))


class TestPadding:
    @pytest.mark.parametrize("aligner", CAUSAL)
    @pytest.mark.parametrize("feature", ["spread", "entropy"])
    def test_a_left_padded_batch_equals_single_texts(self, aligner, feature):
        model = build(aligner, gate_feature=feature).double()
        short, text = ids(1, T - 5, seed=4), ids()
        text[0, :5] = 11
        text[0, 5:] = short
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :5] = 0
        found = model(text, attention_mask=mask).logits
        single = model(short).logits
        torch.testing.assert_close(found[:1, 5:], single, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1:], model(text[1:]).logits, rtol=1e-9, atol=1e-9)

        cache = KeyValueCache()
        model(text[:, :8], attention_mask=mask[:, :8], cache=cache)
        for i in range(8, T):
            step = model(text[:, i : i + 1], attention_mask=mask[:, : i + 1], cache=cache).logits
            torch.testing.assert_close(step[:, 0], found[:, i], rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("aligner", [*CAUSAL, "sinkhorn"])
    def test_an_encoder_ignores_padding_too(self, aligner):
        model = build(aligner, model=dict(causal=False)).double()
        text, mask = ids(), torch.ones(2, T, dtype=torch.long)
        mask[0, -6:] = 0
        found = model(text, attention_mask=mask).logits[:1, :-6]
        torch.testing.assert_close(found, model(text[:1, :-6]).logits, rtol=1e-8, atol=1e-8)
