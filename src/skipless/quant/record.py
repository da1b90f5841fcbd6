"""What `quantize` did to a model, kept on it until `restore`; and what must not meet it meanwhile.

A quantised model is not quantised again, neither as part of a larger one nor in parts, since the
one restored last would bring rounded weights back. Other weights are not loaded into it: nothing
would round them, and integer layers would compute with the codes of the old ones. Read by
`quant.apply` and whatever asks for a model's `quantization`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from skipless.errors import UserError, counted
from skipless.heads import find_heads
from skipless.quant.activations import ActivationQuantizer, ForwardState
from skipless.quant.convolutions import is_convolution
from skipless.quant.targets import WeightTarget
from skipless.quant.transforms.changes import Changes, InputChange
from skipless.quant.weights import QuantizedWeight
from skipless.scheme import Scheme
from skipless.sites import ChoosesImplementation

ATTRIBUTE = "_skipless_quantization"
TRAINED = "_skipless_trained"
"""What `train_quantized` leaves on a layer while it trains."""
_PART = "_skipless_part"
_SAVE = "save_pretrained"
"""What transformers' models are saved with: it writes weights, and nothing of activations."""


@dataclass(kw_only=True)
class Quantization:
    """What is quantised in a model; `quantization(model)` returns it."""

    scheme: Scheme
    scope: str
    include_head: bool
    include_convolutions: bool = False
    weights: list[QuantizedWeight]
    activations: list[ActivationQuantizer]
    state: ForwardState
    handles: list[Any] = field(default_factory=list)
    eager: list[tuple[ChoosesImplementation, str]] = field(default_factory=list)
    """Attention modules that were switched to eager, and what they were before."""
    untouched: dict[str, list[str]] = field(default_factory=dict)
    """Modules whose matrices stay in full precision, by what they are (`find_untouched`)."""
    method: str = "rtn"
    changes: Changes = field(default_factory=Changes)
    """Parameters that a method scaled or rotated, with their originals."""
    inputs: dict[str, InputChange] = field(default_factory=dict)
    """What a method does to inputs when the model runs, by name of a layer or block: whatever reads
    weights without running the modules has to refuse or to do it."""
    notes: list[str] = field(default_factory=list)
    """What the methods did, a line each."""

    def describe(self) -> str:
        """One line: scheme, scope, how many weights and sites, what stays in full precision."""
        parts = []
        for what, names in self.untouched.items():
            more = f" and {len(names) - 3} more" if len(names) > 4 else ""
            parts.append(f"{what} {', '.join(names[:3] if more else names)}{more}")
        of_format = Counter(str(weight.scheme) for weight in self.weights)
        shares = ", ".join(f"{number} at {text}" for text, number in of_format.items())
        mixed = f" ({shares})" if self.scheme.overrides else ""
        by = "" if self.method == "rtn" else f" by {self.method}"
        weights, sites = len(self.weights), len(self.activations)
        return (
            f"{self.scheme}{by} in scope {self.scope}: {counted(weights, 'weight')}{mixed}, "
            f"{counted(sites, 'activation site')}; "
            + ("in full precision: " + "; ".join(parts) if parts else "every matrix quantised")
            + "".join(f"; {note}" for note in self.notes)
        )

    def keep_on(self, model: nn.Module) -> None:
        """Be the record of `model`, and watch what is loaded into it."""
        for weight in self.weights:
            setattr(model.get_submodule(weight.name.rpartition(".")[0]), _PART, True)
        self.handles.append(model.register_load_state_dict_pre_hook(self._before_loading))
        self.handles.append(model.register_load_state_dict_post_hook(self._after_loading))
        if hasattr(model, _SAVE) and getattr(model, "hf_quantizer", None) is None:
            vars(model)[_SAVE] = _refuse_to_save  # the plug-in of skipless.hf saves by itself
        setattr(model, ATTRIBUTE, self)

    def leave(self, model: nn.Module) -> None:
        """Take itself off the model. Hooks are removed by their handles."""
        for weight in self.weights:
            vars(model.get_submodule(weight.name.rpartition(".")[0])).pop(_PART, None)
        if vars(model).get(_SAVE) is _refuse_to_save:
            delattr(model, _SAVE)
        delattr(model, ATTRIBUTE)

    def _before_loading(self, module: nn.Module, tensors: Any, prefix: str, *rest: Any) -> None:
        about = rest[0] if rest else {}
        for weight in self.weights:
            new = tensors.get(prefix + weight.name)
            if new is None:
                continue
            now = weight.parameter.detach()
            same = new.shape == now.shape and torch.equal(new.to(now.device, now.dtype), now)
            if weight.is_changed or not same or about.get("assign_to_params_buffers"):
                raise UserError(
                    f"the model is quantised with {self.scheme} and {prefix + weight.name} would "
                    "be replaced by a weight that nothing rounds; call restore(model), load, and "
                    "quantise it again"
                )

    def _after_loading(self, module: nn.Module, incompatible: Any) -> None:
        for weight in self.weights:  # the same values, as `_before_loading` has seen
            weight.version = weight.parameter._version


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise UserError(
        "the model is quantised, and save_pretrained would write the rounded weights alone, which "
        "load as a model whose activations nothing rounds; call "
        "skipless.export.save_quantized(model, folder), or restore(model) first"
    )


def quantization(model: nn.Module) -> Quantization | None:
    """What `quantize` did to the model, or None."""
    return getattr(model, ATTRIBUTE, None)


def check_free(model: nn.Module) -> None:
    """Raise UserError for a model that is quantised, in whole, in part or as a part."""
    if (present := quantization(model)) is not None:
        raise UserError(
            f"the model is already quantised with {present.scheme} (scope {present.scope}); "
            "call restore(model) first"
        )
    for name, module in model.named_modules():
        if (inner := quantization(module)) is not None:
            raise UserError(
                f"{name} in the model is already quantised with {inner.scheme} by itself; call "
                f"restore on model.{name} first"
            )
        if hasattr(module, TRAINED):
            raise UserError(
                f"{name or 'the model'} is being trained quantised (train_quantized); call "
                "finish() or remove() of that training first"
            )
    for name, module in model.named_modules():
        if hasattr(module, _PART):
            raise UserError(
                f"{name or 'the model'} is part of a larger model that is quantised; call restore "
                "on that one first"
            )


def find_untouched(
    model: nn.Module, weights: list[WeightTarget], scheme: Scheme | None = None
) -> dict[str, list[str]]:
    """Modules that keep a matrix in full precision, by "embedding", "head", "convolution", "left
    out" (by an override of `scheme`), "other".

    A matrix is any parameter of two or more dimensions that is not in `weights`. Vectors (biases,
    gains of norms) are never quantised and not listed.
    """
    heads, chosen = find_heads(model), {id(target.parameter) for target in weights}
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        if not any(p.ndim > 1 and id(p) not in chosen for _, p in own):
            continue
        what = "head" if name in heads else "other"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            what = "embedding"
        elif is_convolution(module) and scheme is not None and scheme.at(name) is None:
            what = "left out"
        elif isinstance(module, nn.modules.conv._ConvNd):
            what = "convolution"
        elif what == "other" and scheme is not None and scheme.at(name) is None:
            what = "left out"
        found.setdefault(what, []).append(name or type(module).__name__)
    return found
