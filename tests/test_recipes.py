"""Recipes: all of them build, families share what they say they share."""

import dataclasses

import pytest
import torch

from skipless import recipes
from skipless.config import RunConfig
from skipless.errors import UserError
from skipless.jsonable import from_json, leaves, to_json
from skipless.model import Transformer
from skipless.optim import build_optimizer
from skipless.quant import Scheme
from skipless.recipes.demo import FAST_ROWS, ROWS

SMALL = tuple(name for name in recipes.names("rf-small-"))
FULL = ("rf-194m", "rf-194m-adamw", "residual-194m-adamw", "residual-194m-kl")
OWN = ("name", "label", "note", "optim.", "model.connection", "model.init.", "model.temperature.")
"""What rows of one family may differ in."""


def build(config: RunConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config.model)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_builds_and_survives_json(name):
    config = recipes.get(name)
    assert config.name == name and config.label and recipes.describe(name)
    assert from_json(RunConfig, to_json(config)) == config
    model = build(config)
    assert len(model.layer_list) == config.model.num_hidden_layers
    assert all(parameter.is_meta for parameter in model.parameters())
    assert config.train.num_steps > config.train.warmup_steps
    optimizer = build_optimizer(config.optim, Transformer(_shrunk(config.model)))
    assert type(optimizer).__name__.lower() == config.optim.name.replace("_", "")
    for scheme in (*config.evaluate.schemes, config.evaluate.error_scheme):
        Scheme.parse(scheme)


def _shrunk(model):
    return dataclasses.replace(
        model, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16,
        connection_overrides=(),
    )  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_the_papers_model_has_its_number_of_weights(name):
    model = build(recipes.get(name))
    assert model.num_parameters(gains=False) == 194_445_312 == 24 * 12 * 768**2 + 32_000 * 768
    gains = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert gains == (2 * 24 + 1) * 768
    assert model.num_parameters() == 194_445_312 + gains


@pytest.mark.parametrize("name", FULL)
def test_the_papers_settings(name):
    config = recipes.get(name)
    train, optim = config.train, config.optim
    assert (train.batch_size, train.sequence_length, train.num_steps) == (512, 512, 50_000)
    assert (train.warmup_steps, optim.weight_decay) == (2_000, 0.01)
    free = name.startswith("rf-")
    assert config.model.connection.kind == ("none" if free else "residual")
    assert optim.lr == (5e-4 if free else 1e-3)
    assert config.model.temperature.beta == (1.1 if free else 1.0)


@pytest.mark.parametrize(
    "rows", [ROWS, FAST_ROWS, SMALL, FULL], ids=["demo", "fast", "small", "full"]
)
def test_rows_of_a_family_share_all_but_what_they_are_about(rows):
    first = leaves(recipes.get(rows[0]))
    for name in rows[1:]:
        other = leaves(recipes.get(name))
        odd = [key for key in other if other[key] != first[key] and not key.startswith(OWN)]
        assert not odd, f"{name} differs from {rows[0]} in {odd}"


def test_rows_differ_only_where_their_names_say():
    adamw, kl = leaves(recipes.get("demo-rf-adamw")), leaves(recipes.get("demo-rf-kl"))
    assert {key for key in kl if kl[key] != adamw[key]} <= {
        "name", "label", "note", "optim.name", "optim.lr", "optim.betas", "optim.adamw_lr"
    }  # fmt: skip
    skip, free = leaves(recipes.get("demo-residual-muon")), leaves(recipes.get("demo-rf-muon"))
    changed = {key.rsplit(".", 1)[0] for key in free if free[key] != skip[key]}
    assert changed <= {"name", "label", "note", "model.connection", "model.init", "optim"}
    assert {k for k in free if k.startswith("optim.") and free[k] != skip[k]} <= {"optim.lr"}


def test_the_demo_is_as_large_as_promised():
    config = recipes.get(ROWS[0])
    assert config.model.num_hidden_layers >= 8 and config.model.hidden_size >= 128
    assert config.model.vocab_size >= 2_048 and config.train.sequence_length >= 128
    assert config.train.num_tokens >= 200_000
    small = recipes.get(SMALL[0])
    assert small.train.num_tokens >= 20_000_000 and small.model.hidden_size >= 192


def test_fast_rows_are_the_demo_in_small():
    assert [name.replace("-fast", "") for name in FAST_ROWS] == list(ROWS)
    for fast, full in zip(FAST_ROWS, ROWS, strict=True):
        small, large = recipes.get(fast), recipes.get(full)
        assert small.optim == large.optim and small.label == large.label
        assert small.model.connection == large.model.connection
        assert small.train.num_tokens < large.train.num_tokens / 5


def test_literal_row_is_literal():
    config = recipes.get("demo-rf-literal")
    init = config.model.init
    assert config.model.connection.kind == "none" and config.model.temperature.beta == 1.1
    assert (init.value_output, init.query_key, init.mlp) == ("haar", "haar", "suo")
    assert (init.a_vo, init.a_qk, init.a_up, init.a_down) == (3.0, 0.9, 1.5, 1.5)
    assert config.optim.reference and config.optim.start == "published"


def test_unknown_and_double_names():
    with pytest.raises(UserError, match="did you mean 'demo-rf-kl'"):
        recipes.get("demo-rf-kll")
    with pytest.raises(RuntimeError, match="registered twice"):
        recipes.recipe("demo-rf-kl")(lambda: RunConfig())
    assert recipes.names("rf-small-") == list(SMALL) and len(SMALL) >= 4
