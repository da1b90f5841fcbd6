"""QuantizedCache in transformers' generation: the values of the simulation, every rearrangement."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from skipless.errors import UserError
from skipless.hf import QuantizedCache
from skipless.quant import fake_quantize

IDS = torch.randint(2, 90, (2, 7), generator=torch.Generator().manual_seed(0))


class Simulated(DynamicCache):
    """The oracle: floats, rounded when they come."""

    def __init__(self, bits, granularity):
        super().__init__()
        self.kinds = {"bits": bits, "granularity": granularity}

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = [fake_quantize(x, **self.kinds) for x in (key_states, value_states)]
        return super().update(*rounded, *args, **kwargs)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=90, n_positions=64)
        return GPT2LMHeadModel(config).eval()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=90, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generate(model, cache, **options):
    torch.manual_seed(1)
    return model.generate(
        IDS, past_key_values=cache, max_new_tokens=12, min_new_tokens=12, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampled"],
)  # fmt: skip
def test_generation_equals_the_simulation(model, bits, granularity, options):
    cache = QuantizedCache(bits=bits, granularity=granularity)
    found = generate(model, cache, **options)
    expected = generate(model, Simulated(bits, granularity), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(a, b)
    assert cache.get_seq_length() == 18 and len(cache) == 2


def test_rearranging_rows_and_cropping():
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, 2, 5, 6)
    caches = QuantizedCache(bits=4), Simulated(4, "token")
    for cache in caches:
        for layer in (0, 1):
            cache.update(key, value, layer)
    for change in (
        lambda c: c.reorder_cache(torch.tensor([1, 0])),
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.batch_select_indices(torch.tensor([0, 4, 5])),
        lambda c: c.batch_select_indices(torch.tensor([True, False, True])),
        lambda c: c.crop(-2),
    ):
        for cache in caches:
            change(cache)
        for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for cache in caches:
        grown = cache.update(key[:, :, :1], value[:, :, :1], 0)
    assert torch.equal(grown[0], caches[0].layers[0].keys)
    caches[0].reset()
    assert caches[0].get_seq_length() == 0 and caches[0].layers[0].keys is None


def test_bytes_and_config(model):
    cache = QuantizedCache(model.config, bits=4)
    assert len(cache) == 2 and cache.num_bytes == 0
    out = generate(model, cache)
    plain = generate(model, DynamicCache()).past_key_values
    full = sum(layer.keys.numel() * 8 for layer in plain.layers)
    assert cache.num_bytes < full and out.past_key_values is cache


def test_misuse_is_told():
    with pytest.raises(UserError, match="from 2 to 16"):
        QuantizedCache(bits=1)
    with pytest.raises(UserError, match="granularity"):
        QuantizedCache(granularity="channel")
    with pytest.raises(UserError, match=r"config is 8; .*as in QuantizedCache\(bits=8\)"):
        QuantizedCache(8)
    cache = QuantizedCache()
    cache.update(*torch.randn(2, 1, 1, 3, 4), 0)
    with pytest.raises(UserError, match="negative number"):
        cache.layers[0].crop(2)
    with pytest.raises(UserError, match="cannot be assigned"):
        cache.layers[0].keys = torch.ones(1)


def test_encoders_sliding_windows_and_assistants():
    """Where a cache is read and cut in other ways; at 16 bits the tokens are those of floats."""
    from transformers import (
        EncoderDecoderCache,
        MistralConfig,
        MistralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 90}
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=90,
                 decoder_start_token_id=0)
    ).eval()  # fmt: skip
    sliding = MistralForCausalLM(
        MistralConfig(num_hidden_layers=2, num_key_value_heads=2, sliding_window=4, **shape)
    ).eval()
    large, small = (
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **shape)).eval() for layers in (2, 1)
    )
    pair = EncoderDecoderCache(QuantizedCache(bits=16), QuantizedCache(bits=16))
    for model, cache, ids, options in (
        (t5, pair, IDS, {"num_beams": 3}),
        (sliding, QuantizedCache(bits=16), IDS, {}),
        (large, QuantizedCache(bits=16), IDS[:1], {"assistant_model": small}),
    ):
        expected = model.generate(ids, max_new_tokens=12, num_beams=options.get("num_beams", 1))
        found = model.generate(ids, past_key_values=cache, max_new_tokens=12, **options)
        assert torch.equal(found, expected), type(model).__name__


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_operations(seed):
    """Against floats that are rounded when they come: no token, one token of one head (whose scale
    looks like one of its own), odd widths, every width of codes, copies on the way."""
    import copy
    import pickle
    import random

    choose = random.Random(seed)
    torch.manual_seed(seed)
    bits, granularity = choose.choice([2, 4, 5, 8, 16]), choose.choice(["token", "tensor"])
    batch, heads, width = choose.choice([1, 2]), choose.choice([1, 2]), choose.choice([1, 3, 8])
    cache = QuantizedCache(bits=bits, granularity=granularity)
    kept = [torch.zeros(batch, heads, 0, width)] * 2
    for step in range(10):
        what = "update" if step == 0 else choose.choice(
            ["update", "update", "none", "crop", "reorder", "repeat", "select", "copy"]
        )  # fmt: skip
        length = kept[0].shape[2]
        if what in ("update", "none"):
            number = 0 if what == "none" else choose.choice([1, 1, 2, 20])
            new = torch.randn(2, len(kept[0]), heads, number, width) * 10.0 ** choose.randrange(4)
            cache.update(*new, 0)
            if number:
                rounded = [fake_quantize(x, bits, granularity=granularity) for x in new]
                kept = [torch.cat(pair, 2) for pair in zip(kept, rounded, strict=True)]
        elif what == "crop" and length > 1:
            cache.crop(-1)
            kept = [x[:, :, :-1] for x in kept]
        elif what == "repeat" and len(kept[0]) < 4:
            cache.batch_repeat_interleave(2)
            kept = [x.repeat_interleave(2, 0) for x in kept]
        elif what in ("reorder", "select"):
            rows = torch.randint(len(kept[0]), (len(kept[0]) if what == "reorder" else 1,))
            (cache.reorder_cache if what == "reorder" else cache.batch_select_indices)(rows)
            kept = [x[rows] for x in kept]
        elif what == "copy":
            cache = choose.choice([copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])(cache)
        layer = cache.layers[0]
        assert cache.get_seq_length() == kept[0].shape[2]
        assert torch.equal(layer.keys, kept[0]) and torch.equal(layer.values, kept[1])
