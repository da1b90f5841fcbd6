"""Models of which prune has left one sublayer, or half a layer: pruned again."""

import copy

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.errors import UserError
from skipless.model import ModelConfig, Transformer
from skipless.surgery import load, patch, prune, shares


def ids():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 40, (2, 8), generator=generator)]


def ours(num_hidden_layers):
    torch.manual_seed(0)
    return Transformer(ModelConfig(
        hidden_size=16, num_hidden_layers=num_hidden_layers, num_attention_heads=2, vocab_size=40,
        connection=ConnectionConfig(kind="rezero", init=0.5),
    )).eval()  # fmt: skip


@pytest.fixture(params=["ours", "patched", "read back"])
def build(request, tiny, tmp_path):
    """`build(layers)`: a model whose least sublayer was pruned away."""

    def make(layers):
        if request.param == "ours":
            model = ours(layers)
        else:
            model = patch(tiny.build("llama", num_hidden_layers=layers), "residual")
        found = list(shares(model, ids()).values())
        prune(model, ids(), (found[0] + found[1]) / 2)
        if request.param == "read back":
            model.save_pretrained(tmp_path / "model")
            model = load(tmp_path / "model")
        return model

    return make


@pytest.mark.parametrize("unit", ["sublayer", "layer"])
@pytest.mark.parametrize("limit", [{"tolerance": 1e9}, {"loss_budget": 1e9}, {}])
def test_the_last_sublayer_stays_and_is_named(build, unit, limit):
    model = build(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=f"layers.0.* is the last {unit} that .* has, so nothing"):
        prune(model, ids(), unit=unit, **limit)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_all_that_is_left_is_never_dropped(build):
    model = build(2)
    for limit in ({"tolerance": 1e9}, {"loss_budget": 1e9}):
        with pytest.raises(UserError, match="nothing would be left"):
            prune(model, ids(), **limit)


def test_half_a_layer_goes_as_a_whole(build):
    model = build(2)
    by_layer: dict[str, float] = {}
    for name, share in shares(model, ids()).items():  # smallest first
        by_layer[name.rpartition(".")[0]] = share
    assert len(shares(model, ids())) == 3 and len(by_layer) == 2
    least = min(by_layer, key=by_layer.__getitem__)
    pruned = prune(model, ids(), sum(by_layer.values()) / 2, unit="layer")
    assert {row.name for row in pruned.rows} == set(by_layer)
    assert pruned.removed_layers == (least,)
    assert {name.rpartition(".")[0][-1] for name in shares(model, ids())} == {"0"}
