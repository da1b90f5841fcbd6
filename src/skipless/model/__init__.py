"""The decoder and its parts: connections, initialisers, attention, cache, generation."""

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig
from skipless.model.attention import Attention, eager_attention
from skipless.model.block import Block
from skipless.model.cache import KeyValueCache
from skipless.model.connections import CONNECTIONS, Connection, build_connection
from skipless.model.initializers import INITIALIZERS, haar
from skipless.model.temperature import AttentionTemperature
from skipless.model.transformer import ModelOutput, Transformer, initialize

__all__ = [
    "CONNECTIONS",
    "INITIALIZERS",
    "Attention",
    "AttentionTemperature",
    "Block",
    "Connection",
    "ConnectionConfig",
    "ConnectionOverride",
    "KeyValueCache",
    "ModelConfig",
    "ModelOutput",
    "Transformer",
    "build_connection",
    "eager_attention",
    "haar",
    "initialize",
]
