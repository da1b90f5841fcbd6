"""What `skipless export` does: a model of the disk, quantised if asked, in one of `FORMATS`.

    skipless             packed integers, scales, scheme: a folder (`quantized.py`)
    compressed-tensors   the same in the layout of that package
    hf                   a run for transformers (`skipless.hf.exporting`)
    onnx                 a graph, or a folder with two (`graphs/`)
    llama                a folder for stock transformers, gains folded (`surgery.slimming`)
    gguf                 a file for llama.cpp (`llama/`)

Static ranges and methods that look at activations need text: a run brings its own, the training
part of it; other models read `text`. Each exporter reads back what it wrote before it gets its
name, and tells the largest difference.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipless.errors import UserError
from skipless.export.quantized import is_quantized, load_quantized, read_weights, save_quantized
from skipless.model import Transformer
from skipless.outputs import free_folder
from skipless.packages import need
from skipless.quant import Scheme, quantization, quantize
from skipless.quant.methods import needs_data, parse_methods
from skipless.surgery.folders import sample_batch
from skipless.surgery.reading import read_model
from skipless.surgery.saving import MODEL_TYPE
from skipless.surgery.slimming.folding import difference, sample_inputs
from skipless.surgery.slimming.opening import holds_run, open_calibrated
from skipless.surgery.sources import copy_tokenizer, find_folder, model_type
from skipless.train import LoadedRun, load_run

FORMATS = ("skipless", "compressed-tensors", "hf", "onnx", "llama", "gguf")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `export_folder` wrote."""

    path: Path
    description: str
    """Scheme, how many weights, what stays in full precision."""
    num_bytes: int
    """Of the weights' file."""
    full_bytes: int
    """What the same weights take before quantising."""
    difference: float
    """Of what was read back: largest |difference of a logit| / largest |logit|; of weights instead
    in the layout compressed-tensors, whose activations are the reader's."""


@dataclass(kw_only=True)
class Opened:
    """A model that was read, and what goes beside its weights."""

    model: Any
    folder: Path
    run: LoadedRun | None = None
    texts: Sequence[Any] = ()
    """Batches to compare on, where a text was opened, held-out ones first."""

    def beside(self, target: Path) -> None:
        """Copy the tokenizer and what else belongs there to the folder `target`."""
        if self.run is not None and not isinstance(self.model, Transformer):
            length = self.run.config.model.max_position_embeddings
            self.run.tokenizer.for_transformers(length).save_pretrained(target)
        elif self.run is not None:
            shutil.copy(self.run.tokenizer_path, target / "tokenizer.json")
            length = self.run.config.model.max_position_embeddings
            about = self.run.tokenizer.config_for_transformers(length)
            text = json.dumps(about, indent=2) + "\n"
            (target / "tokenizer_config.json").write_text(text, encoding="utf-8")
        else:
            copy_tokenizer(self.folder, target)


def open_quantized(
    model: str,
    scheme: str | None,
    *,
    scope: str = "linear",
    method: str = "rtn",
    overrides: Iterable[str] = (),
    include_head: bool = False,
    include_convolutions: bool = False,
    text: Sequence[str] = (),
    num_tokens: int = 4096,
    for_transformers: bool = False,
) -> Opened:
    """Read `model` (a run, a Hugging Face folder, a name of the catalog) and quantise it, if
    `scheme` says how. `for_transformers`: a run as its class in `skipless.hf`.

    Raises UserError as `quantize` does, for a text that nobody reads, and for a patched model,
    which no packed form holds.
    """
    folder = find_folder(model)
    _refuse_patched(folder)
    parsed = None if scheme is None else Scheme.parse(scheme).with_overrides(overrides)
    methods = parse_methods(method)
    needs_text = parsed is not None and (parsed.needs_calibration or needs_data(methods))
    if text and not needs_text:
        raise UserError(f"{parsed} by {method} looks at no activations; leave the text out")
    run = load_run(folder) if holds_run(folder) else None
    batches, texts = None, ()
    if needs_text:
        source = open_calibrated(folder, text, num_tokens)
        loaded, batches = source.model, source.chosen_on
        texts = (*source.held_out, *batches)
    else:
        loaded = run.model if run is not None else read_model(folder)
    if for_transformers and isinstance(loaded, Transformer):
        from skipless.hf.converting import from_transformer, inner_name

        loaded = from_transformer(loaded, tokenizer=None if run is None else run.tokenizer)
        if parsed is not None:
            named = [f"{inner_name(pattern)}={text}" for pattern, text in parsed.overrides]
            parsed = parsed.base.with_overrides(named)
    if parsed is not None:
        quantize(
            loaded, parsed, scope, method=method, include_head=include_head,
            include_convolutions=include_convolutions, calibration=batches,
        )  # fmt: skip
    return Opened(model=loaded, folder=folder, run=run, texts=texts)


def _refuse_patched(folder: Path) -> None:
    """UserError for a folder of `skipless patch`, whose connections no packed form holds."""
    if holds_run(folder) or model_type(folder) != MODEL_TYPE:
        return
    raise UserError(
        f"{folder} is a patched model, and packed integers cannot hold its connections; "
        f"`skipless fold {folder} --out FOLDER` makes a stock model of it where its gains fold, "
        f"which can be packed, and `skipless generate {folder} --scheme W8A8` quantises it unpacked"
    )


def export_folder(
    model: str,
    out: str | Path,
    scheme: str,
    *,
    scope: str = "linear",
    method: str = "rtn",
    overrides: Iterable[str] = (),
    include_head: bool = False,
    include_convolutions: bool = False,
    layout: str = "skipless",
    text: Sequence[str] = (),
    num_tokens: int = 4096,
) -> Exported:
    """Quantise `model` (a run, a Hugging Face folder, a name of the catalog) and save it to `out`.

    Of a run the layout compressed-tensors holds its class in `skipless.hf`, since that layout is
    read by transformers. Raises UserError for an `out` that holds something, as `quantize` and
    `save_quantized` do, and when what is read back differs.
    """
    path = free_folder(out)
    foreign = layout == "compressed-tensors"
    if foreign:
        need("transformers", why="which reads the layout compressed-tensors")
    opened = open_quantized(
        model, scheme, scope=scope, method=method, overrides=overrides, include_head=include_head,
        include_convolutions=include_convolutions, text=text, num_tokens=num_tokens,
        for_transformers=foreign,
    )  # fmt: skip
    loaded = opened.model
    record = quantization(loaded)
    assert record is not None, "quantize leaves a record"
    found: list[float] = []

    def beside(folder: Path) -> None:
        opened.beside(folder)
        found.append(_difference(loaded, folder, layout))
        if found[0] != 0:
            raise UserError(
                f"what was read back from {path} differs by {found[0]:.2g} of the largest number; "
                "nothing was written, so report the model's config.json"
            )
        free_folder(path)  # another process may have been there

    full_bytes = sum(p.numel() * p.element_size() for p in loaded.parameters())
    save_quantized(loaded, path, layout=layout, beside=beside)
    size = (path / "model.safetensors").stat().st_size
    return Exported(
        path=path, description=record.describe(), num_bytes=size, full_bytes=full_bytes,
        difference=found[0],
    )  # fmt: skip


def _difference(model: Any, folder: Path, layout: str) -> float:
    """How far the model read from `folder` is from `model`."""
    if layout == "skipless":
        own = isinstance(model, Transformer)
        batch = sample_inputs(model, None) if own else sample_batch(model)
        return difference(model, load_quantized(folder), batch)
    record = quantization(model)
    assert record is not None, "it was just quantised"
    read, worst = read_weights(folder, record), 0.0
    for weight in record.weights:
        mine = weight.matrix()
        distance = (read[weight.name].to(mine) - mine).abs().max() / mine.abs().max()
        worst = max(worst, float(distance))
    return worst


def export_onnx_of(
    model: str,
    out: str | Path,
    scheme: str | None = None,
    *,
    cached: bool = False,
    **options: Any,
) -> Any:
    """A run, or a folder that `skipless export` packed, as ONNX; options as `open_quantized` takes.

    Returns `graphs.WrittenOnnx`. Raises UserError as `graphs.export_onnx` does, and for models that
    are not ours.
    """
    from skipless.export.graphs import export_onnx

    need("onnx", "onnxruntime")
    folder = Path(model)
    if is_quantized(folder):
        if scheme is not None:
            raise UserError(f"{model} is quantised already; leave --scheme out")
        loaded = load_quantized(folder)

        def beside(target: Path) -> None:
            copy_tokenizer(folder, target)

        return export_onnx(loaded, out, cached=cached, beside=_tokenizer_only(beside))
    found = find_folder(model)
    if not holds_run(found):
        raise UserError(
            f"{model} is a model of transformers, and ONNX is written of our own decoder; use "
            "transformers' exporter (the package optimum), or --format gguf for a Llama"
        )
    opened = open_quantized(model, scheme, **options)
    ids = _ids(opened)
    return export_onnx(opened.model, out, cached=cached, ids=ids,
                       beside=_tokenizer_only(opened.beside))  # fmt: skip


def _tokenizer_only(beside: Any) -> Any:
    """What goes beside ONNX files: the tokenizer, and no config.json of another format."""

    def copy(target: Path) -> None:
        beside(target)
        for name in ("config.json", "generation_config.json"):
            (target / name).unlink(missing_ok=True)

    return copy


def _ids(opened: Opened) -> Tensor | None:
    """Tokens to compare on [B, T], held-out ones first, where a text was opened; else None."""
    from skipless.export.graphs.checking import sample_size

    if not opened.texts:
        return None
    _, length = sample_size(opened.model)
    pieces = [piece for batch in opened.texts for piece in batch[0].split(length, dim=1)]
    return torch.cat([piece for piece in pieces if piece.shape[1] == pieces[0].shape[1]])
