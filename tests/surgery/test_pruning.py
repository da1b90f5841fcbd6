"""prune: what is dropped, what the loss does; the model still runs, saves and generates."""

import dataclasses

import pytest
import torch

from skipless.config import ConnectionConfig, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.evaluate import loss
from skipless.model import Transformer
from skipless.surgery import connections, load, patch, prune, save_pretrained, shares

BASE = ModelConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=40,
                   max_position_embeddings=32,
                   connection=ConnectionConfig(kind="rezero", init=1.0))  # fmt: skip


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 40, (2, 8), generator=generator) for _ in range(2)]


def ours(**changes):
    model = Transformer(dataclasses.replace(BASE, **changes), seed=1)
    with torch.no_grad():
        for name in ("attention", "mlp"):
            getattr(model.layers[1], f"{name}_connection").alpha.fill_(1e-6)
        model.layers[2].mlp_connection.alpha.fill_(1e-6)
    return model


def test_shares_are_the_equation():
    model, batch = ours(), batches()[0]
    seen = {}
    connection = model.layers[0].mlp_connection
    connection.register_forward_hook(lambda m, args, out: seen.update(x=args[0], f=args[1]))
    with torch.no_grad():
        connection.alpha.fill_(0.25)
        model(batch)
        expected = (0.25 * seen["f"].norm(dim=-1) / seen["x"].norm(dim=-1)).max()
    assert shares(model, [batch])["layers.0.mlp_connection"] == pytest.approx(float(expected))


def test_our_model_loses_a_layer_and_a_sublayer(capsys):
    model = ours()
    before, size = loss(model, batches()).nats, model.num_parameters()
    pruned = prune(model, batches(), tolerance=1e-3)
    assert set(pruned.dropped) == {
        "layers.1.attention_connection", "layers.1.mlp_connection", "layers.2.mlp_connection",
    }  # fmt: skip
    assert pruned.removed_layers == ("layers.1",) and len(model.layers) == 2
    assert pruned.loss_before == before and pruned.loss_after == loss(model, batches()).nats
    assert abs(pruned.loss_after - before) < 1e-4 and "dropped 3 of 6" in capsys.readouterr().err
    assert model.num_parameters() < size
    fresh = Transformer(model.config, seed=0)
    fresh.load_state_dict(model.state_dict())
    assert loss(fresh, batches()).nats == pruned.loss_after
    ids = batches()[0]
    assert torch.equal(model.generate(ids, 5), model.generate(ids, 5, use_cache=False))


def test_layers_stay_where_their_number_or_a_norm_counts():
    model = ours(temperature=TemperatureConfig(beta=1.1))
    assert prune(model, batches()).removed_layers == () and len(model.layers) == 3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_patched_decoder_loses_a_layer_saves_and_generates(tiny, family, tmp_path):
    model = patch(tiny.build(family), "rezero")
    with torch.no_grad():
        for name, module in connections(model).items():
            if ".0." in name:
                module.alpha.fill_(1e-6)
    before = loss(model, batches()).nats
    pruned = prune(model, batches())
    assert len(pruned.dropped) == 2 and len(pruned.removed_layers) == 1
    assert pruned.loss_after == pytest.approx(before, abs=1e-4)
    assert model.config.num_hidden_layers == 1 and len(connections(model)) == 2
    ids = tiny.inputs(family)["input_ids"]
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, **arguments)
    assert torch.equal(cached, model.generate(ids, **arguments, use_cache=False))
    loaded = load(save_pretrained(model, tmp_path))
    assert loss(loaded, batches()).nats == pruned.loss_after


def test_a_model_of_several_stacks_keeps_its_layers_and_brings_its_own_loss(tiny):
    model, batch = patch(tiny.build("whisper"), "rezero", stacks="encoder"), tiny.inputs("whisper")
    with torch.no_grad():
        for name, module in connections(model).items():
            if ".layers.1." in name:
                module.alpha.zero_()

    def size(model, batches):
        with torch.no_grad():
            return float(model(**batches[0]).logits.abs().mean())

    pruned = prune(model, [batch], loss=size)
    assert len(pruned.dropped) == 2 and pruned.removed_layers == ()
    assert pruned.loss_after == pruned.loss_before


def test_bad_requests_are_named(tiny):
    with pytest.raises(UserError, match="no sublayer stays below 1e-09; the smallest is layers"):
        prune(ours(), batches(), tolerance=1e-9)
    with pytest.raises(UserError, match="every sublayer stays below"):
        prune(ours(), batches(), tolerance=1e9)
    with pytest.raises(UserError, match="tolerance is 0"):
        prune(ours(), batches(), tolerance=0)
    with pytest.raises(UserError, match="no batch"):
        prune(ours(), [])
    with pytest.raises(UserError, match=r"patch\(model, 'residual'\) first"):
        prune(tiny.build("llama"), batches())
    with pytest.raises(UserError, match="has no sublayer to drop"):
        prune(Transformer(dataclasses.replace(BASE, connection=ConnectionConfig(kind="none"))),
              batches())  # fmt: skip
