"""The loss without some sublayers: each alone, then greedily, always the cheapest next one,
measured again beside those that are out already.

Nothing is changed; while a loss is measured, the joins in question return the stream. A layer in
front of the first change computes what it computed before, so its outputs are kept and handed back.
Read by `pruning.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from skipless.errors import UserError
from skipless.evaluate import loss as language_loss
from skipless.surgery.slimming.shares import layer_names

__all__ = ["LossFunction", "Trials", "next_token_loss"]

LossFunction = Callable[[nn.Module, list[Any]], float]
KEPT_BYTES = 2 << 30
"""Most memory for outputs of layers in front of a change; beyond it all layers are computed."""


def next_token_loss(model: nn.Module, batches: list[Any]) -> float:
    """Nats a token: what a language model is measured by where nothing else is given."""
    return language_loss(model, batches).nats


class Trials:
    """Loss of `model` on `batches` with groups of connections left out.

    `groups`: name -> names of connections that go together. `loss` measures a model that is no
    language model.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Any],
        groups: Mapping[str, tuple[str, ...]],
        loss: LossFunction | None,
    ):
        self.model, self.batches, self.groups = model, batches, groups
        self._loss: LossFunction = loss or next_token_loss
        self._layers = layer_names(model)
        names = dict.fromkeys(self._layers.values())
        # another loss may run the model on what it computed before, so nothing is kept for it
        self._kept = _Kept({n: model.get_submodule(n) for n in names}) if loss is None else None
        self.out: list[str] = []
        """Groups that are out, in the order in which they went."""
        self.full = self._record()
        """Loss with everything in place."""
        self.current = self.full
        if not math.isfinite(self.full):
            raise UserError(
                f"the loss of the model as it is, is {self.full}; check its weights and batches"
            )

    def without(self, name: str) -> float:
        """Loss without the groups that are out and without `name`; inf where it is not finite."""
        first = [self._layers[connection] for connection in self.groups[name]]
        try:
            with self._left_out(name), self._replayed(first):
                found = self._loss(self.model, self.batches)
        except UserError:  # how the loss of a language model says that it is not finite
            return math.inf
        return found if math.isfinite(found) else math.inf

    def alone(self) -> dict[str, float]:
        """Loss without each group alone."""
        assert not self.out, "measured with everything in place"
        return {name: self.without(name) for name in self.groups}

    def take_out(self, name: str, loss: float) -> None:
        """Leave `name` out from here on; `loss` is that without it."""
        self.out.append(name)
        self.current = loss
        self._record(name)

    def greedy(self, alone: Mapping[str, float], budget: float) -> None:
        """Take out the cheapest group again and again while the loss stays within `budget`.

        Costs are measured beside what is out already, the last known cheapest first. A group goes
        once its fresh cost is no larger than every other's last known one, which saves most
        measurements; where costs fall as others leave, it can miss the very cheapest.
        """
        known = {name: found - self.full for name, found in alone.items()}
        fresh: dict[str, float] = dict(alone)
        while known:
            name = min(known, key=lambda n: known[n])
            if self.current + known[name] > self.full + budget:
                return
            if name not in fresh:
                fresh[name] = self.without(name)
                known[name] = fresh[name] - self.current
                continue
            if len(self.out) + 1 == len(self.groups) and self._covers_everything():
                raise UserError(
                    f"the loss budget of {budget:g} covers every sublayer; nothing would be left, "
                    "so lower it"
                )
            self.take_out(name, fresh[name])
            del known[name]
            fresh = {}

    def _covers_everything(self) -> bool:
        named = {name for group in self.groups.values() for name in group}
        return named >= set(self._layers)

    def _record(self, *changed: str) -> float:
        """Loss without what is out; `changed` is what went since the last time."""
        layers = [self._layers[name] for group in changed for name in self.groups[group]]
        with ExitStack() as stack:
            stack.enter_context(self._left_out())
            stack.enter_context(self._replayed(layers))
            if self._kept is not None:
                stack.enter_context(self._kept.record())
            return self._loss(self.model, self.batches)

    @contextmanager
    def _left_out(self, *more: str) -> Iterator[None]:
        names = [name for group in (*self.out, *more) for name in self.groups[group]]
        modules = [self.model.get_submodule(name) for name in names]
        with _replaced([(module, _stream) for module in modules]):
            yield

    @contextmanager
    def _replayed(self, layers: list[str]) -> Iterator[None]:
        if self._kept is None:
            yield
        else:
            with self._kept.replay(layers):
                yield


class _Kept:
    """What every layer returned in one measurement, in order of computation."""

    def __init__(self, layers: dict[str, nn.Module]):
        self.layers = layers
        self.outputs: dict[str, list[Any]] = {}
        self._bytes = 0

    @contextmanager
    def record(self) -> Iterator[None]:
        self.outputs, self._bytes = {}, 0

        def watch(name: str):
            def hook(module: nn.Module, args: tuple, out: Any) -> None:
                tensors = out if isinstance(out, tuple) else (out,)
                self._bytes += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
                fits = self._bytes <= KEPT_BYTES
                self.outputs.setdefault(name, []).append(out if fits else None)

            return hook

        with ExitStack() as stack:
            for name, module in self.layers.items():
                stack.callback(module.register_forward_hook(watch(name)).remove)
            yield
        if self._bytes > KEPT_BYTES:
            self.outputs = {}

    @contextmanager
    def replay(self, changed: list[str]) -> Iterator[None]:
        """Layers that ran before the first of `changed` return what they did."""
        order = list(self.outputs)
        before = order[: min((order.index(n) for n in changed if n in order), default=0)]
        with _replaced([(self.layers[n], _replaying(self.outputs[n])) for n in before]):
            yield


def _stream(stream: Tensor, branch: Any, context: Any = None) -> Tensor:
    return stream


def _replaying(outputs: list[Any]) -> Callable[..., Any]:
    remaining = iter(outputs)
    return lambda *args, **kwargs: next(remaining)


@contextmanager
def _replaced(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """The `forward` of some modules replaced for the length of a with statement."""
    before = [vars(module).get("forward") for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for (module, _), old in zip(forwards, before, strict=True):
            if old is None:
                vars(module).pop("forward", None)
            else:
                module.forward = old
