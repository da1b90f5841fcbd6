"""What the tests of universal interpolation in Hugging Face models share."""

from typing import Any

import torch

from skipless.config import ConnectionConfig, UniversalConfig
from skipless.surgery import patch

ALIGNERS = ("mean", "diagonal", "cholesky", "bures")
PADDED = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])


def config(aligner="diagonal", **settings: Any):
    small = {"rank": 4, "chunk_size": 3, "winsor": 1.5, "winsor_window": 4, "aligner": aligner}
    settings = small | {"rho": 0.0, "kappa": 2.0} | settings
    return ConnectionConfig(kind="universal", universal=UniversalConfig(**settings))


@torch.no_grad()
def lively(model, seed=3):
    """Every interpolator away from its neutral start."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "_connection." in name and name.endswith(("up", "gate_weight", "gate_bias", "rho")):
            p.add_(torch.randn(p.shape, generator=generator).to(p) / 2)
    return model


def build(tiny, family="llama", connection=None, dtype=torch.float64, **settings: Any):
    model = tiny.build(family, **settings)
    return lively(patch(model, connection or config())).to(dtype)


def ids(length=9, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 40, (batch, length), generator=generator)


def difference(a, b):
    return float((a - b).abs().max())


def cached(model, tokens, pieces, mask=None, cache: Any = None):
    """Logits [B, T, V] computed in pieces of the given lengths, and the cache."""
    out, start, past = [], 0, 0 if cache is None else int(cache.get_seq_length())
    for length in pieces:
        stop = start + length
        arguments = {} if mask is None else {
            "attention_mask": mask[:, : past + stop],
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, past + start : past + stop],
        }  # fmt: skip
        found = model(tokens[:, start:stop], cache=cache, use_cache=True, **arguments)
        cache, start = found.cache, stop
        out.append(found.logits)
    return torch.cat(out, dim=1), cache


def gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
