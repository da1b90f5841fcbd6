"""Illnesses of training, each brought about by training, and a healthy twin without a finding."""

import dataclasses
import math

import pytest
import torch

from skipless.config import ConnectionConfig
from skipless.doctor import Evidence, Unchecked, check_model, examine, training
from skipless.doctor.records import from_log, from_run
from skipless.jsonable import override
from skipless.probes.callbacks import ProbeLog

from .illnesses import IDS, Chain, Regression, decoder

STEPS = {
    "train.num_tokens": "2560", "probe.every": "0", "probe.trace_every": "4",
    "train.eval_every": "0", "train.checkpoint_every": "0", 
    "optim.name": "adamw", "optim.lr": "3e-3", "optim.adamw_lr": "none",
    "model.connection.kind": "residual", "model.init.identity_bias": "none",
    "model.init.value_output": "normal", "model.init.query_key": "normal",
    "model.init.mlp": "normal",
}  # fmt: skip
"""40 steps of a residual model with AdamW."""
AVERAGING = {
    "model.connection.kind": "none", "model.init.value_output": "haar", "model.init.mlp": "suo",
    "model.init.query_key": "haar", "model.init.a_qk": "0.9", "model.temperature.beta": "8.0",
    "model.num_hidden_layers": "4", "optim.adamw_lr": "2e-2", "train.num_tokens": "5120",
}  # fmt: skip
"""Deep attention that averages all tokens, so that nothing of the context is left."""


@pytest.fixture(scope="module")
def trained(tiny_config, text_file, tmp_path_factory):
    """`trained(settings)`: the evidence of a run of 40 steps."""
    from skipless.data import prepare
    from skipless.train import train

    data = prepare(tiny_config.data, 300, cache_dir=text_file.parent / "cache")
    kept = {}

    def run(settings=None):
        key = tuple(sorted((settings or {}).items()))
        if key not in kept:
            path = tmp_path_factory.mktemp("sick") / "run"
            train(override(tiny_config, {**STEPS, **(settings or {})}), path, data=data)
            kept[key] = from_run(path)
        return kept[key]

    return run


def test_a_model_that_sees_no_context_stands_at_the_unigram_level(trained):
    sick = trained(AVERAGING)
    found = training.flat_at_unigram(sick)
    assert found is not None and "token frequencies" in found.symptom, sick.losses[-3:]
    assert abs(found.numbers["loss"] - found.numbers["unigram"]) < training.MARGIN
    assert training.flat_at_unigram(trained({"train.num_tokens": "5120"})) is None
    start = "without skips start with model.init.identity_bias=5, model.temperature.beta=1, "
    assert found.remedy.startswith(f"{start}model.connection.kind=anneal; ")
    has = {"model.init.identity_bias": 5.0, "model.connection.kind": "anneal"}
    sick = dataclasses.replace(sick, settings=sick.settings | has)
    remedy = training.flat_at_unigram(sick).remedy
    assert remedy.startswith("without skips start with model.temperature.beta=1; ")
    sick = dataclasses.replace(sick, settings=sick.settings | {"model.temperature.beta": 1.0})
    assert "a skip that stays" in training.flat_at_unigram(sick).remedy


def test_a_learning_rate_too_low_starts_slowly(trained):
    found = training.slow_start(trained({"optim.lr": "1e-6"}))
    assert found is not None and "was not reached by step 40" in found.evidence
    assert "optim.lr" in found.remedy
    assert isinstance(training.flat_at_unigram(trained({"optim.lr": "1e-6"})), Unchecked)
    assert training.slow_start(trained()) is None


def test_a_warm_up_as_long_as_the_run_starts_slowly_and_is_named(trained):
    found = training.slow_start(trained({"optim.lr": "3e-4", "train.warmup_steps": "40"}))
    assert found is not None and "warm-up" in found.cause
    assert found.remedy == "train.warmup_steps=5"


@pytest.mark.parametrize(
    ("scale", "act", "word"), [(0.3, torch.tanh, "vanish"), (5.0, torch.sin, "explode")]
)
def test_gradients_that_change_by_orders_of_magnitude_with_depth(scale, act, word):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    sick = check_model(Chain(scale, act), x, loss=lambda y: y.square().mean())
    found = sick.findings["gradients by depth"]
    assert word in found.symptom and found.numbers["ratio"] > training.DEPTH_RATIO
    well = check_model(Chain(1.2), x, loss=lambda y: y.square().mean())
    assert "gradients by depth" in well.healthy


def test_the_traced_gradients_of_a_run_are_judged_by_their_median(trained):
    well = trained({"model.num_hidden_layers": "3"})
    assert len(well.gradients) > 3 and training.gradients_by_depth(well) is None
    first = (1, {0: 1e-9, 1: 1.0, 2: 1.0})
    once = Evidence(name="", gradients=(first, *well.gradients))
    assert training.gradients_by_depth(once) is None
    found = training.gradients_by_depth(Evidence(name="", gradients=(first,)))
    assert found.remedy == (
        "model.init.value_output=haar (I2) and model.init.mlp=suo (I4), or a skip again "
        "(model.connection.kind=anneal or model.connection.kind=rezero); keep "
        "model.norm_placement=pre"
    )
    has = {"model.init.value_output": "haar", "model.init.mlp": "suo",
           "model.connection.kind": "anneal", "model.norm_placement": "pre"}  # fmt: skip
    found = training.gradients_by_depth(Evidence(name="", gradients=(first,), settings=has))
    assert found.remedy == "a skip again (model.connection.kind=rezero)"


def gain_log(path, lr: float, steps: int = 24) -> Evidence:
    """A gain learned by plain gradient descent: the loss is (3 - gain)^2 times about 1."""
    model = Regression()
    optimizer = torch.optim.SGD([model.gain], lr=lr)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = 3 * model.inner(x)
        unit = float(model.inner(x).square().mean())
    log = ProbeLog(model, path, every=1)
    for step in range(1, steps + 1):
        with log.step(step) as row:
            loss = (model(x) - y).square().mean() / unit
            loss.backward()
            row["loss"] = loss
        optimizer.step()
        optimizer.zero_grad()
    log.close()
    return from_log(path)


@pytest.mark.parametrize(("lr", "symptom"), [(0.97, "swings"), (1e-6, "do not move"), (0.1, None)])
def test_gains_that_swing_or_stand_still(tmp_path, lr, symptom):
    found = training.gains(gain_log(tmp_path, lr))
    assert found is None if symptom is None else symptom in found.symptom
    if symptom:
        assert "join.b" in found.evidence and "optim.gain_lr" in found.remedy


def test_gains_of_a_run(trained):
    rezero = {"model.connection.kind": "rezero"}
    stuck = training.gains(trained({**rezero, "optim.gain_lr": "1e-7"}))
    assert stuck is not None and "do not move" in stuck.symptom
    assert training.gains(trained({**rezero, "optim.gain_lr": "1e-2"})) is None
    plain = training.gains(trained())
    assert isinstance(plain, Unchecked) and "learned gains" in plain.needs


def test_branches_a_thousand_times_too_large_drown_the_trunk_in_the_gates_gradients():
    well = decoder(connection=ConnectionConfig(kind="rezero"))
    assert "gate gradients" in check_model(well, IDS).healthy
    sick = decoder(connection=ConnectionConfig(kind="rezero"))
    with torch.no_grad():
        for block in sick.blocks:
            block.mlp.down_proj.weight.mul_(1000)
    found = check_model(sick, IDS).findings["gate gradients"]
    assert found.numbers["gates"] > training.GATE_RATIO * found.numbers["trunk"]
    assert "gate gradients" not in check_model(decoder(), IDS).healthy  # it has none


@pytest.mark.parametrize("rule", ["learning beyond token frequencies", "start of training",
                                  "gradients by depth", "gains", "gate gradients"])  # fmt: skip
def test_without_evidence_a_rule_is_not_healthy(rule):
    found = examine(Evidence(name="nothing"))
    assert rule in found.unchecked and rule not in found.healthy and not found.findings


def test_a_short_or_continued_curve_is_no_slow_start():
    curve = tuple((float(s), 3.0) for s in range(1, 41))
    assert training.slow_start(Evidence(name="", unigram=2.9, losses=curve, num_steps=40)) is None
    short = training.slow_start(Evidence(name="", unigram=2.9, losses=curve[:9], num_steps=40))
    assert isinstance(short, Unchecked)
    far = Evidence(name="", unigram=1.0, losses=curve[:30], num_steps=4000)
    assert isinstance(training.slow_start(far), Unchecked)  # 500 steps are allowed
    assert math.isclose(training._swing(curve), 0)


def test_steps_that_know_other_layers_are_not_compared():
    of_others = ((1, {0: 1.0, 1: 1.0, 2: 1.0}), (2, {3: 1.0, 4: 1e-9, 5: 1.0}))
    found = training.gradients_by_depth(Evidence(name="frozen in turns", gradients=of_others))
    assert isinstance(found, Unchecked) and "same 3 layers" in found.needs


def test_a_row_without_a_step_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"gains": {"a": 1.0}}\n{"step": 1, "loss": 2.0}\n')
    found = from_log(tmp_path)
    assert not found.gains and found.losses == ((1.0, 2.0),)
