"""How a sublayer joins the stream, as nodes: C1 to C7, C9, C10 and C11. Read by `decoder.py`.

The weights are those of now: a half annealed C7 is written with the weight that it has.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.export.graphs.nodes import Graph
from skipless.model.connections import Connection, Fixed

SUPPORTED = (
    "residual", "none", "fixed", "rezero", "layerscale", "interpolate", "anneal", "learned",
    "gated", "sphere",
)  # fmt: skip


def check_join(name: str, connection: Connection) -> None:
    """Raise UserError, naming the place, for a kind that has no nodes here."""
    kind = connection.config.kind
    if kind in SUPPORTED:
        return
    why = "keeps statistics of all tokens so far, which past keys and values do not hold"
    raise UserError(
        f"{name} is of kind {kind!r}, which "
        + (why if kind == "universal" else f"is none of {', '.join(SUPPORTED)}")
        + "; no ONNX file is written for it, and --format hf keeps it as it is"
    )


@torch.no_grad()
def join(graph: Graph, connection: Connection, stream: str, branch: str, embedding: str) -> str:
    """The new stream [B, T, D]."""
    kind = connection.config.kind
    if kind == "gated":
        return _gated(graph, connection, stream, branch)
    if kind == "sphere":
        x, f = _direction(graph, stream), _direction(graph, branch)
        gain = graph.constant(_array(connection.get_parameter("alpha")))
        moved = graph.node("Mul", graph.node("Sub", f, x), gain)
        return _direction(graph, graph.node("Add", x, moved))
    a, b, c = _weights(connection)
    joined = _scaled(graph, branch, b)
    if a is not None:
        joined = graph.node("Add", joined, _scaled(graph, stream, a))
    if c is not None:
        joined = graph.node("Add", joined, _scaled(graph, embedding, c))
    return joined


def _weights(connection: Connection) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(a, b, c) of C0, None for a 0 that costs nothing."""
    kind, one = connection.config.kind, torch.ones(1)
    if isinstance(connection, Fixed):
        a, b, c = (torch.tensor([float(w)]) for w in (connection.config.a, connection.config.b,
                                                      connection.config.c))  # fmt: skip
    else:
        gains, c = connection.gains(), torch.zeros(1)
        a = gains.get("a", torch.zeros(1) if kind == "none" else one)
        b = gains.get("b", one)
    return (None if not a.any() else a), b, (None if not c.any() else c)


def _scaled(graph: Graph, value: str, weight: Tensor) -> str:
    return value if bool((weight == 1).all()) else graph.node(
        "Mul", value, graph.constant(_array(weight))
    )  # fmt: skip


def _gated(graph: Graph, connection: Connection, stream: str, branch: str) -> str:
    weight = connection.get_parameter("gate_weight").reshape(-1, connection.hidden_size)
    product = graph.node("MatMul", stream, graph.constant(_array(weight.t())))
    bias = graph.constant(_array(connection.get_parameter("gate_bias")))
    gate = graph.node("Sigmoid", graph.node("Add", product, bias))
    kept = graph.node("Mul", stream, graph.node("Sub", graph.constant(1.0), gate))
    joined = graph.node("Add", kept, graph.node("Mul", branch, gate))
    return _scaled(graph, joined, torch.tensor([float(connection.config.scale)]))


def _direction(graph: Graph, value: str) -> str:
    """v / rms(v), as C11 does."""
    square = graph.node("Pow", value, graph.constant(2.0))
    mean = graph.node("ReduceMean", square, graph.constant([-1]))
    root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(1e-6)))
    return graph.node("Div", value, root)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().contiguous().numpy()
