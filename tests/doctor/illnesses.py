"""Small models and trainings with a defect, and without it."""

import torch
from torch import nn

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, TemperatureConfig
from skipless.model import Transformer

IDS = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))


def decoder(seed: int = 0, **settings) -> Transformer:
    """A decoder of 4 layers and width 32 that is well."""
    small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
             "vocab_size": 64, "max_position_embeddings": 32}  # fmt: skip
    return Transformer(ModelConfig(**{**small, **settings}), seed=seed)


def averaging() -> Transformer:
    """Without skips, every layer an even mean over the prefix: tokens become one."""
    return decoder(
        num_hidden_layers=8, connection=ConnectionConfig(kind="none"),
        init=InitConfig(value_output="haar", query_key="haar", mlp="suo", a_qk=0.9),
        temperature=TemperatureConfig(beta=3.0),
    )  # fmt: skip


class Chain(nn.Module):
    """`depth` layers one behind the other, each an orthogonal matrix times `scale`, and tanh or
    sin."""

    def __init__(self, scale: float, act=torch.tanh, depth: int = 8, width: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = act
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=scale)

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class SequenceMean(nn.Module):
    """A token mixer that takes the mean of all tokens, later ones too, or of those so far."""

    def __init__(self, causal: bool, width: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(64, width), nn.Linear(width, width)
        self.head, self.causal = nn.Linear(width, 64), causal

    def forward(self, ids):
        x = self.embed(ids)
        if self.causal:
            count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
            mean = x.cumsum(1) / count
        else:
            mean = x.mean(1, keepdim=True).expand_as(x)
        return self.head(x + self.mix(mean))


def with_sink() -> Transformer:
    """Queries look for what only token 0 has, and every sequence begins with token 0."""
    model = decoder(position="none")
    torch.manual_seed(0)
    with torch.no_grad():
        common, mark = torch.zeros(32), torch.zeros(32)
        common[0], mark[1] = 1.0, 3.0
        model.embed_tokens.weight.normal_(0, 0.1).add_(common)
        model.embed_tokens.weight[0].add_(mark)
        for block in model.blocks:
            for matrix, direction in ((block.self_attn.q_proj, 0), (block.self_attn.k_proj, 1)):
                matrix.weight.zero_()
                matrix.weight[::16, direction] = 1.0
    return model


class Regression(nn.Module):
    """y = gain * W x, the gain learned: a join in small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8, bias=False)
        self.gain = nn.Parameter(torch.zeros(1))
        self.inner.weight.requires_grad_(False)

    def gains(self):
        return {"join.b": self.gain.detach()}

    def forward(self, x):
        return self.gain * self.inner(x)
