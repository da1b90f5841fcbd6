"""A small decoder and batches to evaluate it on."""

from __future__ import annotations

import pytest
import torch

from skipless.config import ConnectionConfig, InitConfig, ModelConfig
from skipless.model import Transformer


@pytest.fixture(params=["residual", "none"])
def model(request) -> Transformer:
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=16, connection=ConnectionConfig(kind=request.param),
        init=InitConfig(value_output="haar", query_key="unit", mlp="suo", std=0.3),
    )  # fmt: skip
    return Transformer(config, seed=0)


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(0, 61, (7, 13), generator=torch.Generator().manual_seed(0))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split([3, 3, 1])]
