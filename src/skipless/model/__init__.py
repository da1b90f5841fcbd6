"""The decoder and its parts: connections, initialisers, attention, cache, generation."""

from skipless.config import ConnectionConfig, ConnectionOverride, ModelConfig
from skipless.model.attention import Attention
from skipless.model.block import IDENTITY, Block, is_absent
from skipless.model.cache import KeyValueCache
from skipless.model.connections import CONNECTIONS, Connection, build_connection
from skipless.model.initializers import INITIALIZERS, haar
from skipless.model.interpolation import Gated, Universal, describe_interpolation
from skipless.model.temperature import AttentionTemperature
from skipless.model.transformer import ModelOutput, Transformer, initialize

__all__ = [
    "CONNECTIONS",
    "IDENTITY",
    "INITIALIZERS",
    "Attention",
    "AttentionTemperature",
    "Block",
    "Connection",
    "ConnectionConfig",
    "ConnectionOverride",
    "Gated",
    "KeyValueCache",
    "ModelConfig",
    "ModelOutput",
    "Transformer",
    "Universal",
    "build_connection",
    "describe_interpolation",
    "haar",
    "initialize",
    "is_absent",
]
