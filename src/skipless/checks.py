"""What the settings of a run may be, checked the moment they are made: before data, model or
directory exist. `config.py` calls one `check_*` from each `__post_init__`. No torch here: `--help`
must be fast.
"""

from __future__ import annotations

from typing import Any

from skipless import unread
from skipless.errors import UserError, check_choice
from skipless.jsonable import check_named
from skipless.ranges import decays, real, scheme, schemes, some, text, whole
from skipless.scheme import TrainingPlan

CONNECTION_KINDS = (
    "residual", "none", "fixed", "rezero", "layerscale", "interpolate", "anneal", "learned",
    "sphere", "universal", "gated",
)  # fmt: skip
OPTIMIZERS = ("adamw", "muon", "soap", "shampoo", "kl_shampoo", "kl_soap")
PROBE_STATS = ("moments", "geometry", "attention")
DEVICES = ("auto", "cpu", "cuda", "mps")
MAX_THREADS = 4_096


def check_connection(config: Any) -> None:
    """Every setting of `ConnectionConfig`; UserError for the first that cannot be meant, and for
    one that the kind does not read."""
    check_connection_ranges(config)
    for leaf in unread.not_read(config).values():
        raise UserError(unread.say_not_read(config, "connection.", leaf))


def check_connection_ranges(config: Any) -> None:
    """The same, but for settings that the kind does not read."""
    check_named("connection", config)
    check_choice("connection kind", config.kind, CONNECTION_KINDS)
    real("connection", config, "a", "b", "c", "scale")
    real("connection", config, "init", or_none=True)
    real("connection", config, "anneal_fraction", interval="(0, 1]")
    if config.granularity == "block" and config.kind != "rezero":
        raise UserError(
            f"granularity 'block' goes with kind 'rezero' only, not {config.kind!r}; "
            "use 'scalar' or 'channel'"
        )


def is_plain(config: Any) -> bool:
    """Whether a connection is a fixed one that computes x + f, as if nothing had been set."""
    return config.kind == "fixed" and (config.a, config.b, config.c) == (1, 1, 0)


def check_joins(config: Any) -> None:
    """Raise UserError for a connection of a `ModelConfig` that is another than its name says."""
    for join in (config.connection, *(rule.connection for rule in config.connection_overrides)):
        if is_plain(join):
            raise UserError(
                "model.connection.kind is 'fixed' with a=1, b=1, c=0, which is the plain skip; set "
                "a, b or c, or take kind residual"
            )


def check_override(config: Any) -> None:
    """Every setting of `ConnectionOverride`; UserError for the first that cannot be meant."""
    check_named("connection override", config)
    if config.layers is not None:
        some("connection override", config, "layers")


def check_temperature(config: Any) -> None:
    """Every setting of `TemperatureConfig`; UserError for the first that cannot be meant."""
    check_named("temperature", config)
    real("temperature", config, "beta", interval="(0, inf)")  # the paper's: 1.1


def check_init(config: Any) -> None:
    """Every setting of `InitConfig`; UserError for the first that cannot be meant."""
    check_named("init", config)
    gains = ("a_vo", "a_qk", "a_up", "a_down")
    real("init", config, "std", *gains, interval="(0, inf)")
    real("init", config, "cs_c", "cs_a", "cs_b")
    real("init", config, "identity_bias", or_none=True)


def check_model(config: Any) -> None:
    """Every setting of `ModelConfig`; UserError for the first that cannot be meant."""
    check_named("model", config)
    whole("model", config, "hidden_size", "num_hidden_layers", "num_attention_heads",
          "vocab_size", "max_position_embeddings")  # fmt: skip
    whole("model", config, "num_key_value_heads", "intermediate_size", or_none=True)
    whole("model", config, "num_labels", low=2, or_none=True)
    real("model", config, "norm_eps", interval="[0, inf)")
    real("model", config, "rope_theta", interval="(0, inf)")
    real("model", config, "dropout", "attention_dropout", interval="[0, 1)")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"model.hidden_size {config.hidden_size} is not divisible by "
            f"num_attention_heads {config.num_attention_heads}; change one of them"
        )
    if config.num_attention_heads % config.key_value_heads:
        raise UserError(
            f"model.num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.key_value_heads}; change one of them"
        )
    if config.position == "rope" and config.head_dim % 2:
        raise UserError(
            f"head size {config.head_dim} is odd; RoPE turns pairs of channels, so choose "
            "hidden_size / num_attention_heads even or position 'learned'"
        )
    for rule in config.connection_overrides:
        for layer in rule.layers or ():
            if not -config.num_hidden_layers <= layer < config.num_hidden_layers:
                raise UserError(
                    f"connection override names layer {layer}; the model has layers 0 to "
                    f"{config.num_hidden_layers - 1}"
                )


def check_universal(config: Any) -> None:
    """Every setting of `UniversalConfig`; UserError for the first that cannot be meant."""
    check_named("universal", config)
    whole("universal", config, "rank", "chunk_size", "sinkhorn_steps")
    whole("universal", config, "winsor_window", low=4)
    real("universal", config, "rho", "kappa")
    real("universal", config, "winsor", interval="[1, inf)", or_none=True)
    real("universal", config, "shrinkage", interval="[0, inf)")
    real("universal", config, "sinkhorn_epsilon", interval="(0, inf)")
    real("universal", config, "encoder_dropout", interval="[0, 1)")


def check_data(config: Any) -> None:
    """Every setting of `DataConfig`; UserError for the first that cannot be meant."""
    some("data", config, "sources")
    text("data", config, "text_key", "tokenizer")
    real("data", config, "held_out_fraction", interval="(0, 1)")


def check_optimizer(config: Any) -> None:
    """Every setting of `OptimizerRecipe`; UserError for the first that cannot be meant."""
    check_named("optim", config)
    check_choice("optim.name", config.name, OPTIMIZERS)
    real("optim", config, "lr", interval="(0, inf)")
    real("optim", config, "adamw_lr", "gain_lr", interval="[0, inf)", or_none=True)
    decay = ("weight_decay", "gain_weight_decay")
    real("optim", config, "eps", *decay, interval="[0, inf)")
    real("optim", config, "update_rms", interval="(0, inf)", or_none=True)
    real("optim", config, "momentum", interval="[0, 1)")
    decays("optim", config, "betas", "adamw_betas")
    whole("optim", config, "refresh_every", "muon_steps")
    whole("optim", config, "block_size", or_none=True)
    if config.reference and config.name != "kl_shampoo":
        raise UserError(
            f"optim.reference is KL-Shampoo's and optim.name is {config.name!r}; set it to false "
            "or the name to kl_shampoo"
        )
    if config.start == "published" and not config.reference:
        raise UserError(
            "optim.start is 'published', which goes with optim.name kl_shampoo and "
            "optim.reference true only; use 'gradient'"
        )
    if config.root == "newton" and config.name in ("soap", "kl_soap"):
        raise UserError(
            f"optim.root is 'newton' and {config.name} needs eigenvectors; use qr, jacobi or eigh"
        )


def check_train(config: Any) -> None:
    """Every setting of `TrainConfig`; UserError for the first that cannot be meant."""
    check_named("train", config)
    whole("train", config, "num_tokens", "batch_size", "sequence_length", "eval_tokens",
          "keep_checkpoints")  # fmt: skip
    whole("train", config, "warmup_steps", "eval_every", "checkpoint_every", low=0)
    whole("train", config, "seed", low=0, high=2**32 - 1)
    whole("train", config, "micro_batch_size", high=config.batch_size, or_none=True)
    whole("train", config, "num_threads", high=MAX_THREADS, or_none=True)
    real("train", config, "min_lr_ratio", "decay_fraction", interval="[0, 1]")
    real("train", config, "max_grad_norm", interval="(0, inf)", or_none=True)
    kind, _, index = config.device.partition(":")
    if kind not in DEVICES or (":" in config.device and not index.isdecimal()):
        raise UserError(f"train.device is {config.device!r}; use auto, cpu, cuda, cuda:N or mps")
    if config.quantize is not None:
        try:
            TrainingPlan.parse(config.quantize)
        except UserError as error:
            raise UserError(f"train.quantize: {error}") from None
        for name in ("compile", "activation_checkpointing"):
            if getattr(config, name):
                raise UserError(
                    f"train.quantize is {config.quantize!r}, which was never made to work with "
                    f"train.{name}; leave one of them out"
                )


def check_probe(config: Any) -> None:
    """Every setting of `ProbeConfig`; UserError for the first that cannot be meant."""
    whole("probe", config, "every", "trace_every", low=0)
    whole("probe", config, "num_tokens", "final_tokens")
    some("probe", config, "stats", PROBE_STATS)
    if "moments" not in config.stats:
        raise UserError(
            f"probe.stats is {', '.join(config.stats)}; add moments, which every table starts from"
        )


def check_evaluate(config: Any) -> None:
    """Every setting of `EvaluateConfig`; UserError for the first that cannot be meant."""
    schemes("evaluate", config, "schemes")
    some("evaluate", config, "scopes", ("linear", "block", "all"))
    whole("evaluate", config, "num_tokens")
    whole("evaluate", config, "quantize_tokens", or_none=True)
    whole("evaluate", config, "sample_tokens", low=0)
    text("evaluate", config, "prompt")
    parsed = scheme("evaluate", "error_scheme", config.error_scheme)
    if parsed.activation_bits is None:
        raise UserError(
            f"evaluate.error_scheme is {config.error_scheme!r}, which leaves activations in "
            "floating point, so no error can be followed; give them a width, such as W4A4"
        )
