"""Rotations learned through the quantised model, where they cost nothing when it runs (Q5).

    y = W_O a = (W_O R)(R^T a)         one R a head, in the weights of V and O
    y = W norm(x) = (W R) norm(R^T x)  one R for the whole stream of a pre-RMSNorm model

A Hadamard matrix spreads outliers blindly; these rotations start there and are moved to where the
rounding of this model, at this scheme, costs least.

1. V under O, by heads, as in `hadamard`; the stream as in `stream`, if the model bears it. Every
   other tensor is rotated by a fixed Hadamard matrix when the model runs, as in `hadamard`
   (`offline` leaves them alone)
2. R = R0 Cayley(A) (`transforms.orthogonal`), R0 Hadamard with signs drawn by `seed`, A = 0
3. `steps` of Adam on A through the calibration batches in turn: rotate the weights, round them and
   the activations, gradients straight through the rounding (Q3); the learning rate falls to 0.
   `lr` is about the angle in radians by which a step may turn
4. the objective is the distance to the model's own full-precision outputs: the Kullback-Leibler
   divergence of the softmax where it returns logits, else the relative squared error. It needs no
   labels, so that encoders are treated as decoders are; and a few thousand tokens of text cannot be
   learned by heart through it, as they can be through their loss
5. the learned rotations are kept if all calibration batches together come out better than at the
   start, else the start is

Source: SpinQuant, arXiv 2405.16406 (its R1, R2 and, fixed, R4), on the Stiefel manifold with Cayley
steps, arXiv 2002.01113. Differences: the parametrisation, each head its own R, embedding and head
stay as they are for two rotations a pass, no layer is known by name. Read by `by_name.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from skipless.errors import UserError, counted
from skipless.jsonable import Config, check_named
from skipless.quant.activations import ActivationQuantizer, ForwardState, register_hooks
from skipless.quant.calibrate import evaluation_mode, run_batch
from skipless.quant.methods.hadamard import rotate_online
from skipless.quant.transforms.orthogonal import Orthogonal
from skipless.quant.transforms.session import Session
from skipless.quant.transforms.sources import all_outputs, nearly_equal
from skipless.quant.transforms.streams import Stream, find_stream
from skipless.quant.transforms.turning import Plan, TurnedLayer, run_with, turning
from skipless.quant.weights import quantize_weight


@dataclass(frozen=True, kw_only=True)
class LearnedRotation(Config):
    """Learn the rotations of V and O by head, and of the stream."""

    name: ClassVar[str] = "rotation"
    stage: ClassVar[int] = 2
    covers: ClassVar[tuple[int, ...]] = (0, 2)
    steps: int = 64
    lr: float = 0.3
    seed: int = 0
    offline: bool = False
    """Leave tensors alone whose rotation would take time when the model runs."""

    def __post_init__(self) -> None:
        check_named("rotation:learned", self)
        if self.steps < 0 or not 0 < self.lr < 10:
            raise UserError(
                f"rotation:learned has steps={self.steps} and lr={self.lr:g}; a number of steps "
                "from 0 and a rate between 0 and 10 were expected, such as steps=64,lr=0.3"
            )

    def __str__(self) -> str:
        usual = LearnedRotation()
        given = [
            f"{key}={getattr(self, key):g}"
            for key in ("steps", "lr", "seed")
            if getattr(self, key) != getattr(usual, key)
        ]
        return ",".join([f"{self.name}:learned", *given, *["offline"] * self.offline])

    def prepare(self, session: Session) -> None:
        """Find what can be rotated, learn, and put the result into the weights."""
        plan = _plan(session, self.seed)
        done = {name for layer in plan.layers for name in (layer.name,) if layer.reads}
        online = 0
        for group in session.changeable:
            if not self.offline and not done.intersection(group.names):
                rotate_online(session, group)
                online += 1
        rest = counted(online, "tensor")
        what = f"rotation: {plan.describe()}, {rest} by Hadamard when the model runs"
        plan.read(session)
        if plan.turns and self.steps:
            with _Learning(session, plan) as learning:
                first, last = learning.run(self.steps, self.lr)
            what += f"; error {first:.4g} to {last:.4g} in {self.steps} steps"
            if last == first:
                what += ", which is no gain: left at the start"
        plan.put(session)
        session.notes.append(what)


def _plan(session: Session, seed: int) -> Plan:
    """Trace; nothing is changed."""
    generator = torch.Generator().manual_seed(seed)
    device = next(session.model.parameters()).device
    layers: dict[str, TurnedLayer] = {}
    plan = Plan(turns=[], layers=[], stream=None, norms={}, heads=0)

    def layer(name: str) -> TurnedLayer:
        return layers.setdefault(name, TurnedLayer(name=name))

    for group in session.changeable:
        found = session.value_head(group)
        if found is None:
            continue
        source, size = found
        first, width = int(source.channels.min()), int(source.channels.unique().numel())
        which = (source.channels[::size] - first).cpu() // size
        every, part = torch.arange(width // size, device="cpu"), slice(first, first + width)
        layer(source.name).writes = (len(plan.turns), every, part)
        for name in session.members(group):
            layer(name).reads = (len(plan.turns), which)
        plan.turns.append(Orthogonal(width // size, size, generator, device))
        plan.heads += 1
    try:
        stream = find_stream(session.model, session.small())
        turn = Orthogonal(1, stream.width, generator, device)
        _add_stream(session, plan, stream, layer, turn)
    except UserError:
        pass  # no such stream: the rest is worth having
    plan.layers = list(layers.values())
    return plan


def _add_stream(
    session: Session,
    plan: Plan,
    stream: Stream,
    layer: Callable[[str], TurnedLayer],
    turn: Orthogonal,
) -> None:
    number, one = len(plan.turns), torch.zeros(1, dtype=torch.long, device="cpu")
    trial = [
        TurnedLayer(name=name, writes=(0, one, slice(0, stream.width))) for name in stream.writers
    ]
    norms = {}
    for group in stream.readers:
        gain, norms[f"{group.direct}.weight"] = stream.gain(session.model, group)
        trial += [TurnedLayer(name=name, reads=(0, one), gain=gain) for name in group.names]
    alone = Plan(turns=[turn], layers=trial, stream=stream, norms=norms, heads=0)
    alone.read(session)
    model, batch = session.model, session.small()
    with evaluation_mode(model):
        before = all_outputs(run_batch(model, batch))
        turns = [turn.matrix()]
        with turning(model, stream, turns[0]):
            after = all_outputs(run_with(model, alone.values(session, turns), batch))
    if not nearly_equal(before, after):
        raise UserError(stream.refusal(model))
    for each in trial:
        mine = layer(each.name)
        if each.reads is not None:
            mine.reads, mine.gain = (number, one), each.gain
        if each.writes is not None:
            mine.writes = (number, one, slice(0, stream.width))
    plan.turns.append(turn)
    plan.stream, plan.norms = stream, norms


class _Learning:
    """The model quantised at a plan's rotations, as a differentiable function of them."""

    def __init__(self, session: Session, plan: Plan) -> None:
        self.session, self.plan = session, plan
        self.batches = list(session.needed())
        planned = {layer.name for layer in plan.layers}
        self.fixed = {
            f"{name}.weight": quantize_weight(target.parameter, target.scheme,
                                              transposed=target.transposed)
            for name, target in session.targets.items()
            if name == target.modules[0] and planned.isdisjoint(target.modules)
        }  # fmt: skip
        self.state = ForwardState([target.site for target in session.activations])
        self.handles: list[Any] = []
        self.like = plan.layers[0].matrix

    def __enter__(self) -> _Learning:
        sites = []
        for target in self.session.activations:
            scheme = replace(target.scheme, dynamic=True)  # ranges of the start would not hold
            sites.append(ActivationQuantizer(target, scheme, self.state))
        register_hooks(self.session.model, sites, self.state, self.handles)
        self.session.attach_first()
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def run(self, steps: int, lr: float) -> tuple[float, float]:
        """Learn; the mean error over all batches before and after."""
        turns = self.plan.turns
        groups = [{"params": [turn.free], "lr": lr / 4 / turn.width**0.5} for turn in turns]
        adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
        first = self.everything()
        for step in range(steps):
            with torch.enable_grad():
                error = self.error(self.batches[step % len(self.batches)])
                gradients = torch.autograd.grad(error, [turn.free for turn in turns])
            for turn, gradient in zip(turns, gradients, strict=True):
                turn.free.grad = gradient
            adam.step()
            schedule.step()
        last = self.everything()
        if not last < first:
            for turn in turns:
                turn.reset()
            last = first
        return first, last

    def everything(self) -> float:
        """Mean error of the batches, without gradient."""
        return sum(float(self.error(batch)) for batch in self.batches) / len(self.batches)

    def error(self, batch: Any) -> Tensor:
        """How far the quantised model's outputs are from its own."""
        model, state = self.session.model, self.state
        with evaluation_mode(model):
            state.mode = "off"
            exact = run_batch(model, batch)
            state.mode = "quantize"
        if not all(bool(torch.isfinite(output).all()) for output in all_outputs(exact)):
            raise UserError(
                "the calibration batches give NaN or infinity as outputs; look at batches and "
                "weights, or convert the model to float32"
            )
        learns = torch.is_grad_enabled()
        with evaluation_mode(model), torch.set_grad_enabled(learns):
            turns = [turn.matrix() for turn in self.plan.turns]
            if learns:  # float64, in which the weights are turned at the end, takes its time
                turns = [turn.to(self.like) for turn in turns]
            values = self.fixed | self.plan.values(self.session, turns, rounded=True)
            with turning(model, self.plan.stream, turns[-1]):
                found = run_with(model, values, batch)
        return _distance(exact, found)


def _distance(exact: Any, found: Any) -> Tensor:
    """Kullback-Leibler divergence of logits a position, else relative squared error."""
    logits = getattr(exact, "logits", None)
    if isinstance(logits, Tensor) and logits.shape[-1] > 1:
        p, q = (x.flatten(0, -2).float().log_softmax(-1) for x in (logits, found.logits))
        return nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    pairs = zip(all_outputs(exact), all_outputs(found), strict=True)
    errors = [
        (y - x).float().square().sum() / x.float().square().sum().clamp_min(1e-12) for x, y in pairs
    ]
    return torch.stack(errors).mean()
