"""Sites of our model, of plain modules and of Hugging Face models; selection and its errors."""

import pytest
import torch
from torch import nn

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.sites import KINDS, Site, find_sites, first_tensor, is_linear, select_sites


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 10)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_name(model):
    return {site.name: (site.kind, site.layer, site.sublayer) for site in find_sites(model)}


def test_structure_of_a_plain_model():
    assert by_name(Model()) == {
        "embed:output": ("embedding", None, None),
        **{
            key: value
            for i in (0, 1)
            for key, value in {
                f"blocks.{i}:output": ("stream", i, None),
                f"blocks.{i}.norm:output": ("norm_output", i, None),
                f"blocks.{i}.mlp:input": ("sublayer_input", i, "mlp"),
                f"blocks.{i}.mlp:output": ("sublayer_output", i, "mlp"),
                f"blocks.{i}.mlp.0:input": ("linear_input", i, "mlp"),
                f"blocks.{i}.mlp.0:output": ("linear_output", i, "mlp"),
                f"blocks.{i}.mlp.1:output": ("activation_output", i, "mlp"),
                f"blocks.{i}.mlp.2:input": ("linear_input", i, "mlp"),
                f"blocks.{i}.mlp.2:output": ("linear_output", i, "mlp"),
            }.items()
        },
        "head:input": ("linear_input", None, None),
        "head:output": ("linear_output", None, None),
    }


def test_sequential_of_layers_has_no_stream():
    kinds = {s.kind for s in find_sites(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))}
    assert kinds == {"linear_input", "linear_output", "activation_output"}


def test_sequential_of_blocks_has_one():
    names = [s.name for s in find_sites(nn.Sequential(Block(), Block()), "stream")]
    assert names == ["0:output", "1:output"]


def test_softmax_and_nested_lists():
    model = nn.ModuleDict({"experts": nn.ModuleList([Model(), Model()]), "softmax": nn.Softmax(-1)})
    sites = find_sites(model)
    assert [s.name for s in sites if s.kind == "stream"] == ["experts.0:output", "experts.1:output"]
    assert [s.name for s in sites if s.kind == "probabilities"] == ["softmax:output"]


def test_our_model_answers_for_itself():
    from skipless.model import Transformer

    model = Transformer(
        ModelConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
            max_position_embeddings=8,
        )
    )  # fmt: skip
    sites = find_sites(model)
    assert sites == list(model.sites())
    names = [site.name for site in sites]
    assert len(names) == len(set(names))
    modules = dict(model.named_modules())
    assert all(site.module in modules and site.kind in KINDS for site in sites)
    assert len(select_sites(model, "layers.*.mlp.act:output")) == 2
    assert len(find_sites(model, "stream")) == 4


def test_hugging_face_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                    num_attention_heads=2)
    )  # fmt: skip
    found = by_name(model)
    assert found["model.layers.1:output"] == ("stream", 1, None)
    assert found["model.layers.1.self_attn:output"] == ("sublayer_output", 1, "attention")
    assert found["model.layers.1.mlp:input"] == ("sublayer_input", 1, "mlp")
    assert found["model.layers.0.mlp.act_fn:output"] == ("activation_output", 0, "mlp")
    assert found["model.norm:output"] == ("norm_output", None, None)
    assert found["model.embed_tokens:output"][0] == "embedding"
    assert found["lm_head:input"] == ("linear_input", None, None)


def test_hugging_face_conv1d_is_linear():
    from transformers.pytorch_utils import Conv1D

    assert is_linear(Conv1D(4, 2)) and is_linear(nn.Linear(2, 2)) and not is_linear(nn.GELU())
    attention = nn.MultiheadAttention(8, 2)
    assert not is_linear(attention.out_proj)  # torch never calls it


def test_selection():
    model = Model()
    chosen = select_sites(model, ["head:input", "stream", "blocks.*.mlp.1:output", "stream"])
    assert [s.name for s in chosen] == [
        "blocks.0:output", "blocks.0.mlp.1:output", "blocks.1:output", "blocks.1.mlp.1:output",
        "head:input",
    ]  # fmt: skip
    own = Site(name="mine", module="blocks.1", direction="input")
    assert select_sites(model, own) == [own]
    assert select_sites(model, [own, "embed:output"])[-1] is own


def test_nothing_matched_is_an_error_with_near_names():
    model = Model()
    with pytest.raises(UserError, match=r"no site matches 'blocks.0.mlp.act:output'; did you mean"):
        select_sites(model, "blocks.0.mlp.act:output")
    with pytest.raises(UserError, match="did you mean 'stream'"):
        find_sites(model, "streem")
    with pytest.raises(UserError, match="no site of kind 'query'; it has: activation_output"):
        select_sites(model, "query")
    with pytest.raises(UserError, match="list of sites is empty"):
        select_sites(model, [])
    with pytest.raises(UserError, match=r"module 'blocks.7'.*did you mean 'blocks"):
        select_sites(model, Site(name="x", module="blocks.7", direction="output"))
    with pytest.raises(UserError, match="Dropout has no linear, norm"):
        find_sites(nn.Dropout())
    with pytest.raises(UserError, match="site direction is 'inside'"):
        Site(name="x", module="", direction="inside")


def test_first_tensor():
    x, y = torch.ones(1), torch.zeros(1)
    assert first_tensor(x) is x
    assert first_tensor((None, [y, x])) is y
    assert first_tensor({"a": None, "b": x}) is x
    assert first_tensor([(), {"hidden_states": y}]) is y
    assert first_tensor(None) is None and first_tensor(3) is None
