"""Settings: JSON both ways, overrides by dotted name, errors that name the value."""

import inspect
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless import recipes
from skipless.checks import CONNECTION_KINDS
from skipless.cli.arguments import read_config
from skipless.config import (
    ConnectionConfig,
    ConnectionOverride,
    EvaluateConfig,
    InitConfig,
    ModelConfig,
    OptimizerRecipe,
    RunConfig,
    TemperatureConfig,
    TrainConfig,
    UniversalConfig,
)
from skipless.errors import UserError, suggestion
from skipless.jsonable import from_json, giving, leaves, override, to_json
from skipless.model import CONNECTIONS


@pytest.mark.parametrize("name", recipes.names())
def test_json_round_trip_of_every_recipe(name):
    config = recipes.get(name)
    assert from_json(RunConfig, to_json(config)) == config


@settings(deadline=None)  # a busy machine is no failure
@given(
    lr=st.floats(1e-8, 10),
    beta=st.floats(0, 0.999),
    tokens=st.integers(1, 10**12),
    kind=st.sampled_from(["residual", "none", "anneal", "rezero"]),
)
def test_override_from_text_equals_the_value(lr, beta, tokens, kind):
    new = override(
        RunConfig(),
        {
            "optim.lr": repr(lr),
            "optim.betas": f"{beta!r},0.5",
            "train.num_tokens": str(tokens),
            "model.connection.kind": kind,
        },
    )
    assert new.optim.lr == lr
    assert new.optim.betas == (beta, 0.5)
    assert new.train.num_tokens == tokens
    assert new.model.connection.kind == kind


def test_override_keeps_everything_else():
    before, after = RunConfig(), override(RunConfig(), {"train.batch_size": "3"})
    changed = {k for k, v in leaves(after).items() if leaves(before)[k] != v}
    assert changed == {"train.batch_size"}


def test_changes_that_only_fit_together_are_applied_together():
    new = override(RunConfig(), {"model.hidden_size": "66", "model.num_attention_heads": "3"})
    assert new.model.head_dim == 22


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optim.lrr", "1", "did you mean 'optim.lr'"),
        ("train.batch_size", "many", "'many'"),
        ("train.batch_size", "2.5e0", "'2.5e0'"),
        ("train.batch_size", "0", "at least 1"),
        ("train.schedule", "cos", "'cosine'"),
        ("model.connection.kind", "residul", "did you mean 'residual'"),
        ("model.num_attention_heads", "7", "not divisible"),
        ("optim.betas", "0.9", "optim.betas"),
        ("train.compile", "maybe", "bool"),
        ("train.sequence_length", "100000", "max_position_embeddings"),
        ("train.max_grad_norm", "-1", "positive and finite, or none"),
        ("train.max_grad_norm", "0", "positive and finite, or none"),
        ("train.max_grad_norm", "nan", "positive and finite, or none"),
        ("train.eval_tokens", "0", "at least 1"),
        ("train.keep_checkpoints", "0", "at least 1"),
        ("train.eval_every", "-1", "at least 0"),
        ("train.checkpoint_every", "-1", "at least 0"),
        ("train.warmup_steps", "-5", "at least 0"),
        ("train.min_lr_ratio", "-1", "in [0, 1]"),
        ("train.decay_fraction", "3", "in [0, 1]"),
        ("train.num_threads", "-1", "from 1 to"),
        ("train.num_threads", "0", "from 1 to"),
        ("train.micro_batch_size", "99", "from 1 to 8, or none"),
        ("train.seed", "1000000000000000000", "from 0 to"),
        ("train.device", "meta", "use auto, cpu"),
        ("train.device", "cuda:x", "use auto, cpu"),
        ("optim.lr", "inf", "positive and finite"),
        ("optim.adamw_lr", "-1", "finite and at least 0, or none"),
        ("optim.adamw_lr", "nan", "finite and at least 0, or none"),
        ("optim.gain_lr", "-1", "finite and at least 0, or none"),
        ("optim.gain_weight_decay", "-3", "finite and at least 0"),
        ("optim.weight_decay", "nan", "finite and at least 0"),
        ("optim.eps", "-1", "finite and at least 0"),
        ("optim.betas", "0.9,2", "two decays in [0, 1)"),
        ("optim.adamw_betas", "nan,0.9", "two decays in [0, 1)"),
        ("optim.block_size", "0", "at least 1, or none"),
        ("optim.momentum", "2", "in [0, 1)"),
        ("optim.muon_steps", "0", "at least 1"),
        ("optim.refresh_every", "0", "at least 1"),
        ("optim.update_rms", "0", "positive and finite, or none"),
        ("optim.start", "published", "kl_shampoo"),
        ("optim.reference", "true", "kl_shampoo"),
        ("model.num_key_value_heads", "-2", "at least 1, or none"),
        ("model.num_key_value_heads", "0", "at least 1, or none"),
        ("model.intermediate_size", "-5", "at least 1, or none"),
        ("model.intermediate_size", "0", "at least 1, or none"),
        ("model.num_labels", "1", "at least 2, or none"),
        ("model.dropout", "2", "in [0, 1)"),
        ("model.attention_dropout", "nan", "in [0, 1)"),
        ("model.norm_eps", "-1", "at least 0"),
        ("model.rope_theta", "0", "positive"),
        ("model.rope_theta", "-3", "positive"),
        ("model.temperature.beta", "inf", "positive and finite"),
        ("model.init.std", "-0.1", "positive"),
        ("model.init.a_vo", "nan", "positive"),
        ("model.connection.init", "nan", "a finite number, or none"),
        ("model.connection.anneal_fraction", "0", "in (0, 1]"),
        ("model.connection.a", "0.5", "a is 0.5, which kind 'residual' does not read"),
        ("model.connection.universal.rank", "4", "or take kind universal"),
        ("model.connection.kind", "fixed", "which is the plain skip; set a, b or c"),
        (
            "model.connection_overrides",
            '[{"connection": {"kind": "none", "init": 0.1}}]',
            "connection_overrides[0].connection.init is 0.1",
        ),
        ("model.connection_overrides", '[{"connection": {"kind": "fixed"}}]', "the plain skip"),
        ("data.sources", "", "is empty"),
        ("data.sources", "kjv,kjv", "twice"),
        ("data.held_out_fraction", "1", "in (0, 1)"),
        ("data.tokenizer", "", "at least one character"),
        ("data.text_key", "", "at least one character"),
        ("probe.every", "-1", "at least 0"),
        ("probe.num_tokens", "0", "at least 1"),
        ("probe.final_tokens", "0", "at least 1"),
        ("probe.stats", "foo", "known values: attention, geometry, moments"),
        ("probe.stats", "geometry", "add moments"),
        ("probe.stats", "", "is empty"),
        ("evaluate.schemes", "W8", "evaluate.schemes: 'W8' does not say"),
        ("evaluate.schemes", "", "is empty"),
        ("evaluate.schemes", "W8A8,W8A8-clip:absmax", "the same"),
        ("evaluate.scopes", "linear,linear", "twice"),
        ("evaluate.error_scheme", "junk", "evaluate.error_scheme: 'junk' is not"),
        ("evaluate.error_scheme", "W4Afp", "no error can be followed"),
        ("evaluate.num_tokens", "0", "at least 1"),
        ("evaluate.sample_tokens", "-1", "at least 0"),
        ("evaluate.prompt", "", "at least one character"),
        ("model.connection_overrides", "[{}]", "connection_overrides[0].connection is missing"),
        ("evaluate.prompt", "\ud800", "surrogate"),
        ("evaluate.prompt", "caf\udce9", "holds the byte 0xe9 at character 3, which is not UTF-8"),
    ],
)
def test_bad_overrides_are_told_in_one_sentence(name, value, said):
    with pytest.raises(UserError) as error:
        override(RunConfig(), {name: value})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "idle, ruling",
    [
        ({"optim.refresh_every": "5"}, {"optim.name": "muon"}),
        ({"optim.momentum": "0.9"}, {"optim.name": "kl_shampoo"}),
        ({"optim.block_size": "64"}, {"optim.name": "kl_shampoo", "optim.reference": "true"}),
        ({"model.init.a_vo": "2"}, {"model.init.value_output": "cs"}),
        ({"model.init.suo_correction": "false"}, {"model.init.mlp": "normal"}),
        ({"train.decay_fraction": "0.5"}, {"train.schedule": "cosine"}),
        (
            {"model.connection.universal.rank": "8"},
            {"model.connection.kind": "universal", "model.connection.universal.encoder": "false"},
        ),
        (
            {"model.connection.universal.sinkhorn_steps": "8"},
            {"model.connection.kind": "universal", "model.connection.universal.aligner": "mean"},
        ),
    ],
)
def test_a_setting_without_effect_is_refused_where_it_is_given(idle, ruling):
    """Not where a recipe holds it and another setting is changed."""
    name = next(iter(idle))
    with pytest.raises(UserError, match=f"{name} is .*, which has no effect while") as error:
        override(RunConfig(), {**idle, **ruling})
    assert list(ruling)[-1] in str(error.value)
    default = leaves(RunConfig())[name]
    override(RunConfig(), {**ruling, name: default if default is not None else "none"})


def test_the_published_steps_refresh_their_bases_as_often_as_they_are_told():
    changes = {"optim.name": "kl_shampoo", "optim.reference": "true", "optim.refresh_every": "3"}
    assert override(RunConfig(), changes).effective().optim.refresh_every == 3


def test_what_a_recipe_holds_may_lose_its_effect():
    held = RunConfig(optim=OptimizerRecipe(name="kl_shampoo", refresh_every=5))
    assert override(held, {"optim.name": "muon"}).optim.refresh_every == 5


def test_effective_settings_are_those_that_a_file_may_hold():
    held = RunConfig(
        optim=OptimizerRecipe(name="muon", refresh_every=5, momentum=0.9),
        model=ModelConfig(init=InitConfig(a_vo=2.0, a_qk=2.0, query_key="haar")),
    )
    kept = held.effective()
    assert kept.optim == OptimizerRecipe(name="muon", momentum=0.9)
    assert kept.model.init == InitConfig(a_qk=2.0, query_key="haar")
    with giving():
        assert from_json(RunConfig, to_json(kept)) == kept
        with pytest.raises(UserError, match="has no effect"):
            from_json(RunConfig, to_json(held))


def test_every_recipe_read_from_its_own_file_stands():
    for name in recipes.names():
        with giving():
            config = recipes.get(name)
            assert from_json(RunConfig, to_json(config)) == config


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainConfig(batch_size=2.5),
        lambda: TrainConfig(warmup_steps="many"),
        lambda: TrainConfig(keep_checkpoints=True),
        lambda: OptimizerRecipe(lr=None),
        lambda: OptimizerRecipe(betas=0.9),
        lambda: EvaluateConfig(prompt=None),
        lambda: ConnectionConfig(kind="rezero", a=0.9),
        lambda: ConnectionConfig(kind="gated", universal=UniversalConfig(rank=4)),
        lambda: RunConfig(model=ModelConfig(connection=ConnectionConfig(kind="fixed"))),
        lambda: ConnectionOverride(connection=ConnectionConfig(), layers=()),
        lambda: ConnectionOverride(connection=ConnectionConfig(), layers=(0, 0)),
        lambda: ConnectionOverride(connection=ConnectionConfig(), sublayer="mpl"),
        lambda: ModelConfig(position="rotary"),
        lambda: ModelConfig(norm_placement="Pre"),
        lambda: ModelConfig(causal="no"),
        lambda: InitConfig(mlp="sou"),
        lambda: TemperatureConfig(kind="learned"),
        lambda: TrainConfig(precision="fp16"),
        lambda: TrainConfig(mirrors=("wandb",)),
        lambda: OptimizerRecipe(muon_scale="spectrum"),
        lambda: ConnectionConfig(kind="rezero", granularity="channels"),
        lambda: UniversalConfig(gate="static"),
        lambda: UniversalConfig(rank=1.5),
    ],
)
def test_settings_made_in_python_are_checked_too(make):
    with pytest.raises(UserError):
        make()


@pytest.mark.parametrize("kind", CONNECTION_KINDS)
def test_a_kind_takes_what_its_module_reads_and_nothing_else(kind):
    """Held against the source: what is refused is what the class (or one below it) never names."""
    classes = [c for c in CONNECTIONS.get(kind).__mro__ if c.__module__.startswith("skipless")]
    source = "".join(inspect.getsource(c) for c in classes)
    others = {"init": 0.3, "granularity": "scalar", "a": 0.5, "b": 0.5, "c": 0.5, "scale": 2.0,
              "anneal_fraction": 0.25, "anneal_shape": "cosine",
              "universal": UniversalConfig(rank=4)}  # fmt: skip
    for name, value in others.items():
        if re.search(rf"config\.{name}\b", source):
            ConnectionConfig(kind=kind, **{name: value})
        else:
            with pytest.raises(UserError, match=f"connection.{name}"):
                ConnectionConfig(kind=kind, **{name: value})


def test_an_older_file_with_settings_that_its_kind_ignored_is_still_read():
    old = ModelConfig(connection=ConnectionConfig(kind="rezero", init=0.3)).to_dict()
    old["connection"].update(a=0.9, universal={**old["connection"]["universal"], "rank": 4})
    old["connection_overrides"] = [{"connection": {"kind": "fixed", "a": 1.0}, "layers": [0]}]
    read = from_json(RunConfig, json.dumps({"model": old})).model
    assert read.connection == ConnectionConfig(kind="rezero", init=0.3)
    assert read.connection_at(0, "mlp").kind == "residual"  # which is what it computes
    with pytest.raises(UserError, match="a is 'x'; expected float"):  # damage is damage still
        ConnectionConfig.from_dict({"kind": "rezero", "a": "x"})


def test_another_kind_drops_the_settings_of_the_one_before():
    scalar = recipes.get("connections-4-layerscale-scalar")
    assert override(scalar, {"model.connection.kind": "none"}).model.connection.granularity is None
    both = {"model.connection.kind": "none", "model.connection.granularity": "scalar"}
    with pytest.raises(UserError, match="granularity is 'scalar', which kind 'none' does not read"):
        override(scalar, both)


def test_a_file_that_somebody_wrote_is_read_like_the_command_line(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model": {"connection": {"kind": "none", "scale": 2.0}}}))
    with pytest.raises(UserError, match="model.connection.scale is 2.0, which kind 'none' does"):
        read_config(str(path))


def test_what_switches_something_off_is_accepted():
    off = {
        "train.max_grad_norm": "none", "train.eval_every": "0", "train.checkpoint_every": "0",
        "train.warmup_steps": "0", "train.min_lr_ratio": "0", "probe.every": "0",
        "optim.gain_lr": "0", "optim.block_size": "none", "model.norm_eps": "0",
        "evaluate.sample_tokens": "0", "train.device": "cuda:1",
    }  # fmt: skip
    new = leaves(override(RunConfig(), off))
    assert new["train.max_grad_norm"] is None
    assert new["optim.block_size"] is None
    assert new["optim.gain_lr"] == new["model.norm_eps"] == 0.0
    published = {"optim.name": "kl_shampoo", "optim.reference": "true", "optim.start": "published"}
    assert override(RunConfig(), published).optim.start == "published"


def test_settings_are_checked_without_torch():
    code = (
        "import sys; from skipless.config import RunConfig, override; "
        "override(RunConfig(), {'evaluate.schemes': 'W4A4-w:g128'}); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_may_be_written_with_an_exponent():
    assert override(RunConfig(), {"train.num_tokens": "5e6"}).train.num_tokens == 5_000_000


def test_a_keyword_of_the_class_is_no_setting():
    with pytest.raises(UserError, match="unknown setting rules"):
        InitConfig.from_dict({"rules": []})


def test_unknown_json_keys_are_errors():
    with pytest.raises(UserError, match="did you mean 'train'"):
        from_json(RunConfig, '{"trian": {}}')
    with pytest.raises(UserError, match="not valid JSON"):
        from_json(RunConfig, "{")


def test_the_last_matching_connection_override_wins():
    config = ModelConfig(
        num_hidden_layers=4,
        connection_overrides=(
            ConnectionOverride(connection=ConnectionConfig(kind="rezero"), layers=(0, -1)),
            ConnectionOverride(connection=ConnectionConfig(kind="none"), sublayer="mlp"),
        ),
    )
    kinds = [[config.connection_at(i, s).kind for s in ("attention", "mlp")] for i in range(4)]
    assert kinds == [
        ["rezero", "none"],
        ["residual", "none"],
        ["residual", "none"],
        ["rezero", "none"],
    ]


def test_suggestion_lists_everything_when_nothing_is_near():
    assert suggestion("zzz", ["b", "a"], noun="thing") == "known things: a, b"


def test_an_override_does_not_leave_a_stale_note():
    config = recipes.get("demo-fast-rf-muon")
    changed = override(config, {"optim.lr": "1e-3", "train.num_tokens": "2e4"})
    assert changed.note == "demo-fast-rf-muon with optim.lr=0.001, train.num_tokens=20000"
    more = override(changed, {"train.batch_size": 4})
    assert more.note == f"{changed.note}, train.batch_size=4"
    assert override(config, {"optim.lr": config.optim.lr}) == config  # nothing changed
    assert override(config, {"train.device": "cpu"}).note == config.note  # not of the experiment
    assert override(config, {"optim.lr": 1e-3, "note": "mine"}).note == "mine"
