"""What blocks returned in one pass, given back in another, so that only the rest is computed.

Two quantisations of a model that differ from some block on compute the same before it. A block's
`forward` then returns what it returned, call by call; its hooks run, those inside it do not.
Whether that gives the same loss is for the caller to try: see `Prefixes.replay`. Read by
`evaluate.sensitivity` and `evaluate.suggesting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from skipless.quant import quantization
from skipless.quant.transforms.sources import all_outputs
from skipless.sites import block_names

KEPT_BYTES = 2**31
"""Outputs of blocks are kept up to this size; above, every pass runs whole."""

T = TypeVar("T")


class Prefixes:
    """Outputs of the blocks of a model in one pass over the batches."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.blocks = model, block_names(model)
        self.kept: dict[str, list[Any]] | None = {} if len(self.blocks) > 1 else None
        """By block, in the order of running; None where passes have to run whole."""

    def record(self, measure: Callable[[], T]) -> T:
        """The result of `measure`, which runs the model; keeps what its blocks return."""
        if self.kept is None:
            return measure()
        with _keeping(self.model, self.blocks) as kept:
            found = measure()
        calls = {len(outputs) for outputs in kept.values()}
        usable = len(kept) == len(self.blocks) and len(calls) == 1
        self.kept = kept if usable and _size(kept) <= KEPT_BYTES else None
        return found

    def before(self, names: Iterable[str]) -> list[str]:
        """Blocks that have run when the first of those that hold a module in `names` begins; none
        if some module is in no block."""
        order = list(self.kept or {})
        first = len(order)
        for name in names:
            inside = [i for i, b in enumerate(order) if name == b or name.startswith(f"{b}.")]
            first = min(first, inside[0] if inside else 0)
        return order[:first]

    def replay(self, blocks: Sequence[str], measure: Callable[[], T]) -> T:
        """The result of `measure` while `blocks` return what they returned."""
        kept = self.kept or {}
        with _replaying(self.model, {name: kept[name] for name in blocks}):
            return measure()


def _size(kept: dict[str, list[Any]]) -> int:
    """Bytes of the outputs kept."""
    tensors = {id(t): t for outputs in kept.values() for out in outputs for t in all_outputs(out)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@contextmanager
def _keeping(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """What each block's `forward` returns, before hooks, call by call, in the order of running.

    Ends up empty if a block ran twice before all had run once.
    """
    kept: dict[str, list[Any]] = {}
    order: list[str] = []

    def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def keep(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            kept.setdefault(name, []).append(out)
            order.append(name)
            return out

        return keep

    forwards = {name: wrap(name, model.get_submodule(name).forward) for name in blocks}
    with _forwards(model, forwards):
        yield kept
    if order != list(kept) * (len(order) // max(1, len(kept))):
        kept.clear()


@contextmanager
def _replaying(model: nn.Module, before: dict[str, list[Any]]) -> Iterator[None]:
    """Blocks in `before` return what they returned; their hooks run, those inside do not."""

    def replay(outputs: list[Any]) -> Callable[..., Any]:
        each = iter(outputs)
        return lambda *args, **kwargs: next(each)

    if (record := quantization(model)) is not None:
        for site in record.activations:
            if any(site.site.module.startswith(f"{name}.") for name in before):
                record.state.unseen.discard(site.site.name)
    with _forwards(model, {name: replay(outputs) for name, outputs in before.items()}):
        yield


@contextmanager
def _forwards(model: nn.Module, forwards: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Blocks computed by other functions for the length of a with statement."""
    own = {name: model.get_submodule(name).__dict__.get("forward") for name in forwards}
    try:
        for name, function in forwards.items():
            model.get_submodule(name).__dict__["forward"] = function
        yield
    finally:
        for name, before in own.items():
            module = model.get_submodule(name)
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before
