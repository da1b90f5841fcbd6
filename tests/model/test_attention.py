"""Attention: fused equals eager, cache equals no cache, nothing leaks from the future."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.model import Attention, KeyValueCache, Transformer
from skipless.model.blocked import blocked_attention
from skipless.model.diagonal import diagonal_attention
from skipless.model.rope import RotaryTables, rotate
from skipless.probes import eager_attention

CASES = {
    "plain": {},
    "grouped": dict(num_key_value_heads=2),
    "identity bias": dict(init=InitConfig(query_key="unit", identity_bias=3.0)),
    "identity bias, grouped": dict(
        num_key_value_heads=2, init=InitConfig(query_key="unit", identity_bias=3.0)
    ),
    "temperature": dict(temperature=TemperatureConfig(beta=1.2)),
    "learned temperature": dict(temperature=TemperatureConfig(beta=1.2, kind="learned_head")),
    "length-scaled": dict(
        temperature=TemperatureConfig(kind="learned_layer", length_scaled=True),
        init=InitConfig(identity_bias=1.0),
    ),
    "learned positions": dict(position="learned", norm="layernorm"),
    "no positions": dict(position="none", norm_placement="post"),
    "bidirectional": dict(causal=False, init=InitConfig(query_key="unit", identity_bias=3.0)),
}


def build(case: str, **changes) -> Transformer:
    base = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=40,
                max_position_embeddings=24, connection=ConnectionConfig(kind="none"),
                init=InitConfig(query_key="unit"))  # fmt: skip
    return Transformer(ModelConfig(**(base | CASES[case] | changes)), seed=3).double()


IDS = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(3, 12, dtype=torch.long)
PADDED[0, :4] = 0  # left padding
PADDED[1, 9:] = 0  # right padding


def gradients(model: Transformer, mask=None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS.roll(-1, 1), attention_mask=mask).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_fused_equals_eager(case, mask):
    model = build(case)
    fused, fused_gradients = model(IDS, attention_mask=mask).logits, gradients(model, mask)
    with eager_attention(model):
        eager, eager_gradients = model(IDS, attention_mask=mask).logits, gradients(model, mask)
    torch.testing.assert_close(fused, eager, rtol=1e-10, atol=1e-12)
    for name, gradient in fused_gradients.items():
        torch.testing.assert_close(gradient, eager_gradients[name], rtol=1e-8, atol=1e-12)
    assert all(m.implementation == "sdpa" for m in model.modules() if isinstance(m, Attention))


def masked_softmax_attention(q, k, v, bias, causal):
    length = q.shape[2]
    scores = 0.4 * q @ k.mT
    if bias is not None:
        scores = scores + torch.eye(length, dtype=q.dtype) * bias[:, None, None]
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def assert_equal_with_gradients(fused, expected, inputs):
    torch.testing.assert_close(fused, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(fused.shape, dtype=fused.dtype)
    for got, wanted in zip(
        torch.autograd.grad(fused, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def random_heads(length, size, seed=0):
    """q, k, v [2, 2, T, K] float64; as in the model, heads lie behind the tokens in memory."""
    generator = torch.Generator().manual_seed(seed)
    stacked = torch.randn(3, 2, length, 2, size, dtype=torch.float64, generator=generator)
    return [t.transpose(1, 2).requires_grad_() for t in stacked]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.sampled_from([2, 4, 6]), st.booleans(),
       st.lists(st.floats(-6, 8), min_size=2, max_size=2))  # fmt: skip
def test_diagonal_attention_equals_a_masked_softmax(length, size, causal, bias):
    inputs = [*random_heads(length, size), torch.tensor(bias, dtype=torch.float64)]
    inputs[3].requires_grad_()
    fused = diagonal_attention(*inputs, causal=causal, scale=0.4)
    assert_equal_with_gradients(fused, masked_softmax_attention(*inputs, causal), inputs)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_blocked_attention_equals_a_masked_softmax(length, biased):
    q, k, v = random_heads(length, 4)
    bias = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True) if biased else None
    inputs = [q, k, v, bias] if biased else [q, k, v]
    fused = blocked_attention(q, k, v, bias, scale=0.4)
    assert_equal_with_gradients(fused, masked_softmax_attention(q, k, v, bias, True), inputs)


@pytest.mark.parametrize("length, size", [(40, 2), (24, 8)])
def test_the_model_gives_the_same_with_any_kernel(length, size, monkeypatch):
    """Texts longer than 16 head sizes leave the blocked path; so does a monkey-patched one."""
    from skipless.model import blocked

    heads = 32 // size
    model = build("identity bias", num_attention_heads=heads, max_position_embeddings=40)
    ids = torch.arange(length)[None] % 40
    one = model(ids).logits
    monkeypatch.setattr(blocked, "suits", lambda q: False)
    torch.testing.assert_close(model(ids).logits, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_diagonal_attention_passes_gradcheck(causal):
    generator = torch.Generator().manual_seed(1)
    # as in the model: heads lie behind the tokens in memory
    q, k, v = (
        torch.randn(2, 5, 2, 4, dtype=torch.float64, generator=generator).transpose(1, 2)
        for _ in range(3)
    )
    bias = torch.tensor([2.0, -1.0], dtype=torch.float64)
    inputs = tuple(t.requires_grad_() for t in (q, k, v, bias))
    assert torch.autograd.gradcheck(
        lambda *z: diagonal_attention(*z, causal=causal, scale=0.5), inputs
    )


def test_a_huge_identity_bias_lets_every_token_see_itself_only():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    out = diagonal_attention(q, k, v, torch.tensor([60.0, 80.0]), causal=True, scale=0.5)
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("case", [c for c in CASES if c != "bidirectional"])
def test_cache_equals_no_cache(case):
    model = build(case).eval()
    whole = model(IDS).logits
    for pieces in ([12], [1] * 12, [5, 1, 4, 2]):
        cache, logits = KeyValueCache(), []
        for part in IDS.split(pieces, dim=1):
            logits.append(model(part, cache=cache).logits)
        assert cache.length == 12
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-9, atol=1e-11)


def test_cache_with_left_padding():
    model = build("identity bias").eval()
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :4] = 0
    cache = KeyValueCache()
    model(IDS[:, :8], attention_mask=mask[:, :8], cache=cache)
    cached = model(IDS[:, 8:], attention_mask=mask, cache=cache).logits
    alone = model(IDS[:1, 4:]).logits  # the same text without padding
    torch.testing.assert_close(cached[0], alone[0, 4:], rtol=1e-9, atol=1e-11)


def test_cache_crop_and_reorder():
    model = build("grouped").eval()
    cache = KeyValueCache()
    model(IDS, cache=cache)
    cache.crop(7)
    cache.reorder(torch.tensor([2, 0, 0]))
    cached = model(IDS[[2, 0, 0], 7:9], cache=cache).logits
    torch.testing.assert_close(cached, model(IDS[[2, 0, 0], :9]).logits[:, 7:])
    with pytest.raises(UserError, match="crop"):
        cache.crop(99)
    with pytest.raises(UserError, match="batch of 3"):
        model(IDS[:1, 9:10], cache=cache)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", [c for c in CASES if c != "bidirectional"])
def test_later_tokens_change_nothing_before_them(case, implementation):
    model = build(case, attention_implementation=implementation).float()
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 11) % 40
    before, after = model(IDS).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_bidirectional_model_sees_later_tokens():
    model = build("bidirectional")
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 40
    assert not torch.allclose(model(IDS).logits[:, 0], model(changed).logits[:, 0])
    with pytest.raises(UserError, match="bidirectional"):
        model(IDS, cache=KeyValueCache())


@pytest.mark.parametrize("case", ["plain", "identity bias", "bidirectional", "length-scaled"])
def test_padding_changes_nothing_for_real_tokens(case):
    model = build(case)
    other = torch.where(PADDED.bool(), IDS, (IDS + 7) % 40)
    one = model(IDS, attention_mask=PADDED).logits
    two = model(other, attention_mask=PADDED).logits
    assert bool(one.isfinite().all())
    torch.testing.assert_close(one[PADDED.bool()], two[PADDED.bool()], rtol=0, atol=0)
    alone = model(IDS[:1, 4:]).logits
    torch.testing.assert_close(one[0, 4:], alone[0], rtol=1e-9, atol=1e-11)


def test_hooks_see_queries_keys_values_and_probabilities():
    model = build("identity bias, grouped")
    seen: dict[str, tuple] = {}
    layer = model.layers[1].self_attn
    for name in ("query", "key", "value", "probabilities"):
        getattr(layer, name).register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: tuple(out.shape)})
        )
    model(IDS)
    assert seen == {"query": (3, 4, 12, 8), "key": (3, 2, 12, 8), "value": (3, 2, 12, 8)}
    with eager_attention(model):
        model(IDS)
    assert seen["probabilities"] == (3, 4, 12, 12)


def test_attention_dropout_acts_in_training_only():
    model = build("identity bias", attention_dropout=0.5)
    assert torch.equal(model.eval()(IDS).logits, build("identity bias").eval()(IDS).logits)
    for implementation in ("sdpa", "eager"):
        for layer in model.train().layers:
            layer.self_attn.implementation = implementation
        assert not torch.equal(model(IDS).logits, model(IDS).logits)


class TestRotary:
    def test_it_equals_complex_multiplication(self):
        cos, sin = RotaryTables(8, 10_000.0, num_heads=3).at(torch.arange(5), 5, torch.float64)
        x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
        angle = torch.arange(5)[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8).double()
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angle)[:, None]
        torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), -1))

    def test_gradcheck(self):
        cos, sin = RotaryTables(4, 100.0, num_heads=3).at(torch.arange(3), 3, torch.float64)
        x = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t: rotate(t, cos, sin), (x,))
        assert torch.autograd.gradgradcheck(lambda t: rotate(t, cos, sin), (x,))

    def test_products_depend_on_distance_only(self):
        cos, sin = RotaryTables(8, 10_000.0).at(torch.arange(20), 20, torch.float64)
        q, k = torch.randn(2, 8, dtype=torch.float64)
        turned_q = rotate(q.expand(1, 20, 1, 8), cos, sin)[0, :, 0]
        turned_k = rotate(k.expand(1, 20, 1, 8), cos, sin)[0, :, 0]
        products = turned_q @ turned_k.T
        torch.testing.assert_close(products[7, 3], products[15, 11])
