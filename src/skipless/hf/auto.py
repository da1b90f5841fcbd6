"""The model types `skipless` and `skipless-patched` in transformers' Auto classes.

The first are our own models (`modeling.py`). Of the second: an Auto class reads config.json, looks
up the model class of its type and calls that class's `from_pretrained`. For the type of a patched
folder this registers a config that keeps what stands there, and in every Auto class a stand-in
whose `from_pretrained` is `skipless.surgery.load`. A folder is restored as the class it was saved
from; an Auto class made for other heads refuses it, where for a plain folder it would take the body
and leave weights out.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

from skipless.errors import UserError
from skipless.hf.body import SkiplessModel
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import SkiplessForCausalLM, SkiplessForSequenceClassification
from skipless.surgery.loading import load
from skipless.surgery.saving import MODEL_TYPE

__all__ = ["PatchedConfig", "register"]


class PatchedConfig(PreTrainedConfig):
    """Config of a patched folder as an Auto class sees it: the fields as written. The loaded model
    has the config of its own family."""

    model_type = MODEL_TYPE


def register() -> None:
    """Make the Auto classes know our models and patched folders. Repeating it changes nothing."""
    AutoConfig.register(SkiplessConfig.model_type, SkiplessConfig, exist_ok=True)
    for auto, cls in (
        (AutoModel, SkiplessModel),
        (AutoModelForCausalLM, SkiplessForCausalLM),
        (AutoModelForSequenceClassification, SkiplessForSequenceClassification),
    ):
        auto.register(SkiplessConfig, cls, exist_ok=True)
    AutoConfig.register(MODEL_TYPE, PatchedConfig, exist_ok=True)
    for value in vars(modeling_auto).values():
        mapping = getattr(value, "_model_mapping", None)
        if isinstance(value, type) and hasattr(mapping, "register"):
            value.register(PatchedConfig, _stand_in(value), exist_ok=True)


def _stand_in(auto: Any) -> type:
    class Patched:
        """Restores a patched folder; never instantiated."""

        config_class = PatchedConfig

        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, config: Any = None, **options: Any) -> Any:
            """`skipless.surgery.load(path)`; raises UserError when `auto` is for other classes."""
            name = (getattr(config, "architectures", None) or [""])[0]
            if name not in _class_names(auto):
                raise UserError(
                    f"{path} ({MODEL_TYPE}) holds a {name}, which {auto.__name__} does not make; "
                    "use the Auto class it was loaded with, or skipless.surgery.load"
                )
            attention = getattr(config, "_attn_implementation", None)
            if attention is not None:  # the Auto class has moved it from the options
                options.setdefault("attn_implementation", attention)
            options = {k: v for k, v in options.items() if k not in _OF_THE_AUTO_CLASS}
            return load(path, **options)

    return Patched


_OF_THE_AUTO_CLASS = ("adapter_kwargs", "trust_remote_code", "code_revision", "_from_auto")


def _class_names(auto: Any) -> set[str]:
    """Every model class that the Auto class makes (some families have several)."""
    names: set[str] = set()
    for value in auto._model_mapping._model_mapping.values():
        names |= {value} if isinstance(value, str) else set(value)
    return names
