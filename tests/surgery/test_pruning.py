"""prune: what is dropped, what the loss does; the model still runs, saves and generates."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch

from skipless.config import ConnectionConfig, ModelConfig, TemperatureConfig
from skipless.errors import UserError
from skipless.evaluate import loss
from skipless.model import Transformer
from skipless.surgery import connections, load, patch, prune, save_pretrained, shares
from skipless.surgery.slimming.shares import candidates, layer_names, measure_shares
from skipless.surgery.slimming.trials import Trials

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


def different():
    """A model whose sublayers matter to different degrees."""
    model = Transformer(BASE, seed=1)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "alpha" in name:
                parameter.fill_(float(torch.rand((), generator=generator)))
            elif parameter.ndim > 1:
                parameter.mul_(6)
    return model


def trials_of(model, loss=None):
    return Trials(model, batches(), {name: (name,) for name in candidates(model)}, loss)


def without(model, names):
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            copied.get_submodule(name).alpha.zero_()
    return loss(copied, batches()).nats


def test_mean_shares_are_the_mean():
    model, seen = ours(), []
    connection = model.layers[0].attention_connection
    handle = connection.register_forward_hook(lambda m, args, out: seen.append(args[:2]))
    found = measure_shares(model, candidates(model), batches())["layers.0.attention_connection"]
    handle.remove()
    ratios = torch.cat([(f.norm(dim=-1) / x.norm(dim=-1)).flatten() for x, f in seen])
    assert found.mean == pytest.approx(float(ratios.mean()), rel=1e-5)
    assert found.largest == pytest.approx(float(ratios.max()), rel=1e-5)


def test_losses_alone_are_those_of_branches_times_zero():
    model = different()
    found = trials_of(model).alone()
    assert (
        found == {name: without(model, [name]) for name in found} and len(set(found.values())) == 6
    )
    # what layers in front returned is handed back, and changes no bit
    own = trials_of(model, lambda m, b: loss(m, b).nats)
    assert own._kept is None and own.alone() == found
    assert not any("forward" in vars(m) for m in model.modules())


def test_greedy_takes_the_cheapest_next_one_measured_again():
    model = different()
    trials = trials_of(model)
    trials.greedy(trials.alone(), 0.05)
    out: list[str] = []
    full = loss(model, batches()).nats
    while True:
        costs = {n: without(model, [*out, n]) for n in candidates(model) if n not in out}
        best = min(costs, key=costs.get)
        if costs[best] > full + 0.05:
            break
        out.append(best)
    assert 1 < len(out) < 6, "the budget decides nothing"
    assert trials.out == out and trials.current == pytest.approx(without(model, out), abs=1e-6)


def test_a_budget_is_kept_and_the_table_tells(capsys):
    model = different()
    before = loss(model, batches()).nats
    pruned = prune(model, batches(), loss_budget=0.05)
    assert pruned.loss_before == before and pruned.loss_after <= before + 0.05
    assert loss(model, batches()).nats == pruned.loss_after
    assert len(pruned.dropped) == sum(row.is_dropped for row in pruned.rows)
    assert pruned.after.num_parameters == model.num_parameters() < pruned.before.num_parameters
    attentions = sum("attention" in name for name in pruned.dropped)
    assert pruned.after.cache_bytes == (3 - attentions) * 2 * 16 * 4
    assert pruned.before.cache_bytes == 3 * 2 * 16 * 4
    out = capsys.readouterr().err
    for row in pruned.rows:
        line = next(text for text in out.splitlines() if text.startswith(row.name))
        assert f"{row.loss_change:+.5f}" in line and ("dropped" in line) == row.is_dropped
    assert f"cache {pruned.before.cache_bytes:,} -> {pruned.after.cache_bytes:,} bytes" in out
    with pytest.raises(UserError, match="no sublayer can go within a loss budget of 1e-09"):
        prune(different(), batches(), 0.01, loss_budget=1e-9)


def test_both_limits_and_whole_layers():
    model = different()
    limit = sorted(shares(model, batches()).values())[2]
    pruned = prune(copy.deepcopy(model), batches(), limit, loss_budget=10.0)
    assert len(pruned.dropped) == 2 and all(pruned.shares[n] < limit for n in pruned.dropped)
    whole = prune(model, batches(), loss_budget=0.02, unit="layer")
    assert whole.removed_layers and len(whole.dropped) == 2 * len(whole.removed_layers)
    assert [row.name for row in whole.rows if row.is_dropped] and len(whole.rows) == 3
    assert model.config.connection_overrides == ()


def test_a_budget_on_a_patched_decoder(tiny, tmp_path):
    model = patch(tiny.build("llama", num_hidden_layers=3), "rezero")
    with torch.no_grad():
        for number, module in enumerate(connections(model).values()):
            module.alpha.fill_(0.5 * number)
    pruned = prune(model, batches(), loss_budget=0.02)
    assert pruned.dropped and not pruned.still_computed
    loaded = load(save_pretrained(model, tmp_path))
    assert loss(loaded, batches()).nats == pruned.loss_after <= pruned.loss_before + 0.02


def test_layers_in_front_are_not_computed_again():
    model = different()
    trials = trials_of(model)
    calls = [0, 0, 0]
    for index, layer in enumerate(model.layers):
        # a replayed layer still calls its hooks; its norm is only reached when it is computed
        def count(module, args, index=index):
            calls[index] += 1

        layer.input_layernorm.register_forward_pre_hook(count)
    trials.without("layers.2.mlp_connection")
    assert calls == [0, 0, len(batches())]
    trials.without("layers.1.mlp_connection")
    assert calls == [0, len(batches()), 2 * len(batches())]


def test_too_much_to_keep_is_computed(monkeypatch):
    from skipless.surgery.slimming import trials

    expected = trials_of(different()).alone()
    monkeypatch.setattr(trials, "KEPT_BYTES", 10)
    found = trials_of(different())
    assert found._kept.outputs == {} and found.alone() == expected


def test_layers_stay_where_their_number_or_a_norm_counts():
    model = ours(temperature=TemperatureConfig(beta=1.1))
    assert prune(model, batches()).removed_layers == () and len(model.layers) == 3
    assert not list(model.layers[1].parameters()), "the layer is there and holds nothing"


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
    with pytest.raises(UserError, match="stays below 1e-09 for every token; the nearest is layers"):
        prune(ours(), batches(), tolerance=1e-9)
    with pytest.raises(UserError, match="share of the stream stays below 1e.09; nothing would"):
        prune(ours(), batches(), tolerance=1e9)
    with pytest.raises(UserError, match="covers every sublayer"):
        prune(ours(), batches(), loss_budget=1e9)
    for value in (0, -1, math.nan, math.inf):
        with pytest.raises(UserError, match="tolerance is"):
            prune(ours(), batches(), tolerance=value)
        with pytest.raises(UserError, match="loss_budget is .* nats a token was expected"):
            prune(ours(), batches(), loss_budget=value)
    with pytest.raises(UserError, match="no batch"):
        prune(ours(), [])
    spent = iter(batches())
    list(spent)
    with pytest.raises(UserError, match="iterator that was read before"):
        prune(ours(), spent)
    with pytest.raises(UserError, match=r"patch\(model, 'residual'\) first"):
        prune(tiny.build("llama"), batches())
    free = Transformer(dataclasses.replace(BASE, connection=ConnectionConfig(kind="none")))
    with pytest.raises(UserError, match="has no sublayer to drop"):
        prune(free, batches())
    with pytest.raises(UserError, match="unit is 'block'"):
        prune(ours(), batches(), unit="block")
    with pytest.raises(UserError, match="no layer can go as a whole"):
        prune(patch(tiny.build("llama"), "rezero", sites="mlp"), batches(), unit="layer")


def test_losses_that_are_not_finite():
    broken = ours()
    with torch.no_grad():
        broken.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    untouched = copy.deepcopy(broken.state_dict())
    with pytest.raises(UserError, match=r"layers.0.mlp.up_proj.weight is nan at \[0, 0\]"):
        prune(broken, batches(), loss_budget=0.1)
    assert broken.state_dict().keys() == untouched.keys()
    with pytest.raises(UserError, match="the loss of the model as it is, is nan"):
        prune(ours(), batches(), loss_budget=0.1, loss=lambda m, b: math.nan)
    values = itertools.chain([1.0], itertools.repeat(math.nan))
    with pytest.raises(UserError, match="no sublayer can go"):
        prune(ours(), batches(), loss_budget=0.1, loss=lambda m, b: next(values))


def test_what_has_no_skip_stays_and_the_rest_may_go(tiny):
    rule = dataclasses.replace(BASE.connection, kind="none", init=None)
    from skipless.config import ConnectionOverride

    override = ConnectionOverride(connection=rule, layers=(0,), sublayer="mlp")
    model = ours(connection_overrides=(override,))
    pruned = prune(model, batches(), tolerance=1e9)
    assert len(pruned.dropped) == 5 and pruned.removed_layers == ("layers.1", "layers.2")
    assert model.config.connection_at(0, "mlp").kind == "none"
    sites = patch(tiny.build("llama"), "rezero", sites="mlp")
    assert len(prune(sites, batches(), tolerance=1e9).dropped) == 2
    assert set(layer_names(sites).values()) == {"model.layers.0", "model.layers.1"}
