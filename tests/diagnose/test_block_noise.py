"""Noise of every block against blocks quantised one at a time, in float64; and what it is for."""

import pytest
import torch
from torch import nn

from skipless.diagnose import diagnose
from skipless.diagnose.block_noise import block_noise
from skipless.diagnose.damage import Damage
from skipless.diagnose.sensitivity import layer_sensitivity
from skipless.quant import Scheme, quantized
from skipless.report.ranks import spearman
from skipless.sites import first_tensor

W8A8 = Scheme.parse("W8A8")


class Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """x + size F(norm(x)), a channel of F enlarged so that F rounds badly."""

    def __init__(self, width, size, heavy):
        super().__init__()
        self.norm, self.mlp, self.size = nn.LayerNorm(width), Branch(width), size
        with torch.no_grad():
            self.mlp.down.weight[0] *= heavy

    def forward(self, x):
        return x + self.size * self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, layers, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(Block(width, *layer) for layer in layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LAYERS = [(0.01, 60.0), (1.0, 1.0), (0.02, 40.0), (2.0, 2.0), (0.3, 4.0), (0.005, 90.0)]
"""(size of the branch, how much larger its channel 0 is): the worst branches are the smallest."""


def ids():
    return torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(1))


def one_by_one(model, batch, scheme, names):
    """The same, a block at a time: recorded inputs, one layer quantised, the block called alone."""
    modules, inputs, exact = dict(model.named_modules()), {}, {}
    handles = [
        modules[name].register_forward_hook(
            lambda _, args, kwargs, y, name=name: (
                inputs.update({name: (args, kwargs)}), exact.update({name: first_tensor(y)}), None
            )[-1],
            with_kwargs=True,
        )
        for name in names
    ]  # fmt: skip
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    found = {}
    for layer, name in enumerate(names):
        args, kwargs = inputs[name]
        kwargs = {k: v for k, v in kwargs.items() if "past" not in k and "cache" not in k}
        with quantized(model, scheme, "block", layers=[layer]), torch.no_grad():
            y = first_tensor(modules[name](*args, **kwargs))
        ratio = (y - exact[name]).square().sum(-1) / exact[name].square().sum(-1)
        found[layer] = ratio
    return found


@pytest.mark.parametrize("scheme", ["W8A8", "W4A4", "W8A8-a:token", "W4Afp"])
def test_one_by_one_gives_the_same(scheme):
    model, scheme = Net(LAYERS).double(), Scheme.parse(scheme)
    found = block_noise(model, scheme, [ids()], "block", {})
    expected = one_by_one(model, ids(), scheme, [f"blocks.{i}" for i in range(6)])
    assert found == {k: pytest.approx(float(v.mean()), rel=1e-10) for k, v in expected.items()}
    assert all(value > 0 for value in found.values())


def test_padding_does_not_count_and_batches_are_pooled():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=40, max_position_embeddings=32,
    )).double().eval()  # fmt: skip
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[1, 5:] = 0
    batch = {"input_ids": ids(), "attention_mask": mask}
    names = [f"encoder.layer.{i}" for i in range(3)]
    expected = one_by_one(model, batch, W8A8, names)
    found = block_noise(model, W8A8, [batch], "block", {})
    for layer, ratio in expected.items():
        assert found[layer] == pytest.approx(float(ratio[mask == 1].mean()), rel=1e-10)
    parts = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    single = [block_noise(model, W8A8, [part], "block", {}) for part in parts]
    both = block_noise(model, W8A8, parts, "block", {})
    weights = [21 / 53, 32 / 53]  # real tokens
    for layer in range(3):
        pooled = sum(w * one[layer] for w, one in zip(weights, single, strict=True))
        assert both[layer] == pytest.approx(pooled, rel=1e-10)


def test_it_orders_layers_by_their_damage_where_the_branches_own_noise_does_not():
    model = Net(LAYERS).double()
    damage = Damage(model, [ids()], "distance")
    measured = [row["increase"] for row in layer_sensitivity(damage, W8A8, "block", {})]
    found = diagnose(model, ids(), "W8A8", measure="distance")
    predicted = [row["predicted"] for row in found.layers]
    assert [row["increase"] for row in found.layers] == pytest.approx(measured, rel=1e-9)
    assert found.damage["predicted"] == "block"
    assert spearman(predicted, measured) > 0.9
    branches = {
        row["layer"]: row["token_sqnr"]["W8A8"] for row in found.sites
        if row["kind"] == "sublayer_output"
    }  # fmt: skip
    own = [-branches[layer] for layer in range(6)]
    assert spearman(own, measured) < 0


def test_layers_of_two_stacks_are_added_and_a_cache_is_left_alone():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.WhisperModel(transformers.WhisperConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=40,
        num_mel_bins=4, max_source_positions=8, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )).double().eval()  # fmt: skip
    assert model.config.use_cache
    sound = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(2)).double()
    batch = {"input_features": sound, "decoder_input_ids": ids()}
    found = block_noise(model, W8A8, [batch], "block", {})
    total = [0.0, 0.0]
    for stack in ("encoder", "decoder"):
        names = [f"{stack}.layers.{i}" for i in range(2)]
        for layer, ratio in one_by_one(model, batch, W8A8, names).items():
            total[layer] += float(ratio.mean())
    assert found == {layer: pytest.approx(total[layer], rel=1e-10) for layer in (0, 1)}


def test_a_module_without_blocks_has_none():
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    assert block_noise(net, W8A8, [torch.randn(5, 16)], "linear", {}) == {}
    assert diagnose(net, [torch.randn(64, 16)]).damage["predicted"] == "sites"
