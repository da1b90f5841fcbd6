"""ONNX Runtime as an engine of integer products, where it is installed (Q4).

One MatMulInteger a layer, from activations as unsigned bytes (code + 128, zero point 128). Its
8-bit kernels for unsigned activations and SIGNED weights sum pairs in 16 bits on processors without
VNNI, which saturates; unsigned by unsigned does not. So weights are signed only where the processor
has VNNI. `hardware` runs worst-case codes through it all the same, and a saturating build is
never used. Graphs are made by hand from the `onnx` package. Read by `integers.engines`.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from skipless.packages import not_installed
from skipless.quant.integers.building import supported_levels
from skipless.quant.integers.products import INT32_EXACT, Engine, Prepared, Problem

ZERO = 128  # the zero point of unsigned codes


class OnnxRuntimeEngine(Engine):
    """onnxruntime's MatMulInteger: 8-bit weights and activations, sums in int32."""

    name = "onnxruntime"

    def unavailable(self, device: str) -> str:
        if device != "cpu":
            return f"it runs on the CPU here, not on {device}"
        return _missing()

    def refuses(self, problem: Problem) -> str:
        if problem.weight_bits > 8 or problem.activation_bits > 8:
            return "weights and activations have at most 8 bits"
        if problem.bound >= INT32_EXACT:
            return f"{problem.in_features} inputs leave the range of int32"
        return self.unavailable(problem.device)

    def pack(self, codes: Tensor, problem: Problem) -> Session:
        return Session(_graph(codes.cpu()), torch.get_num_threads())

    def sums(self, prepared: Prepared, codes: Tensor) -> Tensor:
        unsigned = (codes.to(torch.int16) + ZERO).to(torch.uint8).contiguous()
        return prepared.data.run(unsigned)


class Session:
    """A loaded graph; copies share it, and a pickle makes it anew."""

    def __init__(self, graph: bytes, threads: int) -> None:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.graph, self.threads = graph, threads
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    @property
    def num_bytes(self) -> int:
        """Of the graph, which is nearly all weights."""
        return len(self.graph)

    def run(self, codes: Tensor) -> Tensor:
        """int32 sums [tokens, out] of uint8 codes [tokens, in]."""
        return torch.from_numpy(self._session.run(None, {"x": codes.numpy()})[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self

    def __reduce__(self) -> tuple:
        return Session, (self.graph, self.threads)


@lru_cache(maxsize=1)
def _missing() -> str:
    for name in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            return str(not_installed(name))
    return ""


def _graph(codes: Tensor) -> bytes:
    """sums = (x - 128) (w - zero) for weight codes [out, in]."""
    import numpy as np
    from onnx import (  # pyright: ignore[reportMissingImports]
        TensorProto,
        helper,
        numpy_helper,
    )

    signed = "vnni" in supported_levels()
    zero, kind = (0, np.int8) if signed else (ZERO, np.uint8)
    out, width = codes.shape
    constants = {
        "w": (codes.t().numpy().astype(np.int16) + zero).astype(kind),
        "x_zero": np.array(ZERO, np.uint8),
        "w_zero": np.array(zero, kind),
    }
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w", "x_zero", "w_zero"], ["sums"])], "layer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["tokens", width])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, ["tokens", out])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8  # read by runtimes back to 1.10
    return model.SerializeToString()
