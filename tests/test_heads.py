"""One head for every room: found by structure, the same for optimisers and for quantisation."""

import pytest
import torch
from torch import nn

from skipless.errors import UserError
from skipless.heads import find_heads
from skipless.optim import parameter_roles
from skipless.quant import quantization, quantize


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.act, self.out = nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.out(self.act(self.up(x)))


class Own(nn.Module):
    """Somebody's own decoder: its inner width, 4 x 8, is also the size of its vocabulary."""

    def __init__(self, name, *, width=8, vocabulary=32, tied=False, head_first=False):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        head = nn.Linear(width, vocabulary, bias=False)
        if head_first:
            self.add_module(name, head)
        self.blocks = nn.ModuleList([Block(width, 4 * width) for _ in range(2)])
        self.add_module(name, head)
        self.name = name
        if tied:
            head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.get_submodule(self.name)(x)


NAMES = ["lm_head", "head", "output", "out", "fc", "to_logits", "unembed", "zzz"]
OPTIONS = [{}, {"tied": True}, {"head_first": True}, {"vocabulary": 8}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_head_is_found_whatever_its_name_and_both_rooms_agree(name, options):
    model = Own(name, **options)
    assert find_heads(model) == {name}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    roles = parameter_roles(model)
    if not options.get("tied"):
        assert roles[f"{name}.weight"] == "head"
    assert [key for key, role in roles.items() if role == "matrix"] == [
        f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("up", "out")
    ]
    quantize(model, "W2A8")
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    assert changed == {key for key, role in roles.items() if role == "matrix"}
    text = quantization(model).describe()
    assert text.endswith(f"; in full precision: embedding table; head {name}")


def test_describe_names_what_stays_and_claims_nothing_else():
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU())
    quantize(model, "W8A8")
    assert quantization(model).describe() == (
        "W8A8 in scope linear: 1 weight, 1 activation site; in full precision: convolution 0"
    )
    model = quantize(Own("out"), "W8A8", include_head=True)
    assert quantization(model).describe().endswith("sites; every matrix quantised")
    model = quantize(Own("out"), "W8A8", layers=[1])
    assert (
        quantization(model)
        .describe()
        .endswith("embedding table; other blocks.0.up, blocks.0.out; head out")
    )


def test_a_classifier_ends_in_its_head():
    blocks = nn.ModuleList([Block(8, 16), Block(8, 16)])
    model = nn.ModuleDict({"patch": nn.Linear(12, 8), "blocks": blocks, "norm": nn.LayerNorm(8),
                           "fc": nn.Linear(8, 3)})  # fmt: skip
    assert find_heads(model) == {"fc"}
    assert find_heads(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 4))) == set()
    assert find_heads(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 2))) == {"2"}


def test_what_is_no_head():
    # An MLP of its own, a part of a model, a pooler with its activation.
    assert find_heads(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))) == set()
    assert find_heads(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9), nn.Linear(9, 8))) == set()
    encoder = nn.ModuleDict({"positions": nn.Embedding(8, 8), "blocks": nn.ModuleList(
        [Block(8, 16)]), "pooler": nn.Sequential(nn.Linear(8, 8), nn.Tanh())})  # fmt: skip
    assert find_heads(encoder) == set()
    assert find_heads(nn.Linear(3, 3)) == set()


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "T5", "OPT"])
def test_hugging_face_families(family):
    transformers = pytest.importorskip("transformers")
    small = {
        "Llama": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=32, num_key_value_heads=2),
        "GPT2": dict(n_embd=16, n_layer=2, n_head=2),
        "Bert": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                     intermediate_size=32, max_position_embeddings=16),
        "T5": dict(d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2,
                   tie_word_embeddings=False),
        "OPT": dict(hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                    word_embed_proj_dim=8, max_position_embeddings=14),
    }[family]  # fmt: skip
    heads = {
        "Llama": {"CausalLM": {"lm_head"}, "SequenceClassification": {"score"}, "Model": set()},
        "GPT2": {"LMHead": {"lm_head"}, "SequenceClassification": {"score"}},
        "Bert": {"MaskedLM": {"cls.predictions.decoder"}, "Model": set(),
                 "SequenceClassification": {"classifier"}, "QuestionAnswering": {"qa_outputs"}},
        "T5": {"ConditionalGeneration": {"lm_head"}},
        "OPT": {"CausalLM": {"lm_head"}},
    }[family]  # fmt: skip
    config = getattr(transformers, f"{family}Config")(vocab_size=48, pad_token_id=0, **small)
    for what, expected in heads.items():
        kind = what if what in ("Model", "LMHead") else f"For{what}"
        name = f"{family}{kind}Model" if kind == "LMHead" else f"{family}{kind}"
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        assert find_heads(model) == expected, name


def test_a_model_of_convolutions_is_told_what_is_covered():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(UserError) as caught:
        quantize(model, "W8A8")
    for part in ("convolutions (0, 2) are not covered", "nn.Linear", "fake_quantize"):
        assert part in str(caught.value)
