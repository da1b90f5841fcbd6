"""Attention as nodes: rotation, temperature (T1), identity bias (I7), past keys, groups of heads.

Read by `decoder.py`. Legend: B batch, T new tokens, S past plus new tokens, H heads, G key/value
heads, n heads a group, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from skipless.export.graphs.nodes import Graph
from skipless.export.graphs.rounding import Rounding, linear
from skipless.model.attention import Attention


@dataclass
class Shared:
    """What all blocks read."""

    embedding: str
    hidden: str
    """0 where a query sees a key, else -inf: [B, 1, T, S]."""
    own: str
    """1 where query and key are the same token: [T, S]."""
    rotary: tuple[str, str] | None
    """Cosine and signed sine [B, T, 1, K]."""
    num_visible: str
    """float [B, 1, T, 1]."""


def attention(
    graph: Graph, rounding: Rounding, module: Attention, name: str, x: str, shared: Shared,
    cached: bool,
) -> str:  # fmt: skip
    """o_proj of attention over past and new tokens, [B, T, D] to [B, T, D]."""
    groups, size = module.num_key_value_heads, module.head_dim
    copies = module.num_heads // groups

    def heads(letter: str, count: int) -> str:
        projected = linear(graph, rounding, f"{name}.{letter}_proj",
                            getattr(module, f"{letter}_proj"), x)  # fmt: skip
        value = graph.node("Reshape", projected, graph.constant([0, 0, count, size]))
        if letter != "v" and shared.rotary is not None:
            value = _rotated(graph, value, *shared.rotary)
        value = graph.node("Transpose", value, perm=[0, 2, 1, 3])
        return rounding.at(
            f"{name}.{ {'q': 'query', 'k': 'key', 'v': 'value'}[letter] }:output", value
        )

    q, k, v = heads("q", module.num_heads), heads("k", groups), heads("v", groups)
    q = _tempered(graph, module, q, shared)
    if cached:
        k, v = (
            _extended(graph, value, what, module, name)
            for value, what in ((k, "key"), (v, "value"))
        )
    hidden = shared.hidden
    if copies > 1:  # heads of a group share their keys by broadcasting
        q = graph.node("Reshape", q, graph.constant([0, groups, copies, -1, size]))
        k, v, hidden = (graph.node("Unsqueeze", value, graph.constant([2]))
                        for value in (k, v, hidden))  # fmt: skip
    last = [0, 1, 3, 2] if copies == 1 else [0, 1, 2, 4, 3]
    scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=last))
    scores = graph.node("Mul", scores, graph.constant(float(module.temperature.scaling)))
    if module.identity_bias is not None:
        shape = (-1, 1, 1) if copies == 1 else (groups, copies, 1, 1)
        bias = module.identity_bias.detach().cpu().float().numpy().reshape(shape)
        scores = graph.node("Add", scores, graph.node("Mul", shared.own, graph.constant(bias)))
    scores = graph.node("Add", scores, hidden)
    shares = graph.node("Softmax", scores, axis=-1)
    shares = rounding.at(f"{name}.probabilities:output", shares)
    out = graph.node("MatMul", shares, v)
    if copies > 1:
        out = graph.node("Reshape", out, graph.constant([0, module.num_heads, -1, size]))
    out = graph.node("Transpose", out, perm=[0, 2, 1, 3])
    out = graph.node("Reshape", out, graph.constant([0, 0, module.num_heads * size]))
    return linear(graph, rounding, f"{name}.o_proj", module.o_proj, out)


def _extended(graph: Graph, new: str, what: str, module: Attention, name: str) -> str:
    """Past and new keys or values; an input and an output of the graph."""
    index = name.split(".")[1]
    shape: list[int | str] = ["batch", module.num_key_value_heads, "past", module.head_dim]
    past = graph.add_input(f"past_key_values.{index}.{what}", "FLOAT", shape)
    whole = graph.node("Concat", past, new, axis=2)
    shape[2] = "past_and_tokens"
    graph.add_output(whole, f"present.{index}.{what}", "FLOAT", shape)
    return whole


def _tempered(graph: Graph, module: Attention, q: str, shared: Shared) -> str:
    """Queries times a learned or length-scaled temperature (T1)."""
    temperature = module.temperature
    if temperature.tau is not None:
        tau = temperature.tau.detach().cpu().float().reshape(-1, 1, 1).numpy()
        q = graph.node("Mul", q, graph.constant(tau))
    if temperature.length_scaled:
        ratio = graph.node("Log", shared.num_visible)
        ratio = graph.node("Div", ratio, graph.constant(float(temperature.log_train_length)))
        q = graph.node("Mul", q, ratio)
    return q


def _rotated(graph: Graph, x: str, cos: str, sin: str) -> str:
    first, second = graph.node_many("Split", 2, x, axis=-1, num_outputs=2)
    swapped = graph.node("Concat", second, first, axis=-1)
    return graph.node("Add", graph.node("Mul", x, cos), graph.node("Mul", swapped, sin))
