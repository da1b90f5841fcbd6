"""Initialisation by the role of a matrix (I1-I7), the same numbers wherever a model is built.

An initialiser draws the matrices of one role in one layer: `f(config, draw) -> {name: weight}`,
weights in torch's layout, out x in, float64 or float32. `draw(name)` is a CPU generator seeded by
(seed, layer, name), so neither the order of construction, nor meta materialisation, nor sharding
changes a number. Formulas are written as in docs/equations.md: row vectors, y = x W, W in x out;
torch's weight is W^T.

Legend: D width, F MLP width, H heads, G key/value heads, K head size, N layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from skipless.config import ModelConfig
from skipless.registry import Registry

INITIALIZERS: Registry = Registry("initialiser")
"""By "role.kind", role one of value_output, query_key, mlp (the fields of InitConfig)."""

Draw = Callable[[str], Generator]


def generator_for(seed: int, name: str) -> Generator:
    """A CPU generator that depends on (seed, name) only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def normal(rows: int, columns: int, std: float, generator: Generator) -> Tensor:
    """Independent normal(0, std) [rows, columns] float32."""
    return torch.randn(rows, columns, generator=generator).mul_(std)


def haar(rows: int, columns: int, generator: Generator) -> Tensor:
    """I1: uniformly distributed [rows, columns] float64 whose shorter side is orthonormal.

    QR alone is not uniform; multiplying by the signs of R's diagonal makes it so
    (arXiv math-ph/0609050).
    """
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator).double()
    q, r = torch.linalg.qr(tall)
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return q if rows >= columns else q.T


def _output_std(config: ModelConfig) -> float:
    return config.init.std / math.sqrt(2 * config.num_hidden_layers)


def _heads_per_group(config: ModelConfig) -> int:
    return config.num_attention_heads // config.key_value_heads


def _value_output_pair(config: ModelConfig, left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Split W_V = left [D, G K] and W_O ~ right^T [G K, D] over groups and their heads.

    Every head of a group gets the group's slice of W_O divided by the heads per group, so that
    the sum over heads is left right^T.
    """
    shared = _heads_per_group(config)
    groups = right.view(config.hidden_size, config.key_value_heads, 1, config.head_dim)
    output = groups.expand(-1, -1, shared, -1).reshape(config.hidden_size, -1) / shared
    return {"self_attn.v_proj": left.T, "self_attn.o_proj": output}


@INITIALIZERS.register("value_output.normal")
def value_output_normal(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I6: normal(0, std), the output projection divided by sqrt(2 N)."""
    width, inner = config.hidden_size, config.key_value_heads * config.head_dim
    return {
        "self_attn.v_proj": normal(inner, width, config.init.std, draw("self_attn.v_proj")),
        "self_attn.o_proj": normal(width, width, _output_std(config), draw("self_attn.o_proj")),
    }


@INITIALIZERS.register("value_output.haar")
def value_output_haar(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I2: W_V = sqrt(a) U, W_O = sqrt(a) U^T, so W_V W_O = a I; with grouped queries a times the
    projector on U's G K columns."""
    u = haar(config.hidden_size, config.key_value_heads * config.head_dim, draw("value_output"))
    u = u * math.sqrt(config.init.a_vo)
    return _value_output_pair(config, u, u)


@INITIALIZERS.register("value_output.cs")
def value_output_cs(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I5: W_V = c U, W_O = c V^T of one Gaussian's U S V^T: the product is c^2 times orthogonal."""
    width, inner = config.hidden_size, config.key_value_heads * config.head_dim
    gaussian = torch.randn(width, width, generator=draw("value_output")).double()
    u, _, vt = torch.linalg.svd(gaussian)
    c = config.init.cs_c
    return _value_output_pair(config, c * u[:, :inner], c * vt.T[:, :inner])


@INITIALIZERS.register("query_key.normal")
def query_key_normal(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I6: normal(0, std)."""
    return _query_key_normal(config, draw, config.init.std)


@INITIALIZERS.register("query_key.unit")
def query_key_unit(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I7: normal(0, 1/D) in variance, so that queries and keys of normed tokens have variance 1."""
    return _query_key_normal(config, draw, config.hidden_size**-0.5)


def _query_key_normal(config: ModelConfig, draw: Draw, std: float) -> dict[str, Tensor]:
    width, inner = config.hidden_size, config.key_value_heads * config.head_dim
    return {
        "self_attn.q_proj": normal(width, width, std, draw("self_attn.q_proj")),
        "self_attn.k_proj": normal(inner, width, std, draw("self_attn.k_proj")),
    }


def _query_key_pair(config: ModelConfig, queries: list[Tensor], keys: list[Tensor]):
    """Per group W_Q and W_K, each [D, K]; the heads of a group get the same W_Q."""
    shared = _heads_per_group(config)
    return {
        "self_attn.q_proj": torch.cat([q.T for q in queries for _ in range(shared)]),
        "self_attn.k_proj": torch.cat([k.T for k in keys]),
    }


@INITIALIZERS.register("query_key.haar")
def query_key_haar(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I3: per group one Haar P [D, K], W_Q = W_K = sqrt(a) P: a times a rank-K projector."""
    generator, gain = draw("query_key"), math.sqrt(config.init.a_qk)
    groups = range(config.key_value_heads)
    matrices = [gain * haar(config.hidden_size, config.head_dim, generator) for _ in groups]
    return _query_key_pair(config, matrices, matrices)


@INITIALIZERS.register("query_key.cs")
def query_key_cs(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I5: W_Q W_K^T is the best rank-K approximation of a Z + b I, Z_ij ~ N(0, 1/D), with
    sqrt(S) on each side; one Z per group."""
    generator, width, rank = draw("query_key"), config.hidden_size, config.head_dim
    queries, keys = [], []
    for _ in range(config.key_value_heads):
        z = torch.randn(width, width, generator=generator).double() / math.sqrt(width)
        target = config.init.cs_a * z + config.init.cs_b * torch.eye(width, dtype=torch.float64)
        u, s, vt = torch.linalg.svd(target)
        root = s[:rank].sqrt()
        queries.append(u[:, :rank] * root)
        keys.append(vt[:rank].T * root)
    return _query_key_pair(config, queries, keys)


def _gated(config: ModelConfig) -> list[str]:
    return ["mlp.gate_proj", "mlp.up_proj"] if config.hidden_act == "swiglu" else ["mlp.up_proj"]


@INITIALIZERS.register("mlp.normal")
def mlp_normal(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I6: normal(0, std), the down projection divided by sqrt(2 N)."""
    width, inner = config.hidden_size, config.mlp_width
    weights = {n: normal(inner, width, config.init.std, draw(n)) for n in _gated(config)}
    down = normal(width, inner, _output_std(config), draw("mlp.down_proj"))
    return weights | {"mlp.down_proj": down}


@INITIALIZERS.register("mlp.suo")
def mlp_suo(config: ModelConfig, draw: Draw) -> dict[str, Tensor]:
    """I4: W_U = sqrt(a_up) max(sqrt(F/D), 1) Haar(D, F), W_D = sqrt(a_down) max(sqrt(D/F), 1)
    Haar(F, D); `suo_correction=False` leaves the width ratios out.

    SwiGLU: gate and up are independent draws, and the down projection makes up for the second
    moment of silu(gate) * up, so that the branch starts as large as with erf GELU.
    """
    init, width, inner = config.init, config.hidden_size, config.mlp_width
    up_ratio = max(math.sqrt(inner / width), 1) if init.suo_correction else 1.0
    down_ratio = max(math.sqrt(width / inner), 1) if init.suo_correction else 1.0
    up, down = math.sqrt(init.a_up) * up_ratio, math.sqrt(init.a_down) * down_ratio
    if config.hidden_act == "swiglu":
        # sd of a hidden unit for a normed token: its column of W_U has norm `up` when F <= D,
        # and up sqrt(D / F) on average when F > D
        std = up * min(1.0, math.sqrt(width / inner))
        gate, value = second_moment("silu", std), std**2
        down *= math.sqrt(second_moment("gelu", std) / (gate * value))
    weights = {name: up * haar(inner, width, draw(name)) for name in _gated(config)}
    return weights | {"mlp.down_proj": down * haar(width, inner, draw("mlp.down_proj"))}


def second_moment(activation: str, std: float) -> float:
    """E[act(z)^2] for z ~ N(0, std^2), by quadrature; "gelu" (erf) or "silu"."""
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    x = std * z
    value = torch.nn.functional.gelu(x) if activation == "gelu" else x * torch.sigmoid(x)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return float(torch.trapezoid(value**2 * density, z))


def layer_weights(config: ModelConfig, layer: int, seed: int) -> dict[str, Tensor]:
    """All matrices of one layer by name inside the block ("self_attn.v_proj"), out x in."""

    def draw(name: str) -> Generator:
        return generator_for(seed, f"layers.{layer}.{name}")

    weights: dict[str, Tensor] = {}
    for role in ("value_output", "query_key", "mlp"):
        kind = getattr(config.init, role)
        weights |= INITIALIZERS.get(f"{role}.{kind}")(config, draw)
    return weights
