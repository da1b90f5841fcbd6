"""Attention statistics: masks, merging, broken rows; equations are in test_equations_probes."""

import math

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.probes import AttentionStatistics, attention_statistics, eager_attention
from skipless.probes.attention import find_probabilities


def probabilities(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).softmax(-1)


def test_known_patterns():
    uniform = attention_statistics(torch.full((1, 2, 4, 4), 0.25))
    assert uniform["entropy"] == pytest.approx(math.log(4))
    assert uniform["saturated"] == 0 and uniform["self_mass"] == pytest.approx(0.25)
    sink = torch.zeros(1, 2, 4, 4)
    sink[..., 0] = 1
    row = attention_statistics(sink)
    assert row["entropy"] == 0 and row["saturated"] == 1 and row["first_token_mass"] == 1
    assert row["count"] == 4


def test_merge_equals_whole():
    p = probabilities(4, 3, 6, 6)
    parts = AttentionStatistics().update(p[:1])
    parts.merge(
        AttentionStatistics.from_state_dict(AttentionStatistics().update(p[1:]).state_dict())
    )
    whole = attention_statistics(p)
    for key, value in parts.summary().items():
        assert value == pytest.approx(whole[key], rel=1e-12), key


def test_padding_is_left_out_and_left_padding_moves_the_first_token():
    p = probabilities(2, 2, 5, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    row = AttentionStatistics().update(p, mask).summary()
    assert row["count"] == 8
    expected = torch.cat([p[0, :, :, 0].flatten(), p[1, :, 2:, 2].flatten()]).mean()
    assert row["first_token_mass"] == pytest.approx(float(expected))
    # Cached decoding: one query, all keys.
    step = AttentionStatistics().update(p[:, :, -1:], mask).summary()
    assert step["count"] == 2 and step["self_mass"] == 0


def test_broken_rows_are_counted():
    p = probabilities(1, 2, 5, 5)
    good = attention_statistics(p[:, :, :4])
    p[0, 1, 4, 2] = math.nan
    row = attention_statistics(p)
    assert row["nonfinite"] == 1 and row["count"] == 4
    assert row["entropy"] == pytest.approx(good["entropy"])


def test_empty_and_wrong_shape():
    assert AttentionStatistics().summary()["entropy"] is None
    assert attention_statistics(torch.empty(0, 2, 3, 3))["count"] == 0
    with pytest.raises(UserError, match=r"\[batch, heads, queries, keys\]"):
        attention_statistics(torch.ones(3, 3))


def test_probabilities_are_told_from_other_tensors():
    p = probabilities(2, 2, 3, 3)
    assert find_probabilities((torch.randn(2, 3, 4), p)) is p
    assert find_probabilities((torch.randn(2, 3, 4), None)) is None
    assert find_probabilities(torch.randn(2, 2, 3, 3)) is None
    assert find_probabilities(torch.tensor(1.0)) is None


def test_eager_attention_of_a_model_without_any():
    with eager_attention(nn.Linear(2, 2)) as possible:
        assert not possible


def test_eager_attention_uses_the_models_own_method():
    from contextlib import contextmanager

    class Inner(nn.Module):
        eager = False

        @contextmanager
        def eager_attention(self):
            self.eager = True
            try:
                yield
            finally:
                self.eager = False

    model = nn.Sequential(Inner())
    with eager_attention(model) as possible:
        assert possible and model[0].eager
    assert not model[0].eager
