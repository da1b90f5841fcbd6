"""transformers' `from_pretrained` for folders that `skipless.export.save_quantized` wrote.

    import skipless.hf
    model = AutoModelForCausalLM.from_pretrained("folder")   # quantised, bit for bit as saved
    skipless.quant.to_integer(model)                         # optional: computed with integers

`register` gives transformers the method "skipless": before loading, each quantised weight is
replaced by one of the packed shape, so that the packed codes load like any other tensor; afterwards
by the rounded values, and the scheme's hooks are put on. `model.save_pretrained` writes the packed
form again. Without the import, transformers meets weights of another shape and stops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from skipless.errors import UserError
from skipless.quant import quantization
from skipless.quant.saved import METHOD, check_settings, is_packed, resume, saved_form

__all__ = ["SkiplessQuantizationConfig", "SkiplessQuantizer", "register"]


class SkiplessQuantizationConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json as `skipless.quant.saved` writes it."""

    def __init__(self, **settings: Any) -> None:
        self.quant_method = METHOD  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in settings.items():
            setattr(self, name, value)


class SkiplessQuantizer(HfQuantizer):
    """Reads and writes packed weights; models come quantised, never to be quantised here."""

    requires_calibration = True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **options: Any
    ) -> Any:
        self._settings = self.quantization_config.to_dict()
        check_settings(self._settings, "config.json")
        everything = _names(checkpoint_files)
        names = [n for n in everything if is_packed(n, self._settings)]
        self._others = _read(checkpoint_files, [n for n in names if not n.endswith(".weight")])
        self._floats: dict[str, tuple[torch.Size, torch.dtype]] = {}
        stored = _shapes(checkpoint_files, [n for n in names if n.endswith(".weight")])
        for name in self._settings["weights"]:
            module, held = _module_of(model, name)
            if name not in stored:
                raise UserError(f"the folder has no packed {name}; it is damaged, save it again")
            self._floats[name] = held.shape, held.dtype
            shape, kind = stored[name]
            placeholder = torch.empty(shape, dtype=kind, device=held.device)
            module.weight = nn.Parameter(placeholder, requires_grad=False)
            if isinstance(module, nn.Embedding):
                # The module around it may draw positions in the table's shape, as Whisper's
                # encoder does its sinusoids, which the packed shape does not allow.
                parent: Any = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
                parent._is_hf_initialized = True
        plain = set(everything) - set(names)
        _check_whole(model, checkpoint_files, plain, self._settings["weights"])
        ignored = {rf"^{name}$".replace(".", r"\.") for name in self._others}
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()), *ignored,
        }  # fmt: skip
        return model

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        tensors = dict(self._others)
        for name, (shape, dtype) in self._floats.items():
            module, held = _module_of(model, name)
            tensors[name] = held.data
            empty = torch.empty(shape, dtype=dtype, device=held.device)
            module.weight = nn.Parameter(empty)
        model.tie_weights()
        resume(model, tensors, self._settings)
        self._others = {}
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict]:
        """What `save_pretrained` writes: the packed form while the model is quantised."""
        if quantization(model) is None:
            raise UserError(
                "the model was restored and its config still says how it was quantised; save its "
                "state_dict, or quantise it again and call skipless.export.save_quantized"
            )
        tensors, settings = saved_form(model)
        # it may have been restored and quantised by another scheme since it was loaded
        self.quantization_config = SkiplessQuantizationConfig(**settings)
        model.config.quantization_config = self.quantization_config
        return tensors, {}

    def is_serializable(self, *args: Any, **options: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    """Make transformers know the method. Repeating it changes nothing."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(SkiplessQuantizationConfig)
        register_quantizer(METHOD)(SkiplessQuantizer)


def _check_whole(model: Any, checkpoint_files: Any, plain: set[str], packed: Any) -> None:
    """Raise UserError unless the files hold what is not packed, in its shape: transformers would
    draw what is missing."""
    shapes = _shapes(checkpoint_files, list(plain))
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    ties |= {source: target for target, source in ties.items()}
    for name, parameter in model.named_parameters():
        if name in packed or (name not in shapes and {ties.get(name)} & {*shapes, *packed}):
            continue
        if name not in shapes:
            raise UserError(f"the folder has no {name}; it is damaged, save the model again")
        found, wanted = shapes[name][0], list(parameter.shape)
        if found != wanted:
            raise UserError(
                f"the folder holds {name} as {found} and its config.json wants {wanted}; it is "
                "damaged, save the model again"
            )


def _module_of(model: nn.Module, name: str) -> tuple[Any, Tensor]:
    try:
        module: Any = model.get_submodule(name.rpartition(".")[0])
        return module, module.weight
    except AttributeError:
        raise UserError(
            f"the folder holds {name}, which {type(model).__name__} does not have; load it as the "
            "class it was saved from"
        ) from None


def _files(checkpoint_files: Any) -> list[str]:
    return [str(file) for file in checkpoint_files or () if Path(file).suffix == ".safetensors"]


def _names(checkpoint_files: Any) -> list[str]:
    names: list[str] = []
    for file in _files(checkpoint_files):
        try:
            with safe_open(file, "pt") as opened:
                names += opened.keys()
        except SafetensorError as error:
            raise UserError(
                f"{file} cannot be read ({error}); it is cut short or damaged, save the model again"
            ) from None
    return names


def _read(checkpoint_files: Any, wanted: list[str]) -> dict[str, Tensor]:
    found = {}
    for file in _files(checkpoint_files):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if name in wanted}  # noqa: SIM118
    return found


_DTYPES = {"I32": torch.int32, "I16": torch.int16}


def _shapes(checkpoint_files: Any, wanted: list[str]) -> dict[str, tuple[list[int], torch.dtype]]:
    found = {}
    for file in _files(checkpoint_files):
        with safe_open(file, "pt") as opened:
            for name in set(opened.keys()) & set(wanted):
                part = opened.get_slice(name)
                found[name] = (part.get_shape(), _DTYPES.get(part.get_dtype(), torch.int8))
    return found
