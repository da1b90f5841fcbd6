"""Training with quantisation: rounded in the forward pass, straight through in the backward (Q3).

    training = train_quantized(model, "W4A4 scope=block from=0.1 over=0.3")
    for step in range(steps):
        training.at(step / steps)             # off, then ever fewer bits, then the scheme's
        loss(model(...)).backward(); optimizer.step()
    training.finish()                         # an ordinary quantised model; restore() gives fp

The parameters stay in full precision: what the optimiser moves are the values before rounding, and
names, state_dict and checkpoints do not change. A linear layer keeps its place and its name and
becomes a subclass that rounds its weight anew in every pass; activations are rounded by the hooks
of `quantize`. The width is a function of the progress alone, so that a resumed run goes on exactly:
full precision before `from`, then from 8 bits down to the scheme's over the share `over`.

Learned clips (`learned_clips=True`, symmetric schemes without groups): every weight and site gets a
clip that is a parameter, `training.clips`, for the optimiser's list; its gradient is that of Q3
(LSQ's, arXiv 1902.08153, without its gradient scale). They start at the least squared error on the
first batch and are fixed by `finish`. In our loop (`train.quantize`) ranges are the scheme's, since
a run directory has no place for clips. Read by `skipless.train`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.compiled import forget_compiled, run_eagerly, unwrapped
from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer, ForwardState, register_hooks
from skipless.quant.apply import quantization, quantize, switch_back, switch_to_eager
from skipless.quant.calibrate import run_calibration
from skipless.quant.convolutions import is_convolution
from skipless.quant.fake import clip_range, fake_quantize, integer_codes
from skipless.quant.observers import RangeObserver
from skipless.quant.record import TRAINED, check_free
from skipless.quant.subclasses import Replaced, combined, has_own_forward, named
from skipless.quant.targets import WeightTarget, find_targets
from skipless.quant.weights import as_matrix
from skipless.scheme import Scheme, TrainingPlan
from skipless.sites import ChoosesImplementation, bias_of, is_linear, weight_of

_STATE = TRAINED
FIRST_BITS = 8
"""Widths fall from here; more cost nothing that training would notice."""


class _Rounding:
    """What a layer carries while it is trained."""

    def __init__(self, target: WeightTarget) -> None:
        self.scheme, self.transposed = target.scheme, target.transposed
        self.bits: int | None = None
        self.clip: Any = target.scheme.clip
        self.plain_class = type(target.module)

    def __call__(self, weight: Tensor) -> Tensor:
        """The rounded matrix [out, in], of a kernel [out, in * k]."""
        matrix = as_matrix(weight, self.transposed)
        if self.bits is None:
            return matrix
        return fake_quantize(
            matrix, self.bits, granularity=self.scheme.weight_granularity,
            symmetric=self.scheme.symmetric, clip=self.clip,
        )  # fmt: skip


class _RoundedForward(Replaced):
    """Mixed in before the layer's own class."""

    def forward(self, input: Tensor) -> Tensor:
        own: _Rounding = getattr(self, _STATE)
        return F.linear(input, own(weight_of(self)), bias_of(self))


@named
class RoundedLinear(_RoundedForward, nn.Linear):
    """An nn.Linear whose weight is rounded in every pass; made by `train_quantized`."""


class _RoundedKernel(Replaced):
    """The same for a convolution."""

    def forward(self, input: Tensor) -> Tensor:
        own: _Rounding = getattr(self, _STATE)
        weight = weight_of(self)
        rounded = own(weight).reshape(weight.shape)
        convolve: Any = self._conv_forward  # every class of `is_convolution` has it
        return convolve(input, rounded, bias_of(self))


class QuantizedTraining:
    """A model that trains quantised; `at` sets the width, `finish` ends it."""

    def __init__(
        self, model: nn.Module, plan: TrainingPlan, weights: list[WeightTarget],
        sites: list[ActivationQuantizer], state: ForwardState, include_convolutions: bool = False,
    ) -> None:  # fmt: skip
        self.include_convolutions = include_convolutions
        self.model, self.plan, self.sites, self.state = model, plan, sites, state
        self.layers = [(target, _Rounding(target)) for target in weights]
        self.targets = {site.site.name: site.bits for site in sites}
        self.handles: list[Any] = []
        self.eager: list[tuple[ChoosesImplementation, str]] = []
        """Attention modules that compute their probabilities as a tensor meanwhile."""
        self.clips: list[nn.Parameter] = []
        """Learned clips, for the optimiser; empty without `learned_clips`."""

    def at(self, progress: float) -> int | None:
        """Set the widths for a share of the training in [0, 1]; the width of weights, None before
        quantisation begins."""
        self.state.mode = "off" if progress < self.plan.start else "quantize"
        for target, own in self.layers:
            own.bits = self.plan.bits(target.scheme.weight_bits, progress, FIRST_BITS)
        for site in self.sites:
            bits = self.plan.bits(self.targets[site.site.name], progress, FIRST_BITS)
            site.set_bits(self.targets[site.site.name] if bits is None else bits)
        return self.layers[0][1].bits

    def finish(self) -> nn.Module:
        """End training: `model` is then quantised as by `quantize`, with the learned clips if there
        are any, so that it can run on integers; `restore` gives the trained full precision."""
        clips = {own: own.clip for _, own in self.layers}
        self.remove()
        quantize(
            self.model, self.plan.scheme, self.plan.scope,
            include_convolutions=self.include_convolutions,
        )  # fmt: skip
        record = quantization(self.model)
        assert record is not None, "quantize() left no record"
        if self.clips:
            by_parameter = {id(weight.parameter): weight for weight in record.weights}
            for target, own in self.layers:
                weight = by_parameter[id(target.parameter)]
                weight.swap()
                codes = integer_codes(
                    weight.matrix(), target.scheme.weight_bits,
                    granularity=target.scheme.weight_granularity, clip=clips[own].detach(),
                )  # fmt: skip
                weight.replace(codes.dequantize().reshape(weight.matrix().shape), codes)
                weight.swap()
            learned = {site.site.name: site.clip for site in self.sites}
            for site in record.activations:
                site.fix(learned[site.site.name].detach())
        return self.model

    def state_dict(self) -> dict[str, Tensor]:
        """{weight or site: learned clip}, for a checkpoint beside the model's; empty without."""
        return {name: clip.detach().clone() for name, clip in self._named_clips().items()}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with clips of `state_dict`. Raises UserError when they are another model's."""
        clips = self._named_clips()
        wrong = [name for name, clip in clips.items()
                 if name not in saved or saved[name].shape != clip.shape]  # fmt: skip
        if wrong := wrong or [name for name in saved if name not in clips]:
            raise UserError(
                f"the learned clip of {wrong[0]} is missing, left over or of another shape; load "
                "what state_dict() gave for the same model, plan and options"
            )
        for name, clip in clips.items():
            clip.copy_(saved[name])

    def _named_clips(self) -> dict[str, nn.Parameter]:
        if not self.clips:
            return {}
        named_clips = {site.site.name: site.clip for site in self.sites}
        return named_clips | {target.name: own.clip for target, own in self.layers}

    def remove(self) -> None:
        """Take hooks and rounding away; the model is in full precision."""
        for handle in self.handles:
            handle.remove()
        switch_back(self.eager)
        for target, own in self.layers:
            if hasattr(target.module, _STATE):
                delattr(target.module, _STATE)
                target.module.__class__ = own.plain_class
        forget_compiled()


class _Nothing:
    """What stands in where training is not quantised."""

    def at(self, progress: float) -> None:
        """Nothing."""


def train_quantized(
    model: nn.Module,
    plan: TrainingPlan | Scheme | str | None,
    *,
    learned_clips: bool = False,
    calibration: Iterable[Any] | None = None,
    include_convolutions: bool = False,
) -> QuantizedTraining | Any:
    """Let `model` train quantised, in place: "W4A4 scope=block from=0.1 over=0.3" (`TrainingPlan`).

    Call `at(progress)` before every step. `learned_clips` needs `calibration`
    batches for a start, `include_convolutions` adds nn.Conv1d to 3d. With None as the plan nothing
    happens and `at` does nothing. Raises UserError for a model that is quantised, static schemes,
    several processes, and as `quantize`.
    """
    if plan is None:
        return _Nothing()
    plan, model = TrainingPlan.parse(plan), unwrapped(model)
    check_free(model)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "training with quantisation was never run in several processes; leave train.quantize "
            "out, or train in one"
        )
    for part in plan.scheme.parts():
        if learned_clips and (not part.symmetric or part.group_size is not None):
            raise UserError(f"{part} has no learned clips: they need a symmetric scheme, no groups")
    weights, targets = find_targets(
        model, plan.scheme, plan.scope, include_convolutions=include_convolutions
    )
    weights = [t for t in weights if is_linear(t.module) or is_convolution(t.module)]
    if shared := next((target for target in weights if len(target.modules) > 1), None):
        raise UserError(
            f"{' and '.join(shared.modules[:2])} share a weight, and only one of them would be "
            f"rounded while training; leave it out with the override {shared.modules[0]}=fp"
        )
    if own := next((target for target in weights if has_own_forward(target.module)), None):
        name = own.modules[0]
        raise UserError(
            f"{name} ({type(own.module).__name__}) has a forward of its own, which rounding its "
            f"weight in every pass would leave out; leave the layer out with the override {name}=fp"
        )
    state = ForwardState([target.site for target in targets])
    sites = [ActivationQuantizer(target, target.scheme, state) for target in targets]
    training = QuantizedTraining(model, plan, weights, sites, state, include_convolutions)
    register_hooks(model, sites, state, training.handles)
    training.eager = switch_to_eager(model, targets)
    if learned_clips:
        try:
            _learn_clips(training, calibration)
        except BaseException:
            training.remove()
            raise
    for target, own in training.layers:
        setattr(target.module, _STATE, own)
        mixin = _RoundedKernel if is_convolution(target.module) else _RoundedForward
        target.module.__class__ = combined(mixin, own.plain_class)
    training.at(0.0)
    forget_compiled()
    return training


def _learn_clips(training: QuantizedTraining, calibration: Iterable[Any] | None) -> None:
    for site in training.sites:
        site.observer = RangeObserver(site.bits, clip="mse")
    training.state.mode = "observe"
    if calibration is None:
        raise UserError("learned clips start from activations; pass calibration=batches")
    with run_eagerly():
        run_calibration(training.model, calibration, "learned clips")
    for site in training.sites:
        assert site.observer is not None
        found = site.observer.range(site.site.name)
        assert isinstance(found, Tensor), "symmetric"
        device = next(training.model.parameters()).device
        clip = nn.Parameter(found.clamp_min(1e-6).to(device))
        site.observer = None
        site.fix(clip)
        training.clips.append(clip)
    for target, own in training.layers:
        matrix = as_matrix(target.parameter.detach(), target.transposed)
        found = clip_range(
            matrix, target.scheme.weight_bits, granularity=target.scheme.weight_granularity,
            clip="mse",
        )  # fmt: skip
        assert isinstance(found, Tensor), "symmetric"
        own.clip = nn.Parameter(found.clamp_min(1e-6).clone())
        training.clips.append(own.clip)
