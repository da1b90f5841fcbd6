"""Packed keys and values: the bits of the simulation, fewer bytes, every way to rearrange rows."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.errors import UserError
from skipless.model import KeyValueCache
from skipless.quant import fake_quantize, from_integer, quantize, restore, to_integer
from skipless.quant.kvcache import PackedTensor, code_tensor, pack_cache, unpack_cache

IDS = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(3))


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 16),
    width=st.integers(1, 9),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    granularity=st.sampled_from(["token", "tensor"]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_values_are_those_of_the_simulation(
    bits, width, parts, granularity, symmetric, seed
):
    generator = torch.Generator().manual_seed(seed)
    packed, expected, start = PackedTensor(bits, symmetric=symmetric), [], 0
    for length in parts:
        x = torch.randn(2, 3, length, width, generator=generator)
        expected.append(fake_quantize(x, bits, granularity=granularity, symmetric=symmetric))
        codes, scale, values = code_tensor(x, bits, granularity, symmetric, "absmax")
        assert torch.equal(values, expected[-1])
        packed.append(codes, scale, start)
        start += length
    assert torch.equal(packed.values(start, torch.float32), torch.cat(expected, 2))
    packed.select(torch.tensor([1, 1, 0]))
    assert torch.equal(packed.values(start, torch.float32), torch.cat(expected, 2)[[1, 1, 0]])


def test_bytes():
    x = torch.randn(1, 4, 16, 64)
    full = 4 * x.numel()
    for bits, share in ((8, 1 / 4), (4, 1 / 8), (12, 1 / 2)):
        codes, scale, _ = code_tensor(x, bits, "token", True, "absmax")
        packed = PackedTensor(bits)
        packed.append(codes, scale, 0)
        assert packed.num_bytes == full * share + 4 * 4 * 16  # a float32 scale a token and head


def step_by_step(model, cache) -> list[torch.Tensor]:
    with torch.no_grad():
        logits = [model(IDS, cache=cache, logits_to_keep=1).logits]
        for token in range(4):
            logits.append(model(torch.full((2, 1), token), cache=cache).logits)
    return logits


@pytest.mark.parametrize(
    "scheme", ["W8A8-KV8", "W4A8-KV4-a:token", "W8A8-KV8-w:channel-a:token", "W8A8-KV3-clip:gauss"]
)
@pytest.mark.parametrize("groups", [4, 2])
def test_our_cache_has_the_bits_of_the_simulation(make_transformer, scheme, groups):
    model = make_transformer("none", num_key_value_heads=groups)
    quantize(model, scheme)
    to_integer(model, "float")
    unpack_cache(model)
    plain = model.new_cache()
    expected = step_by_step(model, plain)
    assert pack_cache(model) and not pack_cache(model)
    cache = model.new_cache()
    found = step_by_step(model, cache)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert cache.num_bytes < plain.num_bytes / (2 if "KV8" in scheme else 3)
    expected = model.generate(IDS, 6)
    unpack_cache(model)
    assert torch.equal(model.generate(IDS, 6), expected)


def test_static_ranges_and_scope_all(make_transformer):
    model = make_transformer("residual")
    quantize(model, "W8A8-static", scope="all", calibration=[IDS])
    expected = step_by_step(model, model.new_cache())
    assert pack_cache(model)
    found = step_by_step(model, model.new_cache())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_crop_and_reorder(make_transformer):
    model = make_transformer("none")
    quantize(model, "W8A8-KV8-a:token")
    to_integer(model)
    with torch.no_grad():
        cache = model.new_cache()
        model(IDS, cache=cache)
        after = model(IDS[:, :1], cache=cache).logits
        cache.crop(5)
        assert torch.equal(model(IDS[:, :1], cache=cache).logits, after)
        cache.crop(5)
        cache.reorder(torch.tensor([1, 0, 1]))
        turned = model(IDS[[1, 0, 1], :1], cache=cache).logits
        assert torch.equal(turned, after[[1, 0, 1]])
        with pytest.raises(UserError, match="holds a batch of 3 and the input has 2"):
            model(IDS, cache=cache)


@torch.no_grad()
def test_a_copied_cache_goes_on_by_itself(make_transformer):
    """As one does to try several ends of a text; alone, or together with the model."""
    model = make_transformer("none")
    quantize(model, "W8A8-KV4")
    to_integer(model)
    cache = model.new_cache()
    model(IDS, cache=cache)
    twin, (other, with_model) = copy.deepcopy(cache), copy.deepcopy((model, cache))
    expected = model(IDS[:, :1], cache=cache).logits
    assert twin.length == IDS.shape[1] == cache.length - 1
    assert torch.equal(model(IDS[:, :1], cache=twin).logits, expected)
    assert torch.equal(other(IDS[:, :1], cache=with_model).logits, expected)
    ends = [each(IDS[:, 1:2], cache=kept).logits
            for each, kept in ((model, cache), (model, twin), (other, with_model))]  # fmt: skip
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_it_is_undone_and_copied(make_transformer):
    model = make_transformer("none")
    with torch.no_grad():
        reference = model(IDS).logits
        quantize(model, "W8A8-KV8")
        simulated = model(IDS).logits
        to_integer(model)
        assert model.new_store is not None
        executed = model(IDS).logits
        twin = copy.deepcopy(model)
        assert torch.equal(twin(IDS).logits, executed)
        assert torch.equal(twin.generate(IDS, 4), model.generate(IDS, 4))
        assert twin.new_store is not None and twin.new_store is not model.new_store
        from_integer(model)
        assert model.new_store is None and torch.equal(model(IDS).logits, simulated)
        to_integer(model)
        restore(model)
        assert model.new_store is None and torch.equal(model(IDS).logits, reference)
        restore(twin)
        assert torch.equal(twin(IDS).logits, reference)
    assert not any(m._forward_hooks for m in model.modules())


def test_models_without_such_sites_keep_their_caches(make_transformer, plain):
    model = make_transformer("none")
    with pytest.raises(UserError, match="not quantised"):
        pack_cache(model)
    quantize(model, "W8A8")
    assert not pack_cache(model) and isinstance(model.new_cache(), KeyValueCache)
    quantize(plain, "W8A8")
    assert not pack_cache(plain)


def test_a_tensor_from_elsewhere_is_refused(make_transformer):
    model = make_transformer("none")
    quantize(model, "W8A8-KV8")
    pack_cache(model)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.key did not make the tensor"):
        model.new_cache().update(0, torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8))
