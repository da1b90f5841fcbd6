"""How many tokens a model sees, whatever its config calls it."""

from types import SimpleNamespace

import pytest

from skipless.config import ModelConfig
from skipless.model import Transformer
from skipless.pretrained.positions import num_positions


def test_ours():
    config = ModelConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9,
        max_position_embeddings=24,
    )  # fmt: skip
    assert num_positions(Transformer(config)) == 24


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("GPT2Config", {"n_positions": 33}, 33),
        ("LlamaConfig", {"max_position_embeddings": 34}, 34),
        ("WhisperConfig", {"max_target_positions": 35}, 35),
        ("LlavaConfig", {}, 36),
        ("T5Config", {}, None),
    ],
)
def test_families(name, settings, expected):
    transformers = pytest.importorskip("transformers")
    if name == "LlavaConfig":
        settings = {"text_config": transformers.LlamaConfig(max_position_embeddings=36)}
    config = getattr(transformers, name)(**settings)
    assert num_positions(SimpleNamespace(config=config)) == expected


def test_a_model_without_a_config():
    assert num_positions(object()) is None
