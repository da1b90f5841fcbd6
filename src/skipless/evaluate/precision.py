"""Loss at full precision and under every scheme and scope: the table of the experiment (Q2, Q4).

Each increase has a paired standard error: both losses are of the same sequences, so that what
makes a text hard for every model cancels. Read by the CLI, the report and `skipless.measure`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from skipless.compiled import unwrapped
from skipless.errors import UserError
from skipless.evaluate.losses import as_list, sequence_losses
from skipless.quant import Scheme, executed
from skipless.quant.calibrate import run_calibration
from skipless.quant.methods import method_name, needs_data, parse_methods
from skipless.quant.targets import find_targets


def precision_table(
    model: nn.Module,
    batches: Iterable[Any],
    schemes: Sequence[Scheme | str],
    scopes: Sequence[str] = ("linear", "block"),
    *,
    methods: Sequence[str] = ("rtn",),
    calibration: Iterable[Any] | None = None,
    include_head: bool = False,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """One row a scheme, scope and method (`skipless.quant.methods`), in the order given.

    Keys: scheme, scope, method, include_head, loss, full_precision, increase (nats a token),
    perplexity, standard_error (paired, of the increase; None for one sequence), num_tokens,
    computed ("integers" where these cover the scheme, the losses then being those of execution to
    the bit, else "simulated").
    `calibration` is for static schemes and for methods; `on_row` is called with each row as it is
    measured. Raises UserError for an empty list, a scheme, scope or method that does not exist, and
    as `loss` and `quantize` do; every name is checked before the first is measured. A method that
    this model does not bear leaves None for the loss and the reason in "refused".
    """
    parsed, model = [Scheme.parse(scheme) for scheme in schemes], unwrapped(model)
    if not parsed or not scopes:
        raise UserError("give at least one scheme, such as 'W8A8', and one scope, such as 'block'")
    for scheme in parsed:
        for scope in scopes:
            find_targets(model, scheme, scope, include_head=include_head)
        if calibration is None and scheme.needs_calibration:
            run_calibration(model, None, str(scheme))  # says what is missing
    ways = [parse_methods(method) for method in methods]
    if calibration is None and (asking := next(filter(needs_data, ways), None)):
        raise UserError(
            f"the method {method_name(asking)} looks at activations; pass calibration=batches"
        )
    batches = list(as_list(batches))
    calibration = None if calibration is None else list(as_list(calibration))
    full = sequence_losses(model, batches)
    rows = []
    for scheme, scope, way in itertools.product(parsed, scopes, ways):
        row: dict[str, Any] = {
            "scheme": str(scheme), "scope": scope, "method": method_name(way),
            "include_head": include_head, "full_precision": full.nats,
            "num_tokens": int(full.counts.sum()),
        }  # fmt: skip
        try:
            with executed(
                model, scheme, scope, method=way, calibration=calibration, include_head=include_head
            ) as reason:
                found = sequence_losses(model, batches)
            row |= {
                "loss": found.nats,
                "increase": found.nats - full.nats,
                "perplexity": math.exp(found.nats) if found.nats < 700 else math.inf,
                "standard_error": found.standard_error(full),
                "computed": "simulated" if reason else "integers",
            }
        except UserError as error:
            if method_name(way) == "rtn":
                raise
            row |= dict.fromkeys(("loss", "increase", "perplexity", "standard_error", "computed"))
            row["refused"] = str(error)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows
