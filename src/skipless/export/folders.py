"""A run or a Hugging Face folder quantised and saved: what `skipless export` does.

Static ranges and methods that look at activations need text: a run brings its own, the training
part of it; other models read `text`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skipless.errors import UserError
from skipless.export.quantized import save_quantized
from skipless.outputs import free_folder
from skipless.quant import Scheme, quantization, quantize
from skipless.quant.methods import needs_data, parse_methods
from skipless.surgery.reading import read_model
from skipless.surgery.slimming.opening import holds_run, open_source
from skipless.surgery.sources import copy_tokenizer, find_folder
from skipless.train import load_run


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


def export_folder(
    model: str,
    out: str | Path,
    scheme: str,
    *,
    scope: str = "linear",
    method: str = "rtn",
    overrides: Iterable[str] = (),
    include_head: bool = False,
    layout: str = "skipless",
    text: Sequence[str] = (),
    num_tokens: int = 4096,
) -> Exported:
    """Quantise `model` (a run, a Hugging Face folder, a name of the catalog) and save it to `out`.

    Raises UserError for an `out` that holds something and as `quantize` and `save_quantized` do.
    """
    path, folder = free_folder(out), find_folder(model)
    parsed = Scheme.parse(scheme).with_overrides(overrides)
    needs_text = parsed.needs_calibration or needs_data(parse_methods(method))
    is_run = holds_run(folder)
    if text and not needs_text:
        raise UserError(f"{parsed} by {method} looks at no activations; leave the text out")
    batches = None
    run = load_run(folder) if is_run else None
    if needs_text:
        source = open_source(folder, text, num_tokens)
        loaded, batches = source.model, source.chosen_on
    else:
        loaded = run.model if run is not None else read_model(folder)

    def beside(target: Path) -> None:
        if run is not None:
            shutil.copy(run.data.tokenizer_path, target / "tokenizer.json")
        else:
            copy_tokenizer(folder, target)

    full_bytes = sum(p.numel() * p.element_size() for p in loaded.parameters())
    quantize(loaded, parsed, scope, method=method, include_head=include_head, calibration=batches)
    record = quantization(loaded)
    assert record is not None, "quantize leaves a record"
    save_quantized(loaded, path, layout=layout, beside=beside)
    size = (path / "model.safetensors").stat().st_size
    return Exported(path=path, description=record.describe(), num_bytes=size, full_bytes=full_bytes)
