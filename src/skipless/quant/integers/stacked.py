"""One new token through a whole stack of sublayers in one C++ call (Q4).

The steps of `fused` in the order in which they run, with the joins between them: elementwise sums
and norms. Which module is which is the caller's to say (`skipless.decoding`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from skipless.quant.integers.fused import Builder, Step
from skipless.quant.integers.structures import Attention, Join, Store, Sublayer


class StackStep:
    """Sublayers of a whole stack in the order they run; `add` them, `finish`, then `run`."""

    def __init__(self) -> None:
        self._made = Builder()
        self._sublayers: list[Sublayer] = []
        self._steps: list[Step | None] = []

    def add(
        self, step: Step | None, weights: tuple[Any, Any, Any],
        after: tuple[str, Tensor | None, Tensor | None, float], width: int,
    ) -> None:  # fmt: skip
        """A sublayer (None: nothing but `after`) with a, b, c of its join, numbers or tensors."""
        a, b, c = weights
        join = Join(
            a=None if _is(a, 0.0) or _is(a, 1.0) else self._vector(a, width),
            b=None if _is(b, 1.0) else self._vector(b, width),
            c=None if _is(c, 0.0) else self._vector(c, width),
            a_is_one=int(_is(a, 1.0)), after=self._made.norm(*after),
        )  # fmt: skip
        is_attention = step is not None and isinstance(step.structure, Attention)
        address = None if step is None else ctypes.addressof(step.structure)
        self._sublayers.append(
            Sublayer(
                kind=2 if step is None else 0 if is_attention else 1,
                attention=address if is_attention else None,
                mlp=None if is_attention else address, join=join,
            )
        )  # fmt: skip
        self._steps.append(step)

    def _vector(self, value: Any, width: int) -> int | None:
        whole = torch.as_tensor(value, dtype=torch.float32, device="cpu").detach().expand(width)
        return self._made.address(whole.contiguous())

    def finish(self) -> None:
        """Put them in one piece of memory."""
        self._array = (Sublayer * len(self._sublayers))(*self._sublayers)
        self._attentions = [n for n, sub in enumerate(self._sublayers) if sub.kind == 0]
        self._known: list[Any] = [None] * len(self._attentions)
        step = next(step for step in self._steps if step is not None)
        self._function = step.loaded.skipless_stack_step

    def keep(self, place: int, stores: tuple[Store, Store]) -> None:
        """Where the `place`-th attention finds its keys and values."""
        known = self._known[place]
        if known is None or known[0] is not stores[0] or known[1] is not stores[1]:
            sublayer = self._array[self._attentions[place]]
            sublayer.keys, sublayer.values = stores
            self._known[place] = stores

    def run(
        self, x: Tensor, embedding: Tensor | None, tables: tuple[Tensor, Tensor] | None, past: int
    ) -> Tensor:
        """The stream [B, 1, D] after the last sublayer; `x` is not changed."""
        first = x.contiguous() if embedding is None else embedding.contiguous()
        out = x.clone(memory_format=torch.contiguous_format)
        cosine, sine = (None, None) if tables is None else (t.data_ptr() for t in tables)
        bad = self._function(
            self._array, len(self._array), out.data_ptr(), first.data_ptr(), x.shape[0],
            x.shape[-1], cosine, sine, past, torch.get_num_threads(),
        )  # fmt: skip
        if bad >= 0 and (step := self._steps[bad // 16]) is not None:
            step.report(bad % 16)
        return out


def _is(value: Any, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number
