"""A small decoder for ONNX files, and running one. Read by the tests beside it."""

from __future__ import annotations

import torch

from skipless.config import ConnectionConfig as Connection
from skipless.config import ModelConfig
from skipless.model import Transformer

IDS = torch.randint(61, (8, 24), generator=torch.Generator().manual_seed(5))


def build(kind: str = "none", connection: Connection | None = None, **changes) -> Transformer:
    """A decoder whose gains are no round numbers, seed 1."""
    settings = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
        "max_position_embeddings": 40, "connection": connection or Connection(kind=kind),
    } | changes  # fmt: skip
    model = Transformer(ModelConfig(**settings), seed=1).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(3)
    return model


def feed(session, ids, mask=None, past=None):
    """All outputs by name."""
    mask = torch.ones(ids.shape[0], ids.shape[1], dtype=torch.int64) if mask is None else mask
    given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), **(past or {})}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def distance(got, model, ids, mask=None) -> float:
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    got = torch.from_numpy(got["logits"])
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())
