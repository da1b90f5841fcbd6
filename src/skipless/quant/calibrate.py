"""Running batches through a model, and the static ranges that come of it (Q1).

A batch is a tensor of token ids (or of whatever the model takes first), a pair (inputs, labels)
as the data loader gives, or a dict of keyword arguments. Read by `quant.apply` and by
`skipless.evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError

_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types that layers compute in; weights in others, such as fp8, say nothing about inputs."""


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call `model` on one batch, `placed` for it; labels are left out."""
    if isinstance(batch, Mapping):
        inputs = {key: placed(value, model) for key, value in batch.items() if key != "labels"}
        return model(**inputs)
    if isinstance(batch, (tuple, list)):
        batch = batch[0] if batch else None
    if not isinstance(batch, Tensor):
        raise UserError(
            f"a batch is {type(batch).__name__}; a tensor, a pair (inputs, labels) or a dict of "
            "keyword arguments was expected"
        )
    return model(placed(batch, model))


def placed(value: Any, model: nn.Module) -> Any:
    """A tensor on the device of `model`, a floating one in its dtype; anything else as it is.

    Processors make float32, which the first layer of a half-precision model refuses. A dtype that
    any of the parameters has is left alone: such a model is mixed on purpose.
    """
    if not isinstance(value, Tensor):
        return value
    first = next(iter(model.parameters()), None)
    value = value if first is None else value.to(first.device)
    if not value.is_floating_point():
        return value
    dtypes = dict.fromkeys(p.dtype for p in model.parameters() if p.dtype in _COMPUTED)
    return value if not dtypes or value.dtype in dtypes else value.to(next(iter(dtypes)))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """eval() without gradients; every module's own training flag comes back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def run_calibration(model: nn.Module, batches: Iterable[Any] | None, scheme: str) -> int:
    """Run every calibration batch; returns their number. Raises UserError when there is none."""
    if batches is None:
        raise UserError(
            f"{scheme} fixes activation ranges beforehand; pass calibration=batches, or leave "
            "out -static"
        )
    if isinstance(batches, (Tensor, Mapping)):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise UserError(f"calibration is {batches!r}; a list of batches was expected")
    count = 0
    with evaluation_mode(model):
        for batch in batches:
            run_batch(model, batch)
            count += 1
    if not count:
        raise UserError(f"calibration for {scheme} is empty; pass at least one batch")
    return count
