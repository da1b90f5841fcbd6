"""Every setting of a run, as frozen dataclasses. Read this to know what can be changed.

A `RunConfig` is a whole experiment: model, data, optimiser, training, probes, evaluation. Recipes
(`skipless.recipes`) are functions that return one. It goes to JSON and back without loss, and any
leaf can be replaced by its dotted name (`override(config, {"optim.lr": "3e-4"})`, on the command
line `--optim.lr 3e-4`). Unknown keys are errors that suggest near names. No torch here: `--help`
must be fast.

Equation tags (C1, I3, T1, ...) are those of docs/equations.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from skipless import checks, unread
from skipless.connection_config import ConnectionConfig, ConnectionOverride
from skipless.errors import UserError
from skipless.interpolation_config import UniversalConfig
from skipless.jsonable import Config, from_json, override, to_json

__all__ = [
    "Config",
    "ConnectionConfig",
    "ConnectionOverride",
    "DataConfig",
    "EvaluateConfig",
    "InitConfig",
    "ModelConfig",
    "OptimizerRecipe",
    "ProbeConfig",
    "RunConfig",
    "TemperatureConfig",
    "TrainConfig",
    "UniversalConfig",
    "from_json",
    "override",
    "to_json",
]


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig(Config):
    """Attention logits are multiplied by tau_l / sqrt(K), tau_l = beta^-l (T1)."""

    kind: Literal["constant", "learned_layer", "learned_head"] = "constant"
    beta: float = 1.0
    """1.0 is no temperature; the paper's value is 1.1."""
    length_scaled: bool = False
    """Multiply tau by log(visible keys) / log(max_position_embeddings)."""

    def __post_init__(self) -> None:
        checks.check_temperature(self)


@dataclass(frozen=True, kw_only=True)
class InitConfig(Config):
    """Initialisers by the role of a matrix (I1-I7)."""

    value_output: Literal["normal", "haar", "cs"] = "normal"
    """normal I6; haar I2 (W_V W_O = a_vo I); cs I5."""
    query_key: Literal["normal", "haar", "cs", "unit"] = "normal"
    """normal I6; haar I3; cs I5; unit I7 (outputs of unit variance)."""
    mlp: Literal["normal", "suo"] = "normal"
    """normal I6; suo I4 (orthogonal, corrected for the width ratio)."""
    std: float = 0.02
    """Standard deviation of every normal draw, the embedding's too."""
    a_vo: float = 3.0
    a_qk: float = 0.9
    a_up: float = 1.5
    a_down: float = 1.5
    suo_correction: bool = True
    """Factor max(sqrt(F/D), 1) of I4; False gives W_U W_U^T = a_up I literally."""
    cs_c: float = 3.0
    cs_a: float = 2.0
    cs_b: float = 0.6
    identity_bias: float | None = None
    """Start of the learned per-head bias on the diagonal logit (I7); None means no such bias."""

    rules: ClassVar[tuple[unread.Rule, ...]] = unread.INIT

    def __post_init__(self) -> None:
        checks.check_init(self)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The decoder of the paper's reference experiment and every option around it."""

    hidden_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    """None means as many as attention heads; fewer is grouped-query attention."""
    intermediate_size: int | None = None
    """None means 4 * hidden_size."""
    vocab_size: int = 32_000
    max_position_embeddings: int = 512
    hidden_act: Literal["gelu", "relu", "relu2", "swiglu"] = "gelu"
    """gelu is the erf form; swiglu adds gate_proj."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    norm_placement: Literal["pre", "post", "none"] = "pre"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    position: Literal["rope", "learned", "none"] = "rope"
    rope_theta: float = 10_000.0
    causal: bool = True
    num_labels: int | None = None
    """A number replaces the language-model head by a classification head over pooled tokens. In
    training the label of a passage is its source, so it is the number of data.sources."""
    attention_implementation: Literal["sdpa", "eager"] = "sdpa"
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    connection_overrides: tuple[ConnectionOverride, ...] = ()
    """Applied in order; the last that matches a layer and sublayer wins."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    init: InitConfig = field(default_factory=InitConfig)

    rules: ClassVar[tuple[unread.Rule, ...]] = unread.MODEL

    def __post_init__(self) -> None:
        checks.check_model(self)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def connection_at(self, layer: int, sublayer: str) -> ConnectionConfig:
        """The connection of one sublayer ("attention" or "mlp") after all overrides."""
        chosen = self.connection
        for rule in self.connection_overrides:
            layers = (
                None if rule.layers is None else {i % self.num_hidden_layers for i in rule.layers}
            )
            if (layers is None or layer in layers) and rule.sublayer in (None, sublayer):
                chosen = rule.connection
        return chosen


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Where tokens come from."""

    sources: tuple[str, ...] = ("shakespeare", "kjv")
    """Named sources (`skipless data list`), files or folders of .txt, .jsonl, .parquet."""
    text_key: str = "text"
    """Key of jsonl lines, column of parquet files."""
    tokenizer: str = "bpe"
    """"bpe" trains a byte-level BPE of model.vocab_size on the training split; otherwise the path
    of a tokenizer.json."""
    held_out_fraction: float = 0.05
    """Share of the characters held out, as whole documents."""
    seed: int = 0
    """Chooses the held-out documents."""

    def __post_init__(self) -> None:
        checks.check_data(self)


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe(Config):
    """Which optimiser gets which parameters, and how fast (`skipless.optim.build_optimizer`).

    `name` is used for hidden matrices; embeddings, head, norm gains and connection gains go to
    AdamW inside the same optimiser.
    """

    name: str = "adamw"
    """adamw, muon, soap, shampoo, kl_shampoo, kl_soap."""
    lr: float = 1e-3
    """Learning rate of hidden matrices."""
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.01
    adamw_lr: float | None = None
    """Learning rate of embedding, head and norm gains; None means `lr`."""
    adamw_betas: tuple[float, float] = (0.9, 0.98)
    gain_lr: float | None = None
    """Learning rate of connection gains and attention biases; None means adamw_lr."""
    gain_weight_decay: float = 0.0
    """Weight decay of norm gains, connection gains and biases."""
    block_size: int | None = 256
    refresh_every: int = 10
    root: Literal["auto", "eigh", "qr", "jacobi", "newton"] = "auto"
    start: Literal["gradient", "published"] = "gradient"
    """KL-Shampoo's eigenvalues start at the first gradient's scale with bias correction, or at
    0.1 as published (too slow for short runs)."""
    reference: bool = False
    """The published seven steps of O1, literally and slowly."""
    update_rms: float | None = None
    """Rescale each whitened update to this root mean square (0.2 matches AdamW's)."""
    momentum: float = 0.95
    """Muon's momentum."""
    muon_scale: Literal["keller", "rms", "spectral"] = "rms"
    muon_steps: int = 5

    rules: ClassVar[tuple[unread.Rule, ...]] = unread.OPTIMIZER

    def __post_init__(self) -> None:
        checks.check_optimizer(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The loop."""

    num_tokens: int = 200_000
    """Training tokens in all; the number of steps is num_tokens / (batch_size * sequence_length),
    rounded up."""
    batch_size: int = 8
    """Sequences a step, over all processes and accumulation steps."""
    micro_batch_size: int | None = None
    """Sequences a forward pass on one process; smaller than its share of batch_size means gradient
    accumulation. None means no accumulation."""
    sequence_length: int = 128
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = 50
    min_lr_ratio: float = 0.1
    decay_fraction: float = 0.2
    """Share of the steps in which wsd decays."""
    max_grad_norm: float | None = 1.0
    seed: int = 0
    eval_every: int = 100
    """Steps between held-out losses; 0 means only at the end."""
    eval_tokens: int = 16_384
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 means only at the end."""
    keep_checkpoints: int = 2
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is autocast; 5 to 90 times slower than fp32 on CPUs without bf16 units."""
    compile: bool = False
    """torch.compile, block by block."""
    activation_checkpointing: bool = False
    device: str = "auto"
    """auto takes cuda, then mps, then cpu."""
    num_threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    mirrors: tuple[Literal["tensorboard", "trackio"], ...] = ()
    quantize: str | None = None
    """Round while training: "W4A4 scope=block from=0.1 over=0.3" (docs/quantise.md)."""

    rules: ClassVar[tuple[unread.Rule, ...]] = unread.TRAIN

    def __post_init__(self) -> None:
        checks.check_train(self)

    @property
    def num_steps(self) -> int:
        return -(-self.num_tokens // (self.batch_size * self.sequence_length))


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Config):
    """What is measured inside during training, and how often."""

    every: int = 50
    """Steps between measurements; 0 means only at the end."""
    trace_every: int = 0
    """Steps between gradient norms by layer and mean gains in metrics.jsonl, which cost next to
    nothing; the first step is one of them. 0 means none."""
    num_tokens: int = 2_048
    """Held-out tokens per measurement during training."""
    final_tokens: int = 16_384
    """Held-out tokens of the measurement after training."""
    stats: tuple[str, ...] = checks.PROBE_STATS

    def __post_init__(self) -> None:
        checks.check_probe(self)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Config):
    """What is evaluated after training."""

    schemes: tuple[str, ...] = ("W8A12", "W8A8", "W8A6", "W8A5", "W8A4", "W4A4")
    scopes: tuple[Literal["linear", "block", "all"], ...] = ("linear", "block")
    num_tokens: int = 32_768
    """Held-out tokens of the loss at full precision."""
    quantize_tokens: int | None = None
    """Held-out tokens of every scheme; None means num_tokens. What is compared is the increase over
    full precision on the same tokens, which needs fewer of them than the loss itself."""
    error_scheme: str = "W4A4"
    """The scheme whose error R_l is followed through depth (S9)."""
    prompt: str = "The king said"
    sample_tokens: int = 48

    def __post_init__(self) -> None:
        checks.check_evaluate(self)


BOOKKEEPING = (
    "name", "label", "note", "train.device", "train.num_threads", "train.mirrors",
    "train.checkpoint_every", "train.keep_checkpoints",
)  # fmt: skip
"""Leaves that do not make another experiment."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """A whole experiment."""

    name: str = "run"
    label: str = ""
    """How tables and plots call this run."""
    note: str = ""
    """Where the settings come from, and what they are for."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    train: TrainConfig = field(default_factory=TrainConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        checks.check_joins(self.model)
        longest = self.model.max_position_embeddings
        if self.train.sequence_length > longest:
            raise UserError(
                f"train.sequence_length {self.train.sequence_length} exceeds "
                f"model.max_position_embeddings {longest}; lower the one or raise the other"
            )

    def describing(self, changes: dict[str, Any]) -> RunConfig:
        """The note says what was changed, since what it said of the settings may be untrue now."""
        settings = [f"{k}={v}" for k, v in changes.items() if k not in BOOKKEEPING]
        if not settings or not self.note or "note" in changes:
            return self
        start = f"{self.name} with "
        before = [self.note.removeprefix(start)] if self.note.startswith(start) else []
        return dataclasses.replace(self, note=start + ", ".join([*before, *settings]))

    def replace(self, **changes) -> RunConfig:
        """A copy with some fields changed; a dict for a nested field changes its leaves."""
        new = {}
        for key, value in changes.items():
            old: Any = getattr(self, key)
            nested = isinstance(value, dict) and isinstance(old, Config)
            new[key] = dataclasses.replace(old, **value) if nested else value
        return dataclasses.replace(self, **new)
