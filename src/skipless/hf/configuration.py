"""`SkiplessConfig`: `ModelConfig` as transformers keeps settings, in one flat config.json.

Read by `modeling.py`; a run's settings become one in `exporting.py`.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from skipless.config import (
    ConnectionConfig,
    ConnectionOverride,
    InitConfig,
    ModelConfig,
    TemperatureConfig,
)
from skipless.errors import UserError
from skipless.jsonable import Config, giving, leaves

__all__ = ["FORMAT_VERSION", "SkiplessConfig"]

FORMAT_VERSION = 1
"""Of config.json; raised when an older skipless would read a newer file wrongly."""

_ELSEWHERE = ("attention_implementation", "num_labels")
"""Settings of `ModelConfig` that transformers keeps itself: attn_implementation, id2label."""


class SkiplessConfig(PreTrainedConfig):
    """Settings of a skipless model for transformers: the fields of `skipless.config.ModelConfig`.

    The defaults are the paper's: no skip connections, pre-norm RMSNorm, RoPE, an erf GELU without
    gate, tied embedding. `connection` is a kind ("none", "rezero", ...), a `ConnectionConfig` or
    its fields as a dict; `connection_overrides` a list of {"connection", "layers", "sublayer"};
    `attention_temperature` (for transformers, "temperature" is one of sampling) and `init` what
    differs from the defaults of `TemperatureConfig` and `InitConfig`. Raises UserError for values
    out of range, and for a config.json that a later skipless wrote.
    """

    model_type = "skipless"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {"is_causal": "causal"}

    vocab_size: int = 32_000
    hidden_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    """None means as many as attention heads; fewer is grouped-query attention."""
    intermediate_size: int | None = None
    """None means 4 * hidden_size."""
    max_position_embeddings: int = 512
    hidden_act: str = "gelu"
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    norm_placement: str = "pre"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    position: str = "rope"
    rope_theta: float = 10_000.0
    causal: bool = True
    connection: Any = "none"
    connection_overrides: Any = ()
    attention_temperature: Any = None
    init: Any = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        _check_version(self.format_version)
        _check_names(kwargs)
        self.connection = _short(_connection(self.connection, "connection"))
        rules = self.connection_overrides or ()
        if not isinstance(rules, (list, tuple)):
            raise UserError(f"connection_overrides is {rules!r}; a list of rules was expected")
        self.connection_overrides = [_override(rule) for rule in rules]
        temperature = _part(TemperatureConfig, self.attention_temperature, "attention_temperature")
        self.attention_temperature = _changes(temperature)
        self.init = _changes(_part(InitConfig, self.init, "init"))
        settings = self.to_model_config()  # which checks all of them
        self.num_key_value_heads = settings.key_value_heads
        self.intermediate_size = settings.mlp_width
        _check_heads_and_rotation(kwargs, self.head_dim, self.rope_theta)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """As transformers' own, also of the packed folder of a run, whose settings lie deeper."""
        if isinstance(model := config_dict.get("model"), dict):
            if "quantization_config" not in config_dict:
                raise UserError(
                    "config.json is that of a run; `skipless export RUN --format hf --out FOLDER` "
                    "writes a folder for transformers"
                )
            made = cls.from_model_config(ModelConfig.from_dict(model, where="model."))
            packed = {"quantization_config": config_dict.get("quantization_config")}
            config_dict = {**made.to_dict(), **packed}
        return super().from_dict(config_dict, **options)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As transformers' own, without an auto_map of code that is not in the folder: the package
        reads a folder with code, and what it saves has none."""
        kept = getattr(self, "auto_map", None)
        if kept and type(self)._auto_class is None:
            files = {str(name).split("--")[-1].split(".")[0] for name in kept.values()}
            elsewhere = all("--" in str(name) for name in kept.values())
            if not elsewhere and not all(Path(save_directory, f"{f}.py").is_file() for f in files):
                del self.auto_map
        try:
            super().save_pretrained(save_directory, *args, **options)
        finally:
            if kept:
                self.auto_map = kept

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads

    def to_model_config(self) -> ModelConfig:
        """The same settings for `skipless.model`, with a language-model head."""
        values = {name: getattr(self, here) for name, here in _names().items()}
        values["connection"] = _connection(self.connection, "connection")
        values["connection_overrides"] = [
            {**rule, "connection": _connection(rule["connection"], "connection_overrides")}
            for rule in self.connection_overrides
        ]
        values["temperature"] = self.attention_temperature or {}
        values["init"] = self.init or {}
        return ModelConfig.from_dict(values)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **settings: Any) -> SkiplessConfig:
        """`config` for transformers; `settings` are further ones, such as eos_token_id."""
        config = config.effective()
        values = {here: getattr(config, name) for name, here in _names().items()}
        if config.num_labels is not None:
            settings = {"num_labels": config.num_labels, **settings}
        return cls(**values, **settings)


def holds_packed_run(folder: Any) -> bool:
    """Whether the folder is one that `save_quantized` wrote of our own decoder."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return isinstance(config["model"], dict) and "quantization_config" in config
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _names() -> dict[str, str]:
    """What the settings of `ModelConfig` are called in config.json."""
    names = {f.name: f.name for f in fields(ModelConfig) if f.name not in _ELSEWHERE}
    return names | {"temperature": "attention_temperature"}


def _check_version(found: Any) -> None:
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= FORMAT_VERSION:
        raise UserError(
            f"config.json has format_version {found!r} and this skipless reads up to "
            f"{FORMAT_VERSION}; install the skipless that wrote it, or a later one"
        )


def _check_names(extra: dict[str, Any]) -> None:
    """Raise UserError for what is nearly a setting; transformers would keep it without a word."""
    if isinstance(extra.get("temperature"), (dict, TemperatureConfig)):
        raise UserError("unknown setting temperature; did you mean 'attention_temperature'?")
    known = [f.name for f in fields(SkiplessConfig)]
    for name in extra:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near and not hasattr(PreTrainedConfig, name):
            raise UserError(f"unknown setting {name}; did you mean {near[0]!r}?")


def _check_heads_and_rotation(extra: dict[str, Any], head_dim: int, theta: float) -> None:
    """Raise UserError for what other families set in config.json and our model would overlook."""
    found = extra.pop("head_dim", None)
    if found not in (None, head_dim):
        raise UserError(
            f"head_dim is {found!r}; hidden_size / num_attention_heads = {head_dim} was expected: "
            "leave it out, or change one of these"
        )
    plain = {"rope_type": "default", "type": "default", "rope_theta": theta}
    for name in ("rope_parameters", "rope_scaling"):
        value = extra.get(name) or {}
        if not isinstance(value, dict) or any(v != plain.get(k) for k, v in value.items()):
            raise UserError(
                f"{name} is {value!r}; our RoPE has no scaling: leave it out, and set rope_theta"
            )


def _part(cls: type[Config], value: Any, name: str) -> Any:
    if value is None or isinstance(value, cls):
        return value or cls()
    if not isinstance(value, dict):
        raise UserError(f"{name} is {value!r}; a name or an object of settings was expected")
    with giving():
        return cls.from_dict(value, where=f"{name}.")


def _connection(value: Any, name: str) -> ConnectionConfig:
    return _part(ConnectionConfig, {"kind": value} if isinstance(value, str) else value, name)


def _override(rule: Any) -> dict[str, Any]:
    """As config.json has it, with what differs from the defaults."""
    if isinstance(rule, dict) and isinstance(rule.get("connection"), str):
        rule = {**rule, "connection": {"kind": rule["connection"]}}
    found = _part(ConnectionOverride, rule, "connection_overrides")
    short: dict[str, Any] = {"connection": _short(found.connection)}
    if found.layers is not None:
        short["layers"] = list(found.layers)
    if found.sublayer is not None:
        short["sublayer"] = found.sublayer
    return short


def _short(connection: ConnectionConfig) -> str | dict[str, Any]:
    """The kind alone where nothing else is set."""
    found = _changes(connection)
    found.pop("kind", None)
    return {"kind": connection.kind, **found} if found else connection.kind


def _changes(config: Config) -> dict[str, Any]:
    """Fields that differ from the default, nested as in JSON."""
    default, found = leaves(type(config)()), {}
    for name, value in leaves(config).items():
        if value != default[name]:
            *parents, leaf = name.split(".")
            node = found
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return found
