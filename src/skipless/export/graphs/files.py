"""ONNX files: weights inside or beside, what the file says of itself, and how to open it.

Signed 8-bit weights go through instructions that saturate on x86 processors without VNNI: ONNX
Runtime then gives wrong integers unless `session.x64quantprecision` is 1 (it costs nothing where
the processor is exact). And it may round activations to 8 bits by blocks in front of integer
weights, unless `session.qdq_matmulnbits_accuracy_level` is 1; the graphs are built so that it does
not come to that, as far as version 1.32 goes. A file cannot set either itself, so they stand in its
metadata, and `open_session` applies what it finds there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from skipless.errors import UserError
from skipless.export.graphs.nodes import IR_VERSION, OPSET, Graph
from skipless.packages import need

LARGEST = 2**31 - 2**20
"""Bytes that fit into one file of protobuf."""
WEIGHTS = "weights.bin"
SETTINGS = "skipless.session_options"
SAFE = {"session.x64quantprecision": "1", "session.qdq_matmulnbits_accuracy_level": "1"}
_INSIDE, _ALIGNMENT = 1024, 64


class Beside:
    """The file of weights that several graphs of one folder share."""

    def __init__(self, path: Path) -> None:
        self.path, self._places = path, {}
        path.write_bytes(b"")

    def place(self, array: Any) -> tuple[int, int]:
        """(offset, length) of an array in the file; equal ones are kept once."""
        content = array.tobytes()
        key = hashlib.sha256(content).digest()
        if key not in self._places:
            with self.path.open("ab") as file:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                self._places[key] = (file.tell(), len(content))
                file.write(content)
        return self._places[key]


def save_graph(graph: Graph, path: Path, metadata: dict[str, str], beside: Beside | None) -> None:
    """Write `graph` as an ONNX file, checked by the `onnx` package.

    Raises UserError for weights beyond what one file holds.
    """
    import onnx  # pyright: ignore[reportMissingImports]
    from onnx import helper  # pyright: ignore[reportMissingImports]

    size = sum(array.nbytes for array in graph.constants.values())
    if beside is None and size > LARGEST:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB and one ONNX file holds 2; name a folder, "
            "where they lie beside the graphs"
        )
    constants = [_tensor(name, array, beside) for name, array in graph.constants.items()]
    made = helper.make_model(
        helper.make_graph(graph.nodes, "decoder", graph.inputs, graph.outputs, constants),
        opset_imports=[helper.make_opsetid("", OPSET)], producer_name="skipless",
    )  # fmt: skip
    made.ir_version = IR_VERSION
    helper.set_model_props(made, metadata)
    path.write_bytes(made.SerializeToString())
    onnx.checker.check_model(str(path), full_check=beside is None and size < 2**28)


def _tensor(name: str, array: Any, beside: Beside | None) -> Any:
    from onnx import TensorProto, helper, numpy_helper  # pyright: ignore[reportMissingImports]

    if beside is None or array.nbytes <= _INSIDE:
        return numpy_helper.from_array(array, name)
    tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
    tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    offset, length = beside.place(array)
    for key, value in (("location", beside.path.name), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def session_options(path: str | Path, threads: int | None = None) -> Any:
    """onnxruntime.SessionOptions with the settings that the file at `path` asks for.

    Raises UserError where a package is missing, and for no ONNX file.
    """
    need("onnx", "onnxruntime")
    import onnx  # pyright: ignore[reportMissingImports]
    import onnxruntime  # pyright: ignore[reportMissingImports]

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own, or the file system's
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no ONNX file that can be read ({reason})") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of every constant that it has folded away
    if threads is not None:
        options.intra_op_num_threads = threads
    asked = {entry.key: entry.value for entry in model.metadata_props}.get(SETTINGS, "{}")
    try:
        for key, value in json.loads(asked).items():
            options.add_session_config_entry(key, value)
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f"{path} says {asked!r} for {SETTINGS}, which skipless does not write; export the "
            "model again"
        ) from None
    return options


def open_session(path: str | Path, threads: int | None = None) -> Any:
    """An onnxruntime.InferenceSession on the CPU, with the settings that the file asks for.

    Raises UserError as `session_options`, and for what ONNX Runtime does not take.
    """
    options = session_options(path, threads)
    import onnxruntime  # pyright: ignore[reportMissingImports]

    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own kinds have no common base but this
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be opened by ONNX Runtime ({reason}); export the model again, and keep "
            f"{WEIGHTS} beside the files of a folder"
        ) from None
