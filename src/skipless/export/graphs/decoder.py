"""Our decoder as an ONNX graph: embedding, blocks, norm, head; with or without past keys.

    input_ids [batch, tokens], attention_mask [batch, past + tokens] -> logits
    past_key_values.N.key, .value [batch, G, past, K] -> present.N.key, .value   (with a cache)

Names are those that tools for transformers' models use. The mask is 1 on tokens and 0 on padding;
positions count tokens alone, as in our model, so that left padding changes nothing. `past` may be
0. Read by `writing.py`.

Legend: B batch, T new tokens, S past plus new tokens, D width, G key/value heads, K head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from skipless.errors import UserError
from skipless.export.graphs.attention import Shared, attention
from skipless.export.graphs.joins import check_join, join
from skipless.export.graphs.nodes import Graph
from skipless.export.graphs.rounding import Rounding, linear
from skipless.model import Transformer
from skipless.model.attention import Attention
from skipless.model.block import Block
from skipless.model.mlp import MLP
from skipless.model.rope import RotaryTables
from skipless.quant import quantization


def build_graph(model: Transformer, *, cached: bool) -> Graph:
    """The graph of `model` as it is, quantised or not.

    Raises UserError for a connection that no nodes express, for weights that are not float32, and
    for a cache of a model that needs none.
    """
    check_model(model, cached=cached)
    graph = Graph()
    rounding = Rounding(graph, quantization(model))
    config = model.config
    ids = graph.add_input("input_ids", "INT64", ["batch", "tokens"])
    total = "past_and_tokens" if cached else "tokens"
    mask = graph.add_input("attention_mask", "INT64", ["batch", total])
    positions, num_past = _positions(graph, ids, mask)
    graph.place = "embed_tokens"
    stream = rounding.rows("embed_tokens", model.embed_tokens, ids)
    if config.position == "learned":
        places = rounding.rows("embed_positions", model.embed_positions, positions)
        stream = graph.node("Add", stream, places)
    shared = _shared(graph, model, stream, mask, positions, num_past)
    for index, block in enumerate(model.blocks):
        stream = _block(graph, rounding, block, f"layers.{index}", stream, shared, cached)
    graph.place = "norm"
    stream = _norm(graph, model.norm, stream, "norm")
    if config.num_labels is not None:
        graph.place = "score"
        pooled = _pooled(graph, stream, mask, num_past, config.causal)
        logits = linear(graph, rounding, "score", model.score, pooled)
        graph.add_output(logits, "logits", "FLOAT", ["batch", config.num_labels])
    else:
        graph.place = "lm_head"
        logits = _head(graph, rounding, model, stream)
        graph.add_output(logits, "logits", "FLOAT", ["batch", "tokens", config.vocab_size])
    # logits first, whatever order the blocks made their keys and values in
    graph.outputs.insert(0, graph.outputs.pop())
    rounding.check_used()
    return graph


def check_model(model: Transformer, *, cached: bool) -> None:
    """Raise UserError for a model that no graph is made of."""
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    if kinds != {"float32"}:
        raise UserError(
            f"the weights are {', '.join(sorted(kinds))}; an ONNX file is written in float32, so "
            "call model.float() first"
        )
    if cached and (not model.config.causal or model.config.num_labels is not None):
        what = "classifies" if model.config.causal else "is bidirectional"
        raise UserError(f"the model {what}, so past keys are of no use to it; leave cached out")
    for index, block in enumerate(model.blocks):
        for sublayer in ("attention", "mlp"):
            connection = getattr(block, f"{sublayer}_connection")
            if connection is not None:
                check_join(f"layers.{index}.{sublayer}_connection", connection)


def _positions(graph: Graph, ids: str, mask: str) -> tuple[str, str]:
    """(position of every new token [B, T], number of past ones)."""
    axis = graph.constant([1])
    num_new = graph.node("Gather", graph.node("Shape", ids), graph.constant(1))
    num_all = graph.node("Gather", graph.node("Shape", mask), graph.constant(1))
    num_past = graph.node("Sub", num_all, num_new)
    counted = graph.node("CumSum", mask, graph.constant(1))
    places = graph.node("Max", graph.node("Sub", counted, graph.constant(1)), graph.constant(0))
    start = graph.node("Reshape", num_past, graph.constant([1]))
    stop = graph.node("Reshape", num_all, graph.constant([1]))
    return graph.node("Slice", places, start, stop, axis), num_past


def _shared(
    graph: Graph, model: Transformer, stream: str, mask: str, positions: str, num_past: str
) -> Shared:
    config = model.config
    graph.place = "mask"
    zero, one = graph.constant(0), graph.constant(1)
    num_all = graph.node("Gather", graph.node("Shape", mask), one)
    keys = graph.node("Range", zero, num_all, one)
    queries = graph.node("Range", num_past, num_all, one)
    queries = graph.node("Unsqueeze", queries, graph.constant([1]))
    own = graph.node("Equal", keys, queries)  # [T, S]
    visible = graph.node("Unsqueeze", graph.cast(mask, "BOOL"), graph.constant([1, 2]))
    if config.causal:
        visible = graph.node("And", visible, graph.node("LessOrEqual", keys, queries))
    visible = graph.node("Or", visible, own)  # padding sees itself, since a softmax needs one
    hidden = graph.node(
        "Where", visible, graph.constant(0.0), graph.constant(np.array(-np.inf, np.float32))
    )
    rotary = None
    if config.position == "rope":
        tables = RotaryTables(config.head_dim, config.rope_theta).at(
            torch.arange(config.max_position_embeddings), config.max_position_embeddings,
            torch.float32,
        )  # fmt: skip
        cos, sin = (
            graph.node(
                "Unsqueeze",
                graph.node("Gather", graph.constant(table.numpy(), f"rotary.{name}"), positions),
                graph.constant([2]),
            )
            for name, table in zip(("cos", "sin"), tables, strict=True)
        )
        rotary = (cos, sin)
    num_visible = ""
    if config.temperature.length_scaled:
        if config.causal:
            num_visible = graph.node("Add", positions, one)
        else:
            num_visible = graph.node("ReduceSum", mask, graph.constant([1]))
        num_visible = graph.node("Unsqueeze", num_visible, graph.constant([1, 3]))
        num_visible = graph.cast(num_visible, "FLOAT")
    return Shared(stream, hidden, graph.cast(own, "FLOAT"), rotary, num_visible)


def _block(
    graph: Graph, rounding: Rounding, block: Block, name: str, stream: str, shared: Shared,
    cached: bool,
) -> str:  # fmt: skip
    """The stream after both sublayers."""
    pre, post = block.placement == "pre", block.placement == "post"

    def sublayer(what: str, stream: str) -> str:
        module, join_name = {
            "attention": (block.self_attn, f"{name}.attention_connection"),
            "mlp": (block.mlp, f"{name}.mlp_connection"),
        }[what]
        connection = getattr(block, f"{what}_connection")
        if module is None or connection is None:
            return stream
        norm = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}[what]
        branch = stream
        if pre:
            graph.place = f"{name}.{norm}"
            branch = _norm(graph, getattr(block, norm), stream, f"{name}.{norm}")
        place = f"{name}.{'self_attn' if what == 'attention' else 'mlp'}"
        graph.place = place
        branch = rounding.at(f"{place}:input", branch)
        if isinstance(module, Attention):
            branch = attention(graph, rounding, module, place, branch, shared, cached)
        else:
            branch = _mlp(graph, rounding, module, place, branch)
        branch = rounding.at(f"{place}:output", branch)
        graph.place = join_name
        return rounding.at(
            f"{join_name}:output", join(graph, connection, stream, branch, shared.embedding)
        )

    def after(norm: str, stream: str) -> str:
        graph.place = f"{name}.{norm}"
        return _norm(graph, getattr(block, norm), stream, graph.place) if post else stream

    stream = after("post_attention_layernorm", sublayer("attention", stream))
    return after("post_feedforward_layernorm", sublayer("mlp", stream))


def _mlp(graph: Graph, rounding: Rounding, module: MLP, name: str, x: str) -> str:
    up = linear(graph, rounding, f"{name}.up_proj", module.up_proj, x)
    if module.gate_proj is not None:
        gate = linear(graph, rounding, f"{name}.gate_proj", module.gate_proj, x)
        gate = rounding.at(f"{name}.act:output", _activated(graph, module.act, gate))
        middle = graph.node("Mul", gate, up)
    else:
        middle = rounding.at(f"{name}.act:output", _activated(graph, module.act, up))
    return linear(graph, rounding, f"{name}.down_proj", module.down_proj, middle)


def _activated(graph: Graph, act: nn.Module, x: str) -> str:
    kind = type(act).__name__
    if kind == "GELU":
        return graph.node("Gelu", x)  # the erf form
    if kind == "SiLU":
        return graph.node("Mul", x, graph.node("Sigmoid", x))
    rectified = graph.node("Relu", x)
    return graph.node("Mul", rectified, rectified) if kind == "SquaredReLU" else rectified


def _head(graph: Graph, rounding: Rounding, model: Transformer, x: str) -> str:
    tied = model.lm_head.weight is model.embed_tokens.weight
    if not tied or id(model.lm_head.weight) in rounding.weights:
        return linear(graph, rounding, "lm_head", model.lm_head, x)
    table = graph.node("Transpose", "embed_tokens.weight", perm=[1, 0])
    return graph.node("MatMul", rounding.at("lm_head:input", x), table)


def _norm(graph: Graph, module: nn.Module, x: str, name: str) -> str:
    weight = graph.constant(_vector(module.get_parameter("weight")), f"{name}.weight")
    if isinstance(module, nn.LayerNorm):
        bias = graph.constant(_vector(module.get_parameter("bias")), f"{name}.bias")
        return graph.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=module.eps)
    square = graph.node("Pow", x, graph.constant(2.0))
    mean = graph.node("ReduceMean", square, graph.constant([-1]))
    eps: Any = module.eps
    root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(float(eps))))
    return graph.node("Mul", graph.node("Div", x, root), weight)


def _pooled(graph: Graph, stream: str, mask: str, num_past: str, causal: bool) -> str:
    """One vector a text [B, D]: the last token of a causal model, else the mean of tokens."""
    weight = graph.cast(mask, "FLOAT")  # no cache here, so that mask and stream are as long
    if causal:
        place = graph.node("CumSum", weight, graph.constant(1))
        place = graph.node("Mul", place, weight)
        last = graph.node("ReduceMax", place, graph.constant([1]))
        weight = graph.cast(graph.node("Equal", place, last), "FLOAT")
    total = graph.node("ReduceSum", weight, graph.constant([1]))
    total = graph.node("Max", total, graph.constant(1.0))
    weight = graph.node("Unsqueeze", weight, graph.constant([2]))
    summed = graph.node("ReduceSum", graph.node("Mul", stream, weight), graph.constant([1]),
                        keepdims=0)  # fmt: skip
    return graph.node("Div", summed, total)


def _vector(parameter: nn.Parameter) -> np.ndarray:
    return parameter.detach().cpu().float().numpy()
