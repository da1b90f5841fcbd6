"""What schemes and methods cost any model, in one table: `skipless quantize MODEL --methods ...`.

Judged as `damage.py` does: nats a token where the model predicts tokens, else the relative distance
of its outputs. Read by the command line and by benchmarks/mitigation.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from skipless.diagnose.damage import Damage
from skipless.errors import UserError
from skipless.quant import Scheme, quantized
from skipless.quant.methods import method_name, parse_methods
from skipless.quant.targets import find_targets


def compare_methods(
    model: nn.Module,
    batches: Sequence[Any],
    schemes: Sequence[Scheme | str],
    scopes: Sequence[str] = ("linear",),
    methods: Sequence[str] = ("rtn",),
    *,
    calibration: Iterable[Any] | None = None,
    include_convolutions: bool = False,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """A row a scheme, scope and method: scheme, scope, method, increase, standard_error, refused.

    `calibration` should be other data than `batches`; `include_convolutions` is `quantize`'s. A
    method that this model does not bear (stream without RMSNorm) gives a row with the reason in
    "refused" and no increase. Raises UserError for names that do not exist, before anything is
    measured.
    """
    parsed, ways = [Scheme.parse(s) for s in schemes], [parse_methods(m) for m in methods]
    for scheme, scope in itertools.product(parsed, scopes):
        find_targets(model, scheme, scope, include_convolutions=include_convolutions)
    calibration = None if calibration is None else list(calibration)
    damage, rows = Damage(model, batches), []
    for scheme, scope, way in itertools.product(parsed, scopes, ways):
        row: dict[str, Any] = {
            "scheme": str(scheme), "scope": scope, "method": method_name(way), "unit": damage.unit,
            "increase": None, "standard_error": None, "refused": None,
        }  # fmt: skip
        try:
            with quantized(
                model, scheme, scope, method=way, calibration=calibration,
                include_convolutions=include_convolutions,
            ):  # fmt: skip
                row["increase"], row["standard_error"] = damage.increase()
        except UserError as error:
            if method_name(way) == "rtn":
                raise
            row["refused"] = str(error)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
