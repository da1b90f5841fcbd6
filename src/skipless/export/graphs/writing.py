"""`export_onnx`: our decoder, quantised or not, as ONNX files that ONNX Runtime agrees with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from skipless import __version__
from skipless.errors import UserError
from skipless.export.graphs.checking import Comparison, compare, sample_ids
from skipless.export.graphs.decoder import build_graph, check_model
from skipless.export.graphs.files import SAFE, SETTINGS, WEIGHTS, Beside, save_graph
from skipless.export.places import free_file, written_file
from skipless.model import Transformer
from skipless.outputs import free_folder, written_folder
from skipless.packages import need
from skipless.quant import evaluation_mode, quantization
from skipless.surgery.checking import check_finite

PLAIN, CACHED = "model.onnx", "model_cached.onnx"


@dataclass(frozen=True, kw_only=True)
class WrittenOnnx:
    """What `export_onnx` wrote."""

    path: Path
    """The file, or the folder."""
    files: dict[str, Comparison]
    """By name of an ONNX file."""
    num_bytes: int
    max_length: int
    """Tokens that a call takes at most, past ones included."""

    def describe(self) -> str:
        """A line a file, and one of how much text it takes."""
        lines = [f"{name}  {found.describe()}" for name, found in self.files.items()]
        return "\n".join([*lines, f"up to {self.max_length:,} tokens, past ones included"])


def export_onnx(
    model: Transformer,
    out: str | Path,
    *,
    cached: bool = False,
    ids: Tensor | None = None,
    beside: Callable[[Path], Any] | None = None,
) -> WrittenOnnx:
    """Write `model` to `out`, in full precision or, after `quantize`, with integer codes.

    A name that ends in .onnx is one file, of a whole text or, with `cached`, of new tokens behind
    past keys and values. Any other is a folder with both (a model that has no use for a cache: one)
    and their weights beside them; `beside(folder)` adds to it. `ids` int64 [B, T] is what ONNX
    Runtime is compared on (`checking`), random ones by default. Raises UserError where a package is
    missing or `out` exists, for what no graph says, and when the logits differ; nothing is then
    written.
    """
    need("onnx", "onnxruntime")
    if not isinstance(model, Transformer):
        raise UserError(
            f"an ONNX file is made of our Transformer, not of {type(model).__name__}; for a model "
            "of transformers use its own exporter (optimum)"
        )
    check_finite(model, "the model")
    ids = sample_ids(model) if ids is None else ids.cpu()
    length = model.config.max_position_embeddings
    if Path(out).suffix == ".onnx":
        path = free_file(out, ".onnx")
        check_model(model, cached=cached)
        with evaluation_mode(model), written_file(path) as temporary:
            found = {path.name: _write(model, temporary, cached, ids, None)}
            size = temporary.stat().st_size
        return WrittenOnnx(path=path, files=found, num_bytes=size, max_length=length)
    path = free_folder(out)
    both = model.config.causal and model.config.num_labels is None
    check_model(model, cached=both)
    with evaluation_mode(model), written_folder(path) as folder:
        shared, found = Beside(folder / WEIGHTS), {}
        for name, with_cache in ((PLAIN, False), (CACHED, True))[: 1 + both]:
            found[name] = _write(model, folder / name, with_cache, ids, shared)
        if beside is not None:
            beside(folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
    return WrittenOnnx(path=path, files=found, num_bytes=size, max_length=length)


def _write(
    model: Transformer, path: Path, cached: bool, ids: Tensor, beside: Beside | None
) -> Comparison:
    save_graph(build_graph(model, cached=cached), path, _metadata(model), beside)
    return compare(model, path, ids, cached=cached)


def _metadata(model: Transformer) -> dict[str, str]:
    record, config = quantization(model), model.config
    found = {
        "max_length": str(config.max_position_embeddings), "vocab_size": str(config.vocab_size),
        "skipless.version": __version__, "skipless.config": json.dumps(config.to_dict()),
    }  # fmt: skip
    if record is not None:
        found |= {"skipless.scheme": str(record.scheme), "skipless.scope": record.scope,
                  SETTINGS: json.dumps(SAFE)}  # fmt: skip
    return found
