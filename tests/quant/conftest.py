"""Small models that quantisation is tried on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from skipless.config import ConnectionConfig, ModelConfig
from skipless.model import Transformer


class TinyBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class TinyModel(nn.Module):
    """Plain torch, with a tied head: nothing of skipless in it."""

    def __init__(self, width: int = 16, vocab_size: int = 31):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([TinyBlock(width) for _ in range(3)])
        self.out = nn.Linear(width, vocab_size, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.fixture(autouse=True)
def _threads_come_back():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel().eval()


def transformer(kind: str = "residual", **changes) -> Transformer:
    config = ModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=16, connection=ConnectionConfig(kind=kind), **changes,
    )  # fmt: skip
    return Transformer(config, seed=0).eval()


@pytest.fixture(params=["residual", "none"])
def ours(request) -> Transformer:
    return transformer(request.param)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def make_transformer():
    return transformer
