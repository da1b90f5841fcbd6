"""convert: skips go to exactly 0, the model keeps up, work is resumed, mistakes are told."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from skipless.errors import UserError
from skipless.evaluate import loss
from skipless.surgery import connections, load, patch
from skipless.surgery.conversion.converting import convert
from skipless.surgery.conversion.results import Conversion
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.surgery.conversion.skips import untrained_curves

from .sequences import batches

SHORT = ConversionConfig(steps_per_stage=6, fit_batches=4, lr=3e-3, warmup_steps=1)


HELD_OUT = batches(first=1000, count=3)


def logits(model):
    with torch.no_grad():
        return model(HELD_OUT[0]).logits


def assert_same_weights(model, other):
    found, expected = model.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("start", ["fit", "anneal"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_skips_go_to_nothing_and_the_model_keeps_up(trained, family, start, tmp_path):
    model, seen = trained(family), []
    config = dataclasses.replace(SHORT, start=start, steps_per_stage=10)

    def watch(info):
        seen.append([float(c.gains()["a"]) for c in connections(model).values()])

    found = convert(model, batches(), HELD_OUT, config, folder=tmp_path / "out", on_step=watch)
    assert seen[-1] == [0, 0, 0, 0] and seen[0][:3] == [1, 1, 1]
    assert seen[0][3] == pytest.approx(0 if start == "fit" else 0.8)
    assert [c.config.kind for c in connections(model).values()] == ["none"] * 4
    assert [(row.num_removed, row.share) for row in found.stages] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)
    ]  # fmt: skip
    last, control = found.stages[-1], found.untrained[-1]
    assert last.increase < 0.8 * control.increase and last.kl > 0
    assert last.loss == pytest.approx(loss(model, HELD_OUT).nats, rel=1e-6)
    assert last.increase == pytest.approx(last.loss - found.loss)
    # The same weights in a plain model with kind none there: what load gives as well.
    plain = trained(family)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(patch(plain, "none")), logits(model))
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))
    record = json.loads((tmp_path / "out" / "convert.json").read_text())
    assert Conversion.from_dict(record) == found and found.finished
    assert not {"checkpoint", "partial"} & set(os.listdir(tmp_path / "out"))


def test_the_control_is_the_patch_without_training(trained):
    model = trained("llama")
    found = untrained_curves(model, HELD_OUT, points=4)
    assert list(found) == ["attention", "mlp", "all"] and not connections(model)
    assert torch.equal(logits(model), logits(trained("llama")))
    by_hand = loss(patch(trained("llama"), "none", sites="mlp", layers=-1), HELD_OUT).nats
    assert found["mlp"][1].loss == pytest.approx(by_hand, rel=1e-6)
    assert found["all"][0].increase == 0 and found["all"][-1].share == 1
    both = loss(patch(trained("llama"), "none"), HELD_OUT).nats
    assert found["all"][-1].increase == pytest.approx(both - found["all"][0].loss, rel=1e-5)


def test_cheapest_first_and_by_branch(trained):
    names = {}
    for order in ("last-first", "first-first", "by-share", "by-loss"):
        config = dataclasses.replace(SHORT, order=order, steps_per_stage=0, skips_per_stage=0)
        found = convert(trained("llama"), batches(), HELD_OUT, config)
        assert len(found.stages) == 1 and found.stages[0].grad_norm is None
        names[order] = found.order
    assert names["first-first"] == names["last-first"][::-1]
    alone = {}
    for name in names["by-loss"]:
        layer, site = name.split(".")[2:4]
        model = patch(trained("llama"), "none", sites=site.split("_")[0], layers=int(layer))
        alone[name] = loss(model, HELD_OUT).nats
    assert list(names["by-loss"]) == sorted(alone, key=alone.__getitem__)
    assert set(names["by-share"]) == set(alone)


@pytest.mark.parametrize("start", ["fit", "anneal"])
def test_interrupted_and_resumed_is_bit_for_bit_the_same(trained, start, tmp_path):
    config = dataclasses.replace(
        SHORT, start=start, skips_per_stage=2, train="layers", loss_budget=50.0
    )
    straight = trained("llama")
    expected = convert(straight, batches(), HELD_OUT, config, folder=tmp_path / "straight")

    def interrupt(info):
        if (info["stage"], info["step"]) in ((0, 2), (1, 3)):
            os.kill(os.getpid(), signal.SIGINT)

    def crash(info):
        if (info["stage"], info["step"]) == (1, 1):
            raise RuntimeError("power cut")

    for number, (watch, error) in enumerate(
        [(interrupt, KeyboardInterrupt), (crash, RuntimeError), (interrupt, KeyboardInterrupt)]
    ):
        with pytest.raises(error):
            convert(trained("llama"), batches(), HELD_OUT, config, folder=tmp_path / "out",
                    on_step=watch)  # fmt: skip
        inside = (tmp_path / "out" / "partial").exists()
        assert inside == (number != 1)
    resumed = trained("llama")
    found = convert(resumed, batches(), HELD_OUT, config, folder=tmp_path / "out")
    assert_same_weights(resumed, straight)

    def untimed(result):
        return [dataclasses.replace(row, seconds=0.0) for row in result.stages]

    assert untimed(found) == untimed(expected) and found.untrained == expected.untrained
    assert torch.equal(logits(load(tmp_path / "out")), logits(straight))


def test_a_stage_beyond_the_budget_is_undone(trained, tmp_path):
    free = convert(trained("llama"), batches(), HELD_OUT, SHORT)
    costs = [row.increase for row in free.stages]
    worst = max(range(1, 4), key=lambda i: costs[i] - max(costs[:i]))
    budget = (max(costs[:worst]) + costs[worst]) / 2
    model = trained("llama")
    config = dataclasses.replace(SHORT, loss_budget=budget)
    found = convert(model, batches(), HELD_OUT, config, folder=tmp_path / "out")
    assert [row.kept for row in found.stages] == [True] * worst + [False]
    assert len(connections(model)) == worst == len(found.converted)
    good = loss(model, HELD_OUT).nats
    assert good == pytest.approx(found.stages[worst - 1].loss, rel=1e-6)
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))

    nothing = trained("llama")
    config = dataclasses.replace(SHORT, loss_budget=0.0, lr=1.0)
    found = convert(nothing, batches(), HELD_OUT, config, folder=tmp_path / "none")
    assert not found.converted and not connections(nothing) and found.finished
    assert_same_weights(nothing, trained("llama"))
    assert not (tmp_path / "none" / "config.json").exists()


def test_only_the_layers_that_lost_a_skip_learn(trained):
    model = trained("llama")
    config = dataclasses.replace(SHORT, layers=(-1,), train="layers")
    convert(model, batches(), HELD_OUT, config)
    for name, value in trained("llama").state_dict().items():
        changed = not torch.equal(model.state_dict()[name], value)
        assert changed == ("layers.1." in name), name
    assert all(p.requires_grad for p in model.parameters())


def test_further_skips_of_a_converted_model(trained):
    model, original = trained("llama"), trained("llama")
    first = dataclasses.replace(SHORT, sites=("mlp",), layers=(-1,))
    convert(model, batches(), HELD_OUT, first)
    with pytest.raises(UserError, match="patched already"):
        convert(model, batches(), HELD_OUT, first)
    assert len(connections(model)) == 1
    second = dataclasses.replace(SHORT, sites=("mlp",), layers=(0,))
    found = convert(model, batches(), HELD_OUT, second, teacher=original)
    assert found.already == 1 and found.stages[-1].num_removed == 2
    assert [c.config.kind for c in connections(model).values()] == ["none", "none"]


def test_other_models_need_a_loss(tiny):
    for family in ("bert", "vit"):
        data = [tiny.inputs(family)]
        with pytest.raises(UserError, match="no causal language model; pass loss="):
            convert(tiny.build(family), data, data, SHORT)

        def measure(model, held_out):
            with torch.no_grad():
                return float(tiny.logits(model, held_out[0]).square().mean())

        model = tiny.build(family)
        config = dataclasses.replace(SHORT, sites=("mlp",), layers=(-1,))
        found = convert(model, data * 2, data, config, loss=measure)
        assert found.num_tokens is None and found.stages[0].standard_error is None
        assert found.stages[0].loss == measure(model, data)
        with pytest.raises(UserError, match="never called the model"):
            convert(tiny.build(family), data * 2, data, config, loss=lambda model, _: 1.0)


def test_mistakes_are_one_sentence(trained, tiny, tmp_path):
    model = trained("llama")
    for changes, said in [
        ({"layers": (7,)}, "layer 7 is out of range"),
        ({"sites": ("cross_attention",)}, "has no cross_attention"),
        ({"stacks": ("encoder",)}, "no stack of layers matches"),
    ]:
        with pytest.raises(UserError, match=said):
            convert(model, batches(), HELD_OUT, dataclasses.replace(SHORT, **changes))
    for changes, said in [
        ({"order": "last"}, "convert.order is 'last'"),
        ({"start": "fitted"}, "convert.start is 'fitted'"),
        ({"lr": 0.0}, "convert.lr is 0.0"),
        ({"fit_batches": 1}, "convert.fit_batches is 1"),
        ({"distill": 0.0}, "both 0"),
        ({"loss_budget": -1.0}, "convert.loss_budget is -1.0"),
        ({"anneal_fraction": 0.0}, "convert.anneal_fraction is 0.0"),
    ]:
        with pytest.raises(UserError, match=said):
            dataclasses.replace(SHORT, **changes)
    with pytest.raises(UserError, match="no batch to train on"):
        convert(model, [], HELD_OUT, SHORT)
    with pytest.raises(UserError, match="no token to predict"):
        convert(model, batches(), [], SHORT)
    with pytest.raises(UserError, match="does not end in a linear layer"):
        convert(tiny.build("mixtral"), batches(), HELD_OUT, SHORT)
    with pytest.raises(UserError, match="weights in 16 bits"):
        convert(tiny.build("llama").to(torch.bfloat16), batches(), HELD_OUT, SHORT)
    with pytest.raises(UserError, match="is frozen"):
        convert(tiny.build("llama").requires_grad_(False), batches(), HELD_OUT, SHORT)
    assert not connections(model) and torch.equal(logits(model), logits(trained("llama")))

    partly = trained("llama").requires_grad_(False)
    partly.model.norm.requires_grad_(True)
    with pytest.raises(UserError, match="ends the branch of model.layers.0.attention_connection"):
        convert(partly, batches(), HELD_OUT, SHORT)
    assert not connections(partly) and torch.equal(logits(partly), logits(model))
    convert(partly, batches(), HELD_OUT, dataclasses.replace(SHORT, start="anneal"))
    learned = [p for p in partly.parameters() if p.requires_grad]
    assert len(learned) == 1 and not torch.equal(learned[0], model.model.norm.weight)

    out = tmp_path / "out"
    broken = dataclasses.replace(SHORT, lr=1e30, train="layers")
    with pytest.raises(UserError, match=r"stage 1, step \d: the loss is"):
        convert(trained("llama"), batches(), HELD_OUT, broken, folder=out)
    with pytest.raises(UserError, match=r"other settings \(lr is 1e\+30 there and 0.003 here\)"):
        convert(trained("llama"), batches(), HELD_OUT,
                dataclasses.replace(broken, lr=3e-3), folder=out)  # fmt: skip
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        convert(model, batches(), HELD_OUT, SHORT, folder=tmp_path / "taken")
