"""A mixed-precision scheme, greedily: raise the layer that gains most for its bits.

1. every layer at `low`
2. each layer alone raised to `high`: loss on the batches, and what it gains a bit
3. the best of them stays raised; again from 2 until the target is met

A step measures every layer that is still low. Blocks before the layer compute what they computed
under the scheme of the step, so their outputs are taken from its pass instead, on models where that
gives the same loss exactly (it is tried first, and compared again at every step). Greedy choice is
no optimum: two layers that help only together are not seen. Read by the command line and by users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from skipless.compiled import unwrapped
from skipless.errors import UserError, check_choice
from skipless.evaluate.losses import SequenceLosses, as_list, sequence_losses
from skipless.evaluate.prefixes import Prefixes
from skipless.quant import Scheme, executed
from skipless.quant.methods import looks_ahead, parse_methods
from skipless.quant.targets import find_targets
from skipless.sites import block_names


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A scheme with what it was measured to cost."""

    scheme: str
    """In the text form, for `quantize` and --schemes."""
    met: bool
    """Whether the target is met."""
    reason: str
    """Why the search ended, in a sentence."""
    loss: float
    """Nats a token under `scheme`, from a pass of its own over all batches."""
    num_tokens: int
    """Of the batches, that losses are the means over."""
    full_precision: float
    increase: float
    standard_error: float | None
    """Of the increase, paired by sequence."""
    weight_bits: float
    """Mean over the quantised weights."""
    scope: str
    method: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Layers in the order in which they were raised: layer, loss, increase, weight_bits."""
    num_measured: int = 0
    """Losses that were measured, on the whole or from some block on."""


def suggest_scheme(
    model: nn.Module,
    batches: Iterable[Any],
    low: Scheme | str = "W4A4",
    high: Scheme | str = "W8A8",
    *,
    max_increase: float | None = None,
    max_bits: float | None = None,
    scope: str = "linear",
    by: str = "layer",
    method: str = "rtn",
    calibration: Iterable[Any] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Suggestion:
    """A scheme between `low` and `high` that costs at most `max_increase` nats a token, or at most
    `max_bits` bits a weight, or both; 0.05 nats where neither is given.

    `by` "layer" raises whole blocks (and single modules outside them), "module" single linear
    layers. The gain of a raise counts by bit of weights, by bit of activations where the weights
    have one width. A target that `high` everywhere does not reach ends with `met` False and a
    reason. Runs n (n + 1) / 2 passes for n layers at the most. Raises UserError for schemes with
    overrides, for `high` that is no wider than `low`, for `max_bits` below what `low` takes, and as
    `loss` and `quantize` do; the model is left as it was.
    """
    low, high, model = Scheme.parse(low), Scheme.parse(high), unwrapped(model)
    check_choice("by", by, ("layer", "module"))
    if max_increase is None and max_bits is None:
        max_increase = 0.05
    _check(low, high, max_bits)
    data = list(as_list(batches))
    samples = None if calibration is None else list(as_list(calibration))
    units = _units(model, low, scope, by)
    options = {"scope": scope, "method": method, "calibration": samples}
    search = _Search(model, data, low, high, units, options)
    full = sequence_losses(model, data)
    limit = None if max_increase is None else full.nats + max_increase

    def result(scheme: Scheme, found: SequenceLosses, bits: float, reason: str, met: bool) -> Any:
        return Suggestion(
            scheme=str(scheme), met=met, reason=reason, loss=found.nats,
            num_tokens=int(full.counts.sum()), full_precision=full.nats,
            increase=found.nats - full.nats,
            standard_error=found.standard_error(full), weight_bits=bits, scope=scope,
            method=method, steps=steps, num_measured=search.num_measured,
        )  # fmt: skip

    steps: list[dict[str, Any]] = []
    if limit is not None and max_bits is None:
        widest = search.whole(high)
        if widest.nats > limit:
            reason = (
                f"{high} everywhere already costs {widest.nats - full.nats:.4f} nats, more than "
                f"{max_increase:g}; name a wider scheme"
            )
            return result(high, widest, float(high.weight_bits), reason, False)
    raised: list[str] = []
    while True:
        current = search.at(raised)
        bits = search.bits(raised)
        if raised:
            step = {"layer": raised[-1], "loss": current.nats,
                    "increase": current.nats - full.nats, "weight_bits": bits}  # fmt: skip
            steps.append(step)
            if on_step is not None:
                on_step(step)
        scheme = search.scheme(raised)
        if limit is not None and current.nats <= limit:
            return result(scheme, current, bits, f"at most {max_increase:g} nats reached", True)
        left = [
            name
            for name in units
            if name not in raised
            and (max_bits is None or search.bits([*raised, name]) <= max_bits + 1e-9)
        ]
        if not left:
            if limit is None:
                reason = f"no further layer fits into {max_bits:g} bits"
            elif len(raised) < len(units):
                reason = f"{max_bits:g} bits are spent before the loss is down to the target"
            else:
                reason = f"every layer is at {high} and the loss is still above the target"
            return result(scheme, current, bits, reason, limit is None)
        losses = {name: search.raising(raised, name) for name in left}
        gains = {name: (current.nats - losses[name]) / search.cost(name) for name in left}
        best = max(gains, key=lambda name: gains[name])
        search.expected = losses[best]
        if limit is None and gains[best] <= 0:
            return result(scheme, current, bits, "no further raise lowers the loss", True)
        raised.append(best)


class _Search:
    """Losses of one model between two schemes."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], low: Scheme, high: Scheme,
        units: dict[str, int], options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.batches, self.low, self.high = model, batches, low, high
        self.units, self.options = units, options
        self.num_measured = 0
        self.total = sum(units.values())
        self.prefixes = Prefixes(model)
        if looks_ahead(parse_methods(options["method"])):
            self.prefixes.kept = None
        self.expected: float | None = None

    def scheme(self, raised: Sequence[str]) -> Scheme:
        return self.low.with_overrides({name: self.high for name in raised})

    def bits(self, raised: Sequence[str]) -> float:
        """Mean bits of the weights."""
        extra = self.high.weight_bits - self.low.weight_bits
        return self.low.weight_bits + extra * sum(self.units[n] for n in raised) / self.total

    def whole(self, scheme: Scheme) -> SequenceLosses:
        self.num_measured += 1
        with executed(self.model, scheme, **self.options):
            return sequence_losses(self.model, self.batches)

    def at(self, raised: Sequence[str]) -> SequenceLosses:
        """Loss of a whole pass; keeps the outputs of blocks for the candidates of this step."""
        if self.prefixes.kept is None:
            return self.whole(self.scheme(raised))
        self.num_measured += 1
        with executed(self.model, self.scheme(raised), **self.options):
            found = self.prefixes.record(self._measure)
            # What the last raise was measured to give, or what a pass through kept outputs gives.
            if self.prefixes.kept is not None and self.expected is None:
                blocks = list(self.prefixes.kept)[:-1]
                self.expected = self.prefixes.replay(blocks, self._measure).nats
            if self.expected != found.nats:
                self.prefixes.kept = None
        return found

    def raising(self, raised: Sequence[str], name: str) -> float:
        """The loss in nats with `name` raised as well."""
        self.num_measured += 1
        with executed(self.model, self.scheme([*raised, name]), **self.options):
            return self.prefixes.replay(self.prefixes.before([name]), self._measure).nats

    def _measure(self) -> SequenceLosses:
        return sequence_losses(self.model, self.batches)

    def cost(self, name: str) -> int:
        """Bits that raising `name` takes."""
        wider = self.high.weight_bits - self.low.weight_bits
        return self.units[name] * (wider or _width(self.high) - _width(self.low))


def _check(low: Scheme, high: Scheme, max_bits: float | None) -> None:
    for scheme in (low, high):
        if scheme.overrides:
            raise UserError(f"{str(scheme)!r} has overrides, which are what is searched for here")
    weights, activations = high.weight_bits - low.weight_bits, _width(high) - _width(low)
    if weights < 0 or activations < 0 or not (weights or activations):
        raise UserError(f"{high} is not wider than {low}; name the narrow scheme first")
    if max_bits is not None and not weights:
        raise UserError(
            f"{low} and {high} have weights of one width, which max_bits counts; give max_increase"
        )
    if max_bits is not None and max_bits < low.weight_bits:
        raise UserError(
            f"max_bits is {max_bits:g} and {low} everywhere takes {low.weight_bits}; name a "
            "narrower scheme to start from"
        )


def _width(scheme: Scheme) -> int:
    """Bits of activations; floating point counts as 16."""
    return scheme.activation_bits or 16


def _units(model: nn.Module, low: Scheme, scope: str, by: str) -> dict[str, int]:
    """{name: number of weights} of what is raised at once, in the model's order."""
    weights, _ = find_targets(model, low, scope)
    blocks = block_names(model) if by == "layer" else []
    units: dict[str, int] = {}
    for target in weights:
        name = target.modules[0]
        if not name:
            raise UserError("the model is a single linear layer; there is nothing to mix")
        name = next((b for b in blocks if name.startswith(f"{b}.")), name)
        units[name] = units.get(name, 0) + target.parameter.numel()
    return units
