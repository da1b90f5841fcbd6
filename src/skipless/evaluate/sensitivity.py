"""Which layer hurts: the loss when one layer alone is quantised (leave-one-in).

Read by the CLI and by whoever chooses where to spend bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from skipless.errors import UserError
from skipless.evaluate.losses import as_list, sequence_losses
from skipless.quant import Scheme, quantized
from skipless.quant.targets import find_targets


def sensitivity(
    model: nn.Module,
    scheme: Scheme | str,
    batches: Iterable[Any],
    scope: str = "block",
    *,
    method: str = "rtn",
    calibration: Iterable[Any] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Loss with only one layer's weights and sites quantised, a row a layer in order of depth.

    Keys: layer, loss, increase (nats a token), standard_error (paired), num_weights, num_sites.
    Errors interact, so that the increases do not add up to that of the whole model. Raises
    UserError for a model without numbered layers, and as `loss` and `quantize` do.
    """
    scheme = Scheme.parse(scheme)
    batches = list(as_list(batches))
    calibration = None if calibration is None else list(as_list(calibration))
    weights, activations = find_targets(model, scheme, scope)
    layers = sorted({t.layer for t in weights if t.layer is not None})
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no numbered layers to take one at a time; use "
            "precision_table for the whole model"
        )
    full = sequence_losses(model, batches)
    rows = []
    for layer in layers:
        with quantized(
            model, scheme, scope, method=method, calibration=calibration, layers=[layer]
        ):
            found = sequence_losses(model, batches)
        row = {
            "layer": layer,
            "loss": found.nats,
            "increase": found.nats - full.nats,
            "standard_error": found.standard_error(full),
            "num_weights": sum(t.layer == layer for t in weights),
            "num_sites": sum(t.site.layer == layer for t in activations),
        }
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
