"""Packed folders of our own decoder, as `skipless.export.save_quantized` writes them: reading.

    read_packed_config(path)   config.json, checked
    holds_decoder(config)      whether it is of a `Transformer`, not of a model of transformers
    load_packed(path, config)  that `Transformer`, quantised, bit for bit as saved

Read by `skipless.export` and `skipless.hf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from skipless.config import ModelConfig
from skipless.errors import UserError
from skipless.jsonable import parse_json, read_text
from skipless.model import Transformer
from skipless.outputs import set_aside
from skipless.quant.saved import METHOD, check_settings, is_packed, resume

__all__ = ["CONFIG", "LAYOUTS", "MODEL_TYPE", "WEIGHTS", "holds_decoder", "load_packed",
           "read_packed_config"]  # fmt: skip

LAYOUTS = ("skipless", "compressed-tensors")
MODEL_TYPE = "skipless"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_packed_config(path: Path) -> dict[str, Any]:
    """config.json of a packed folder. Raises UserError for a damaged one, for other folders, and
    for the layout that transformers reads."""
    file = path / CONFIG
    config = parse_json(read_text(file), where=str(file)) if file.is_file() else {}
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    if (old := set_aside(path)) is not None:
        raise UserError(
            f"{path} was being replaced when its process was killed, and what it held is whole in "
            f"{old}; rename that folder"
        )
    if isinstance(settings, dict) and settings.get("quant_method") == LAYOUTS[1]:
        raise UserError(
            f"{path} is in the layout {LAYOUTS[1]}: transformers reads it where that package is "
            "installed (after `import skipless.hf`, if it was made of a run), and `skipless "
            "generate` does"
        )
    if not isinstance(settings, dict) or settings.get("quant_method") != METHOD:
        raise UserError(
            f"{path} holds no model quantised by skipless; save one with save_quantized or "
            "`skipless export`"
        )
    check_settings(settings, str(file))
    return config


def holds_decoder(config: dict[str, Any]) -> bool:
    """Whether the folder holds a `Transformer`; our models in transformers have flat settings."""
    return config.get("model_type") == MODEL_TYPE and "model" in config


def load_packed(path: Path, config: dict[str, Any]) -> Transformer:
    """The decoder of the folder, not yet in eval mode. Raises UserError for damaged weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    settings = config["quantization_config"]
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path / WEIGHTS} cannot be read ({error}); save it again") from None
    plain = {n: t for n, t in tensors.items() if not is_packed(n, settings)}
    with torch.device("meta"):  # to draw weights that the file replaces takes long
        model = Transformer(ModelConfig.from_dict(config["model"], where="model."))
    own = model.state_dict()
    tied_too = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    needed = {n for n, _ in model.named_parameters()} | (set(own) - tied_too)
    missing = needed - set(plain) - set(settings["weights"])
    wrong = [n for n, t in plain.items() if n not in own or own[n].shape != t.shape]
    if missing or wrong:
        name = sorted(missing or wrong)[0]
        raise UserError(f"{name} in {path} does not fit its config.json; save the model again")
    dtype = next((t.dtype for t in plain.values() if t.is_floating_point()), None)
    model.to_empty(device="cpu").to(dtype)
    model.load_state_dict(plain, strict=False)
    resume(model, tensors, settings)
    return model
