"""Generation: greedy, sampled, with and without cache, beyond the context."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.config import ConnectionConfig, InitConfig, ModelConfig
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.model.generation import sample, window_start


def build(**changes) -> Transformer:
    base = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=40,
                max_position_embeddings=16, connection=ConnectionConfig(kind="none"),
                init=InitConfig(query_key="unit", identity_bias=2.0, std=0.2))  # fmt: skip
    return Transformer(ModelConfig(**(base | changes)))


IDS = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
@pytest.mark.parametrize("num_tokens", [1, 8, 40])
def test_greedy_tokens_are_the_same_with_and_without_cache(position, num_tokens):
    """40 tokens slide the window of 16 several times."""
    model = build(position=position).double()
    cached = model.generate(IDS, num_tokens)
    assert torch.equal(cached, model.generate(IDS, num_tokens, use_cache=False))
    assert cached.shape == (2, 6 + num_tokens) and torch.equal(cached[:, :6], IDS)


def test_greedy_takes_the_likeliest_token_each_time():
    model = build()
    text = IDS
    for _ in range(5):
        text = torch.cat((text, model(text).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(IDS, 5), text)


def test_sampling_is_reproducible_and_depends_on_the_seed():
    model = build()
    torch.manual_seed(1)
    one = model.generate(IDS, 12, temperature=1.0, top_k=20, seed=5)
    torch.manual_seed(2)  # the global generator plays no part
    assert torch.equal(one, model.generate(IDS, 12, temperature=1.0, top_k=20, seed=5))
    assert torch.equal(one, model.generate(IDS, 12, temperature=1.0, top_k=20, seed=5,
                                           use_cache=False))  # fmt: skip
    assert not torch.equal(one, model.generate(IDS, 12, temperature=1.0, top_k=20, seed=6))


def test_top_k_1_is_greedy():
    model = build()
    assert torch.equal(model.generate(IDS, 8, temperature=2.0, top_k=1), model.generate(IDS, 8))


def test_samples_follow_the_distribution():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    share = torch.bincount(sample(logits, 0.5, 3, generator), minlength=4) / 20_000
    expected = torch.tensor([0.5, 0.25, 0.15, 0.0]) ** 2
    torch.testing.assert_close(share, expected / expected.sum(), rtol=0, atol=0.015)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 40))
def test_the_window_is_full_of_recent_tokens(length, limit):
    start = window_start(length, limit)
    assert length - start <= limit
    assert length - start >= min(length, limit - limit // 2)
    assert start <= window_start(length + 1, limit)


def test_a_prompt_longer_than_the_context_is_cut_from_the_left():
    model = build().double()
    prompt = torch.randint(0, 40, (1, 30), generator=torch.Generator().manual_seed(1))
    start = window_start(30, 16)
    expected = model(prompt[:, start:]).logits[:, -1].argmax(-1)
    assert model.generate(prompt, 1)[0, -1] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": "hot"},
        {"top_k": 2.5}, {"top_k": 0}, {"max_new_tokens": 1.5}, {"max_new_tokens": -1},
        {"seed": -1}, {"seed": 2**64}, {"seed": 0.5},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_one_sentence(options):
    name = next(iter(options))
    with pytest.raises(UserError, match=name) as error:
        build().generate(IDS, **({"max_new_tokens": 1} | options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([1, 2]), r"shape \(2,\); .* ids\[None\]"),
        (torch.zeros(2, 0, dtype=torch.int64), "at least one token"),
        (torch.zeros(0, 2, dtype=torch.int64), "at least one token"),
        (torch.tensor(3), r"shape \(\)"),
        (torch.ones(1, 2), "float32; int64"),
        (torch.tensor([[1, 40]]), "40; ids from 0 to 39"),
        (torch.tensor([[-1, 4]]), "-1; ids from 0 to 39"),
        ([[1, 2]], "input_ids is list"),
    ],
)
def test_ids_of_another_form_are_refused(ids, words):
    with pytest.raises(UserError, match=words):
        build().generate(ids, 1)


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-320])
def test_next_to_no_temperature_is_greedy(temperature):
    model = build()
    cold = model.generate(IDS, 4, temperature=temperature)
    assert torch.equal(cold, model.generate(IDS, 4))


def test_broken_weights_are_told():
    model = build()
    with torch.no_grad():
        model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        model.generate(IDS, 1, temperature=1.0)


def test_the_mode_is_restored():
    model = build(dropout=0.5)
    model.train()
    assert torch.equal(model.generate(IDS, 4), model.generate(IDS, 4)) and model.training


@pytest.mark.parametrize("settings_, call, message", [
    (dict(causal=False), {}, "causal=False"),
    (dict(num_labels=2), {}, "classification head"),
    ({}, dict(temperature=-1.0), "temperature is -1.0"),
    ({}, dict(top_k=0), "top_k is 0"),
])  # fmt: skip
def test_what_cannot_be_generated_is_refused(settings_, call, message):
    with pytest.raises(UserError, match=message):
        build(**settings_).generate(IDS, 2, **call)
