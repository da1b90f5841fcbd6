"""What the tests of universal interpolation share: a small lively model, token ids, clouds."""

import torch

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, UniversalConfig
from skipless.model import Transformer
from skipless.model.context import ForwardContext
from skipless.model.token_statistics import Tokens

CAUSAL = ("mean", "diagonal", "cholesky", "bures")
VOCABULARY, T = 40, 22


def build(aligner="diagonal", *, kind="universal", lively=True, model=None, **ui) -> Transformer:
    """Two layers of width 16 with chunks of 4; `lively` gives every zero start a value."""
    ui = {"chunk_size": 4, "winsor_window": 5, "rank": 4, "winsor": 1.5} | ui
    universal = UniversalConfig(aligner=aligner, **ui) if kind == "universal" else UniversalConfig()
    config = ModelConfig(**dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=64, init=InitConfig(std=0.3),
        connection=ConnectionConfig(kind=kind, universal=universal),
    ) | (model or {}))  # fmt: skip
    built = Transformer(config)
    if lively:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in built.named_parameters():
                if name.endswith(("encoder.up", "gate_weight", "gate_bias", "rho")):
                    p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return built.eval()


def ids(batch=2, length=T, seed=0):
    return torch.randint(0, VOCABULARY, (batch, length),
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip


def tokens_of(config, x, *, causal=True, real=None) -> Tokens:
    context = ForwardContext(is_causal=causal, tokens=real)
    return Tokens.of(config, context, x.shape[1], x.device, 0)


def clouds(length=30, width=5, seed=0):
    """A stream and a branch [1, T, D], float64, with full covariances and different means."""
    generator = torch.Generator().manual_seed(seed)
    x, f, mix = (torch.randn(*s, generator=generator).double()
                 for s in ((length, width), (length, width), (width, width)))  # fmt: skip
    return (x @ mix + 2)[None], (0.3 * f @ mix.T - 1)[None]
