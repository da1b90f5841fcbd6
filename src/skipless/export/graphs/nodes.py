"""An ONNX graph under construction: values are names, constants are numpy arrays.

Opset 21 is the first whose QuantizeLinear knows int16. Read by the other files of this folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np

OPSET = 21
IR_VERSION = 10
"""The oldest that goes with the opset: ONNX Runtime from 1.18 on reads it."""


class Graph:
    """Nodes in order of computation, with the constants they read."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._small: dict[tuple, str] = {}
        self._count = 0
        self.place = ""
        """What the names of new values begin with: the module that they belong to."""

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node; returns the name of its output."""
        return self.node_many(op, 1, *inputs, **attributes)[0]

    def node_many(self, op: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Append a node with several outputs; returns their names."""
        from onnx import helper  # pyright: ignore[reportMissingImports]

        outputs = [self._fresh(op) for _ in range(count)]
        name = outputs[0]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, **attributes))
        return outputs

    def rename(self, value: str, name: str) -> str:
        """Give a value the name that an output of the graph has."""
        from onnx import helper  # pyright: ignore[reportMissingImports]

        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        return name

    def constant(self, value: Any, name: str = "") -> str:
        """A constant; numbers and short lists of the same value are kept once.

        Python integers become int64, floats float32.
        """
        array = np.asarray(value)
        if not name:
            if not isinstance(value, np.ndarray | np.generic):
                array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
            key = (str(array.dtype), array.shape, array.tobytes())
            if key not in self._small:
                self._small[key] = f"constant_{len(self._small)}"
            name = self._small[key]
        self.constants.setdefault(name, np.ascontiguousarray(array).reshape(array.shape))
        return name

    def add_input(self, name: str, kind: str, shape: list[int | str]) -> str:
        """An input of the graph; `kind` is a name of TensorProto's, sizes by name are free."""
        self.inputs.append(_info(name, kind, shape))
        return name

    def add_output(self, value: str, name: str, kind: str, shape: list[int | str]) -> None:
        """An output of the graph."""
        self.rename(value, name)
        self.outputs.append(_info(name, kind, shape))

    def cast(self, value: str, kind: str) -> str:
        """`value` in another type, a name of TensorProto's."""
        from onnx import TensorProto  # pyright: ignore[reportMissingImports]

        return self.node("Cast", value, to=getattr(TensorProto, kind))

    def _fresh(self, op: str) -> str:
        self._count += 1
        return f"{self.place}{'/' if self.place else ''}{op}_{self._count}"


def _info(name: str, kind: str, shape: list[int | str]) -> Any:
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]

    return helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)
