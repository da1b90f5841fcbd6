"""Hooks that replace a tensor at a site by its quantised self (Q1, Q2).

One `ActivationQuantizer` a site; all sites of a model share a `ForwardState`, which

- remembers the last tensor quantised, so that the q, k and v projections, which read the same
  tensor, cost one quantisation; and a tensor that is already the result is not quantised again
  (a stream without skip IS the sublayer's output);
- counts the sites that ran, so that a site no forward pass reaches is an error;
- gathers, without synchronising the device, whether some dynamic range was NaN or infinite, and
  names the first such site when the forward pass ends.

What belongs to one pass is kept by thread, so that passes in several threads do not mix.

Read by `quant.apply`, `quant.training` and `quant.integers`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import uncompiled
from skipless.errors import UserError
from skipless.quant.convolutions import by_example
from skipless.quant.fake import simulate
from skipless.quant.observers import RangeObserver
from skipless.quant.replacing import moved, replace_first, replace_input
from skipless.quant.targets import ActivationTarget
from skipless.scheme import Scheme
from skipless.sites import Site


class _Pass(threading.local):
    """What belongs to one forward pass, that of the thread it runs in."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.is_open = False
        """Whether the whole model runs, at whose end `finite` is read."""
        self.records_gradient = False
        """Whether `result` was made where gradients are recorded."""
        self.source: tuple[weakref.ref[Tensor], int] | None = None
        self.result: tuple[Tensor, int] | None = None
        self.scale: Tensor | None = None
        self.codes: tuple[weakref.ref[Tensor], int, tuple, Tensor, Tensor] | None = None
        self.key: tuple | None = None
        self.finite: list[tuple[str, Tensor]] = []


class ForwardState:
    """What the sites of one model share during a forward pass."""

    def __init__(self, sites: list[Site]) -> None:
        self.names = [site.name for site in sites]
        self.mode = "quantize"
        """quantize, observe (calibration), measure (tell, but pass the values on) or off."""
        self.measure: Callable[[str, Tensor, Tensor], None] | None = None
        self.unseen = set(self.names)
        self._pass = _Pass()

    def remembered(self, x: Tensor, key: tuple) -> Tensor | None:
        """The result for `x` if it, or what it came from, was the last tensor quantised."""
        now = self._pass
        if key != now.key or now.source is None or now.result is None:
            return None
        if torch.is_grad_enabled() and not now.records_gradient:
            return None  # it would pass no gradient on
        if torch.is_inference(x):
            return None
        result, version = now.result
        if result._version != version:
            return None
        if x is result:
            return x
        source, source_version = now.source
        return result if source() is x and x._version == source_version else None

    def remember(self, x: Tensor, key: tuple, result: Tensor, scale: Tensor) -> None:
        now = self._pass
        now.codes = None
        if not torch.is_inference(x) and not torch.is_inference(result):
            now.key, now.scale = key, scale
            now.records_gradient = torch.is_grad_enabled()
            now.source = (weakref.ref(x), x._version)
            now.result = (result, result._version)

    def remembered_scale(self, x: Tensor, key: tuple) -> Tensor | None:
        """The scale of `x` if it is the last result of quantising with `key`."""
        return self._pass.scale if self.remembered(x, key) is x else None

    def remembered_codes(self, x: Tensor, key: tuple) -> tuple[Tensor, Tensor] | None:
        """The integer codes and scale of `x`, if they were the last ones made."""
        if self._pass.codes is None or torch.is_inference(x):
            return None
        source, version, known, codes, scale = self._pass.codes
        same = source() is x and version == x._version and known == key
        return (codes, scale) if same else None

    def remember_codes(self, x: Tensor, key: tuple, codes: Tensor, scale: Tensor) -> None:
        """Keep what integer layers that read the same tensor share."""
        if not torch.is_inference(x):
            self._pass.codes = (weakref.ref(x), x._version, key, codes, scale)

    def note_scale(self, name: str, scale: Tensor) -> None:
        """Remember whether a site's range was finite; nobody asks when a part runs by itself."""
        if self._pass.is_open:
            self._pass.finite.append((name, torch.isfinite(scale).all()))

    @uncompiled
    def before_forward(self, module: nn.Module, args: Any) -> None:
        self._pass.clear()
        self._pass.is_open = True

    @uncompiled
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        finite = self._pass.finite
        self._pass.clear()
        if self.mode == "off":
            return
        self.check_coverage(type(module).__name__)
        if finite and not bool(torch.stack([flag for _, flag in finite]).all()):
            name = next(name for name, flag in finite if not bool(flag))
            raise UserError(
                f"NaN or infinity reached {name}, the first site of {type(module).__name__} where "
                "it shows; look at the weights and inputs before that place"
            )

    def check_coverage(self, model_name: str) -> None:
        """Raise UserError when a forward pass left out a site that was to be quantised."""
        if self.unseen:
            names = sorted(self.unseen)
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UserError(
                f"{some} never ran in the forward pass of {model_name}, so that nothing was "
                "quantised there; restore(model) and choose a narrower scope"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a model start without remembered tensors."""
        return {name: value for name, value in self.__dict__.items() if name != "_pass"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pass = _Pass()


class ActivationQuantizer:
    """Quantises one site; registered as a hook on the site's module."""

    def __init__(
        self,
        target: ActivationTarget,
        scheme: Scheme,
        state: ForwardState,
        columns: Tensor | None = None,
    ) -> None:
        self.columns = columns
        """Channels that stay in full precision."""
        self.site, self.bits, self.state = target.site, target.bits, state
        self.granularity, self.symmetric = scheme.activation_granularity, scheme.symmetric
        # A softmax row is nothing like a Gaussian, and its peak is what attention is about.
        self.clip: Any = "absmax" if target.site.kind == "probabilities" else scheme.clip
        self.observer = None
        if not scheme.dynamic:
            self.observer = RangeObserver(self.bits, symmetric=self.symmetric, clip=self.clip)
        self._kept = () if columns is None else tuple(columns.tolist())
        # Only `token` depends on where examples begin, and on that layers differ.
        self._dims = target.example_dims if self.granularity == "token" else None
        granularity = self.granularity if self._dims is None else f"example of {self._dims}"
        self._key: tuple = (self.bits, granularity, self.symmetric, self.clip, self._kept)
        self.is_integer = False
        """The site's linear layer makes the codes itself (`quant.integers`)."""

    @property
    def key(self) -> tuple:
        """Equal for sites that quantise in the same way."""
        return self._key

    def finish_calibration(self) -> None:
        """Fix the range to what the observer saw. Raises UserError naming the site."""
        if self.observer is not None:
            self.fix(self.observer.range(self.site.name))

    def fix(self, clip: Any) -> None:
        """Use the range `clip`, a tensor or a pair (low, high), for every input from now on; a
        parameter is learned, and shared with no other site."""
        self.clip = clip
        ends = clip if isinstance(clip, tuple) else (clip,)
        learned = isinstance(clip, Tensor) and clip.requires_grad
        values = (id(clip),) if learned else tuple(float(end) for end in ends)
        self._key = (self.bits, self.symmetric, *values, self._kept)

    def set_bits(self, bits: int) -> None:
        """Change the width, during training."""
        self._key = (bits, *self._key[1:])
        self.bits = bits

    def __call__(self, x: Tensor) -> Tensor:
        state = self.state
        if state.mode == "off":
            return x
        state.unseen.discard(self.site.name)
        if self.is_integer and state.mode == "quantize":
            return x
        if state.mode == "observe":
            if self.observer is not None:
                self.observer.update(self._rest(x))
            return x
        if state.mode == "quantize" and (known := state.remembered(x, self._key)) is not None:
            return known
        if isinstance(self.clip, tuple):  # a range from calibration follows the model's device
            self.clip = tuple(moved(end, x) for end in self.clip)
        elif isinstance(self.clip, Tensor) and not self.clip.requires_grad:
            self.clip = moved(self.clip, x)
        rest = self._rest(x) if self._dims is None else by_example(x, self._dims)
        result, scale = simulate(rest, self.bits, self.granularity, self.symmetric, self.clip)
        result = result.reshape(x.shape)
        if self.columns is not None:
            result[..., self.columns] = x[..., self.columns]
        if isinstance(self.clip, str):
            state.note_scale(self.site.name, scale)
        if state.mode == "measure":
            assert state.measure is not None, "who sets this mode says where the tensors go"
            state.measure(self.site.name, x, result)
            return x
        state.remember(x, self._key, result, scale)
        return result

    def _rest(self, x: Tensor) -> Tensor:
        """`x` without the channels that are left alone."""
        if self.columns is None:
            return x
        self.columns = moved(self.columns, x)
        rest = x.clone()
        rest[..., self.columns] = 0
        return rest

    @uncompiled
    def input_hook(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        return replace_input(args, kwargs, self)

    @uncompiled
    def output_hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        replaced, found = replace_first(output, self)
        return replaced if found else None


def register_hooks(
    model: nn.Module, sites: list[ActivationQuantizer], state: ForwardState, handles: list[Any]
) -> None:
    """Hook the quantisers of `sites` into `model`; appends to `handles`."""
    if not sites:
        return
    modules = dict(model.named_modules())
    # Prepended, so that other hooks, whenever they were registered, see quantised tensors. For
    # the same reason the model's own bookkeeping encloses everything else.
    for quantizer in sites:
        module = modules[quantizer.site.module]
        if quantizer.site.direction == "input":
            handle = module.register_forward_pre_hook(
                quantizer.input_hook, prepend=True, with_kwargs=True
            )
        else:
            handle = module.register_forward_hook(quantizer.output_hook, prepend=True)
        handles.append(handle)
    handles.append(model.register_forward_pre_hook(state.before_forward, prepend=True))
    handles.append(model.register_forward_hook(state.after_forward))
