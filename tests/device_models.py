"""Small models that tests put on an accelerator that is not there (`pretend_device`)."""

import pytest
import torch

from skipless.config import ConnectionConfig, InitConfig, ModelConfig
from skipless.model import Transformer


def transformer(kind: str = "learned", **changes) -> Transformer:
    """Ours, of two layers, on 61 tokens."""
    return Transformer(ModelConfig(**dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=32, connection=ConnectionConfig(kind=kind),
        init=InitConfig(std=0.2),
    ) | changes)).eval()  # fmt: skip


def llama(**changes):
    """Transformers' of two layers, on 40 tokens; skips the test without transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=40, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ) | changes)).eval()  # fmt: skip
