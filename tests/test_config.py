"""Settings: JSON both ways, overrides by dotted name, errors that name the value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless import recipes
from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig, RunConfig
from skipless.errors import UserError, suggestion
from skipless.jsonable import from_json, leaves, override, to_json


@pytest.mark.parametrize("name", recipes.names())
def test_json_round_trip_of_every_recipe(name):
    config = recipes.get(name)
    assert from_json(RunConfig, to_json(config)) == config


@given(
    lr=st.floats(1e-8, 10),
    beta=st.floats(0, 0.999),
    tokens=st.integers(1, 10**12),
    kind=st.sampled_from(["residual", "none", "anneal", "rezero"]),
)
def test_override_from_text_equals_the_value(lr, beta, tokens, kind):
    new = override(
        RunConfig(),
        {
            "optim.lr": repr(lr),
            "optim.betas": f"{beta!r},0.5",
            "train.num_tokens": str(tokens),
            "model.connection.kind": kind,
        },
    )
    assert new.optim.lr == lr
    assert new.optim.betas == (beta, 0.5)
    assert new.train.num_tokens == tokens
    assert new.model.connection.kind == kind


def test_override_keeps_everything_else():
    before, after = RunConfig(), override(RunConfig(), {"train.batch_size": "3"})
    changed = {k for k, v in leaves(after).items() if leaves(before)[k] != v}
    assert changed == {"train.batch_size"}


def test_changes_that_only_fit_together_are_applied_together():
    new = override(RunConfig(), {"model.hidden_size": "66", "model.num_attention_heads": "3"})
    assert new.model.head_dim == 22


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optim.lrr", "1", "did you mean 'optim.lr'"),
        ("train.batch_size", "many", "'many'"),
        ("train.batch_size", "2.5e0", "'2.5e0'"),
        ("train.batch_size", "0", "at least 1"),
        ("train.schedule", "cos", "'cosine'"),
        ("model.connection.kind", "residul", "did you mean 'residual'"),
        ("model.num_attention_heads", "7", "not divisible"),
        ("optim.betas", "0.9", "optim.betas"),
        ("train.compile", "maybe", "bool"),
        ("train.sequence_length", "100000", "max_position_embeddings"),
    ],
)
def test_bad_overrides_are_told_in_one_sentence(name, value, said):
    with pytest.raises(UserError) as error:
        override(RunConfig(), {name: value})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_may_be_written_with_an_exponent():
    assert override(RunConfig(), {"train.num_tokens": "5e6"}).train.num_tokens == 5_000_000


def test_unknown_json_keys_are_errors():
    with pytest.raises(UserError, match="did you mean 'train'"):
        from_json(RunConfig, '{"trian": {}}')
    with pytest.raises(UserError, match="not valid JSON"):
        from_json(RunConfig, "{")


def test_the_last_matching_connection_override_wins():
    config = ModelConfig(
        num_hidden_layers=4,
        connection_overrides=(
            ConnectionOverride(connection=ConnectionConfig(kind="rezero"), layers=(0, -1)),
            ConnectionOverride(connection=ConnectionConfig(kind="none"), sublayer="mlp"),
        ),
    )
    kinds = [[config.connection_at(i, s).kind for s in ("attention", "mlp")] for i in range(4)]
    assert kinds == [
        ["rezero", "none"],
        ["residual", "none"],
        ["residual", "none"],
        ["rezero", "none"],
    ]


def test_suggestion_lists_everything_when_nothing_is_near():
    assert suggestion("zzz", ["b", "a"], noun="thing") == "known things: a, b"
