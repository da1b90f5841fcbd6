"""transformers' Trainer with our optimisers, callbacks and models, interrupted and resumed."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from skipless.config import OptimizerRecipe
from skipless.errors import UserError
from skipless.hf.training import QuantizedTraining, TrainingProgress, trainer_optimizer
from skipless.probes.hosts import trainer_callback
from skipless.quant import quantization

from .hf_models import build, ids

STEPS, CUT = 30, 15
ROWS = [{"input_ids": row, "labels": row} for row in ids(40, 12, seed=8) % 7]


class Interrupt(TrainerCallback):
    """Ctrl-C behind the checkpoint."""

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == CUT:
            raise KeyboardInterrupt


class Watch(TrainerCallback):
    """What the model was while a step computed."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = kwargs["model"]
        gain = next(iter(model.gains().values())).item()
        layer = model.model.layers[0].mlp.up_proj
        self.seen.append((gain, getattr(getattr(layer, "_skipless_trained", None), "bits", None)))


def trainer(folder, recipe, *callbacks, plan=None, **options):
    """30 steps of a model whose skips fade, with dropout, probes and perhaps rounding."""
    model = build(
        {"kind": "anneal", "anneal_fraction": 0.6}, dropout=0.1, num_hidden_layers=2,
        **options,
    ).train()  # fmt: skip
    model.set_training_progress(0.0)
    rounding = [QuantizedTraining(plan)] if plan else []
    probes = trainer_callback(folder / "probes", every=10, stats=("moments", "geometry"))
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4,
            use_cpu=True, report_to="none", save_steps=CUT, logging_steps=1, disable_tqdm=True,
            seed=0, lr_scheduler_type="cosine", warmup_steps=3, gradient_accumulation_steps=2,
        ),
        train_dataset=ROWS,
        optimizer_cls_and_kwargs=trainer_optimizer(recipe),
        callbacks=[TrainingProgress(), *rounding, probes, *callbacks],
    )  # fmt: skip


def losses(run):
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def rows(folder):
    found = [json.loads(line) for line in (folder / "probes/probes.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in found}


@pytest.mark.parametrize(
    ("name", "plan"),
    [("muon", None), ("soap", None), ("kl_shampoo", "W4A6 scope=block from=0.2 over=0.5")],
)
def test_an_interrupted_training_goes_on_bit_for_bit(name, plan, tmp_path):
    recipe = OptimizerRecipe(name=name, lr=3e-3, adamw_lr=3e-3, refresh_every=4)
    watch = Watch()
    straight = trainer(tmp_path / "a", recipe, watch, plan=plan)
    straight.train()
    assert straight.state.global_step == STEPS
    assert losses(straight)[-1] < losses(straight)[0] - 0.1
    assert straight.optimizer.param_groups[0]["lr"] < 1e-4  # the schedule of the arguments

    gains, bits = zip(*watch.seen, strict=True)
    assert gains == pytest.approx([max(1 - step / STEPS / 0.6, 0) for step in range(STEPS)])
    assert next(iter(straight.model.gains().values())).item() == 0.0
    if plan:
        assert bits[:6] == (None,) * 6 and bits[7] == 8 and bits[-1] == 4
        assert sorted({b for b in bits if b}) == [4, 5, 6, 7, 8]

    cut = trainer(tmp_path / "b", recipe, Interrupt(), plan=plan)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    for callback in cut.callback_handler.callbacks:
        if hasattr(callback, "close"):
            callback.close()
    again = trainer(tmp_path / "b", recipe, plan=plan, seed=9)  # another start, to be replaced
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(straight) and len(losses(again)) == STEPS
    for (key, a), (_, b) in zip(
        straight.model.state_dict().items(), again.model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), key
    first, second = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert list(first) == list(second) == [1, 10, 20, 30] and first == second


def test_every_parameter_has_its_role_and_gains_do_not_decay(tmp_path):
    recipe = OptimizerRecipe(name="muon", lr=1e-2, weight_decay=0.3)
    run = trainer(tmp_path, recipe)
    run.create_optimizer()
    groups = {group["role"]: group for group in run.optimizer.param_groups}
    assert groups["matrix"]["algorithm"] == "muon" and groups["matrix"]["weight_decay"] == 0.3
    assert groups["embedding"]["algorithm"] == "adamw"
    assert groups["norm"]["weight_decay"] == 0.0
    held = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in run.model.parameters()}


def test_quantised_training_ends_quantised_where_asked(tmp_path):
    recipe = OptimizerRecipe(lr=1e-3)
    run = trainer(tmp_path, recipe, QuantizedTraining("W8A8", finish=True))
    run.args.max_steps = 2
    run.train()
    record = quantization(run.model)
    assert record is not None and "W8A8" in record.describe()
    run.model.eval()
    with torch.no_grad():
        assert run.model(ids()).logits.isfinite().all()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UserError, match="takes an OptimizerRecipe"):
        trainer_optimizer("muon")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="W4A16 for 16-bit"):
        QuantizedTraining("W4")
    plain = torch.nn.Linear(2, 2)
    state = type("State", (), {"global_step": 0, "max_steps": 4})()
    with pytest.raises(UserError, match="Linear has no skipless connection"):
        TrainingProgress().on_train_begin(None, state, None, model=plain)
