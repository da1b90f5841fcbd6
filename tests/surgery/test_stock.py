"""Our decoder as a stock class: equal logits after saving and loading, refusals."""

import dataclasses

import pytest
import torch

from skipless.config import ConnectionConfig, InitConfig, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.model import Transformer
from skipless.surgery import to_stock

BASE = ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
                   num_key_value_heads=1, max_position_embeddings=32, hidden_act="swiglu",
                   connection=ConnectionConfig(kind="rezero", init=0.6))  # fmt: skip


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu2"])
@pytest.mark.parametrize("tied", [True, False])
def test_stock_transformers_computes_the_same(tiny, activation, tied, tmp_path):
    import transformers

    temperature = TemperatureConfig(kind="learned_head", beta=1.2)
    changes = {"hidden_act": activation, "tie_word_embeddings": tied, "temperature": temperature}
    model = Transformer(dataclasses.replace(BASE, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    stock = to_stock(model)
    name = "LlamaForCausalLM" if activation == "swiglu" else "ArceeForCausalLM"
    assert type(stock).__name__ == name
    stock.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = model(ids).logits, loaded(ids).logits
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layernorm"}, "LayerNorm"),
        ({"position": "learned"}, "positions are 'learned'"),
        ({"causal": False}, "bidirectional"),
        ({"num_labels": 3}, "classification head"),
        ({"norm_placement": "post"}, "placement is 'post'"),
        ({"init": InitConfig(identity_bias=5.0)}, "identity bias"),
        ({"temperature": TemperatureConfig(length_scaled=True)}, "depends on the length"),
        ({"connection": ConnectionConfig(kind="none")}, "0.attention_connection has no skip"),
    ],
)
def test_what_no_stock_class_has_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        to_stock(Transformer(dataclasses.replace(BASE, **changes)))
