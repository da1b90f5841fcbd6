"""A quantised model as a folder: `save_quantized`, and `load_quantized` to have it back.

    model.safetensors   packed codes and scales (`quant.bits`), everything else as it was
    config.json         the model's own, with `quantization_config`: scheme, scope, ranges

Whole or not there: written under a temporary name, which then takes the place of the folder of
before in one step, so that an interrupted save leaves that one (`skipless.outputs`). A loaded model
gives the same bits, simulated and on integers. transformers reads folders of its models itself
after `import skipless.hf`; the layout "compressed-tensors" is for programs that know that package
(vLLM, transformers), and says of activations only what it has words for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from skipless.errors import UserError, check_choice
from skipless.export.compressed_tensors import settings_of
from skipless.jsonable import parse_json, read_text
from skipless.model import Transformer
from skipless.outputs import free_folder, replaced_folder
from skipless.packed import (
    CONFIG,
    LAYOUTS,
    MODEL_TYPE,
    WEIGHTS,
    holds_decoder,
    load_packed,
    read_packed_config,
)
from skipless.quant import Quantization, quantization, to_integer
from skipless.quant.bits import SUFFIXES, unpack_weight
from skipless.quant.saved import saved_form


def save_quantized(
    model: nn.Module,
    directory: str | Path,
    *,
    layout: str = "skipless",
    beside: Callable[[Path], Any] | None = None,
) -> Path:
    """Write a quantised model to `directory`; returns it.

    `model` is ours or transformers', after `quantize`. `beside(folder)` writes what else belongs
    there, such as `tokenizer.save_pretrained`. A folder that holds a quantised model
    is replaced, in one step. Raises UserError for other folders, for what cannot be saved
    (`quant.saved`), and when the disk refuses; nothing was then changed.
    """
    from safetensors.torch import save_file

    check_choice("layout", layout, LAYOUTS)
    path = Path(directory)
    _check_free(path)  # before anything is packed
    settings, form = None, "skipless"
    if layout != "skipless" and isinstance(model, Transformer):
        raise UserError(
            f"the layout {layout} is read by transformers, which has no {type(model).__name__}; "
            "quantise skipless.hf.converting.from_transformer(model) instead, as `skipless export` "
            "does, or use the layout skipless"
        )
    if layout != "skipless":
        settings, form = settings_of(model)
    tensors, own = saved_form(model, form)
    settings = settings or own
    config = _config_of(model, settings)
    with replaced_folder(path, _check_free) as temporary:
        if isinstance(model, Transformer):
            text = json.dumps(config, indent=2) + "\n"
            (temporary / CONFIG).write_text(text, encoding="utf-8")
        else:
            tensors = _untied(model, tensors)
            _write_transformers_config(model, temporary, settings)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)  # safetensors makes it 0600
        if beside is not None:
            beside(temporary)
    return path


def load_quantized(directory: str | Path, *, integer: bool = False) -> Any:
    """The model of such a folder, in eval mode; with `integer` computed with integers.

    Raises UserError for a folder that holds no quantised model, or a damaged one.
    """
    path = Path(directory)
    config = read_packed_config(path)
    if holds_decoder(config):
        model = load_packed(path, config)
    else:
        import skipless.hf  # noqa: F401  teaches transformers the format
        from skipless.surgery.reading import read_model

        model = read_model(path)
    model.eval()
    return to_integer(model) if integer else model


def is_quantized(directory: str | Path) -> bool:
    """Whether the folder holds a model of ours that `save_quantized` wrote."""
    try:
        return holds_decoder(read_packed_config(Path(directory)))
    except UserError:
        return False


def read_weights(directory: str | Path, record: Quantization) -> dict[str, Tensor]:
    """{name: rounded weight [out, in]} of a folder of either layout, for the weights of `record`.

    Raises UserError for a damaged folder.
    """
    from safetensors.torch import load_file

    tensors = load_file(Path(directory) / WEIGHTS)
    found = {}
    for weight in record.weights:
        stem, scheme = weight.name.removesuffix("weight"), weight.scheme
        parts = {s: tensors[stem + s] for s in SUFFIXES if stem + s in tensors}
        codes = unpack_weight(weight.name, parts, scheme.weight_bits, scheme.group_size)
        found[weight.name] = codes.dequantize().flatten(1)
    return found


def _check_free(path: Path) -> None:
    """UserError for a file, a folder of something else, and a path that no disk can hold."""
    if os.path.isfile(path):  # False for what is no path
        raise UserError(f"{path} is a file; name a folder")
    try:
        free_folder(path)
        return
    except UserError:
        if not os.path.isdir(path):
            raise
    try:
        config = parse_json(read_text(path / CONFIG), where=CONFIG)
        method = config["quantization_config"]["quant_method"]
    except (UserError, KeyError, TypeError):
        method = None
    if method not in LAYOUTS:
        raise UserError(f"{path} holds something else; name a folder that does not exist")


def _config_of(model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    if isinstance(model, Transformer):
        return {
            "model_type": MODEL_TYPE, "architectures": [type(model).__name__],
            "model": model.config.to_dict(), "quantization_config": settings,
        }  # fmt: skip
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        raise UserError(
            f"{type(model).__name__} is neither a skipless nor a transformers model; keep "
            "skipless.quant.saved.saved_form(model) in a file of your own"
        )
    if not type(model).__module__.startswith(("transformers.", "skipless.hf.")):
        raise UserError(
            f"{type(model).__name__} is changed or your own, and no stock transformers reads it; "
            "unpatch(model) first, or keep skipless.quant.saved.saved_form(model)"
        )
    return {}


def _write_transformers_config(model: Any, folder: Path, settings: dict[str, Any]) -> None:
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    file = folder / CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = settings
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _untied(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Without the names that transformers ties to others when it loads."""
    record = quantization(model)
    assert record is not None, "saved_form has looked"
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(
        model, "_tied_weights_keys", None
    )
    targets = set(tied or ()) if getattr(model.config, "tie_word_embeddings", True) else set()
    kept = {weight.name for weight in record.weights}
    sources = set((tied or {}).values()) if isinstance(tied, dict) else set()
    present = set(tensors) | kept
    return {n: t for n, t in tensors.items() if n not in targets or not sources & present}
