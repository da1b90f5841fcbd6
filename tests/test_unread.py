"""What `unread` calls without effect has none: another value gives the same numbers, exactly."""

import dataclasses
import typing
from typing import Any

import pytest
import torch

from skipless.config import (
    ConnectionConfig,
    InitConfig,
    ModelConfig,
    OptimizerRecipe,
    TrainConfig,
    UniversalConfig,
)
from skipless.model import Transformer
from skipless.optim import build_optimizer, schedule

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
             max_position_embeddings=16)  # fmt: skip
IDS = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(**settings: Any) -> Transformer:
    model = Transformer(ModelConfig(**SMALL, **settings))
    with torch.no_grad():
        for p in model.parameters():  # no weight at 0 or 1, where much has no effect
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model.eval()


def numbers_of_universal(config: UniversalConfig) -> list[torch.Tensor]:
    causal = config.aligner != "sinkhorn"
    join = ConnectionConfig(kind="universal", universal=config)
    return [model_of(connection=join, causal=causal)(IDS).logits]


def numbers_of_model(config: ModelConfig) -> list[torch.Tensor]:
    return [model_of(position=config.position, rope_theta=config.rope_theta)(IDS).logits]


def numbers_of_start(config: InitConfig) -> list[torch.Tensor]:
    return list(Transformer(ModelConfig(**SMALL, init=config)).parameters())


def numbers_of_optimizer(config: OptimizerRecipe) -> list[torch.Tensor]:
    model = model_of()
    optimizer = build_optimizer(config, model)
    for _ in range(4):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def numbers_of_training(config: TrainConfig) -> list[torch.Tensor]:
    s = config
    return [torch.tensor([
        schedule(s.schedule, step, 40, 4, s.min_lr_ratio, s.decay_fraction) for step in range(40)
    ])]  # fmt: skip


CASES: list[tuple[type, Any, dict[str, Any]]] = [
    (UniversalConfig, numbers_of_universal, {}),
    (ModelConfig, numbers_of_model, {}),
    (InitConfig, numbers_of_start, {}),
    (OptimizerRecipe, numbers_of_optimizer, {"refresh_every": 2, "block_size": 8}),
    (TrainConfig, numbers_of_training, {}),
]


def values_of(cls: type, name: str) -> list[Any]:
    """All values of a choice, or of what is switched on and off."""
    if cls is OptimizerRecipe and name == "name":
        return ["adamw", "muon", "soap", "kl_shampoo"]
    hint = typing.get_type_hints(cls)[name]
    if hint is bool:
        return [False, True]
    return [None] if type(None) in typing.get_args(hint) else list(typing.get_args(hint))


def another(cls: type, name: str) -> Any:
    """A value of a setting that is not its default."""
    old = next(f.default for f in dataclasses.fields(cls) if f.name == name)
    hint = typing.get_type_hints(cls)[name]
    if typing.get_origin(hint) is typing.Literal:
        return next(v for v in typing.get_args(hint) if v not in (old, "auto"))
    if isinstance(old, bool):
        return not old
    if isinstance(old, tuple):
        return tuple(value / 2 for value in old)
    if old is None:
        return 0.3
    return old * 2 if isinstance(old, int) else old / 2 or 0.5


def rules() -> list[Any]:
    return [
        pytest.param(cls, numbers, base, {rule.setting: value}, field, id=f"{value}-{field}")
        for cls, numbers, base in CASES
        for rule in cls.rules
        for value in values_of(cls, rule.setting) if rule.idle(value)
        for field in rule.fields
    ]  # fmt: skip


@pytest.mark.parametrize("cls, numbers, base, ruling, field", rules())
def test_it_has_no_effect(cls, numbers, base, ruling, field):
    if "reference" in ruling:
        ruling = {**ruling, "name": "kl_shampoo"}
    base = {k: v for k, v in base.items() if k != field}
    one = numbers(cls(**base, **ruling))
    other = numbers(cls(**base, **ruling, **{field: another(cls, field)}))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "cls, numbers, settings",
    [
        (UniversalConfig, numbers_of_universal, {"rank": 3}),
        (UniversalConfig, numbers_of_universal, {"shrinkage": 1.0}),
        (UniversalConfig, numbers_of_universal, {"gate": "constant"}),
        (ModelConfig, numbers_of_model, {"rope_theta": 100.0}),
        (InitConfig, numbers_of_start, {"query_key": "haar"}),
        (OptimizerRecipe, numbers_of_optimizer, {"betas": (0.5, 0.6)}),
        (TrainConfig, numbers_of_training, {"min_lr_ratio": 0.3}),
    ],
)
def test_the_numbers_would_show_one(cls, numbers, settings):
    one, other = numbers(cls()), numbers(cls(**settings))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_published_steps_read_how_often_they_refresh():
    published = {"name": "kl_shampoo", "reference": True}
    one, other = (
        numbers_of_optimizer(OptimizerRecipe(**published, refresh_every=n)) for n in (2, 10)
    )
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
