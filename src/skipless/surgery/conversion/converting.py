"""`convert`: a trained residual model towards fewer skips, in stages, taught by the original.

    found = convert(model, batches, held_out, ConversionConfig(sites=("mlp",)), folder="converted")

Every chosen join becomes y = a x + f with a = 1 (C7), which changes no logit. `stages.py` takes
them to a = 0 a few at a time, while the model learns to give the original's distribution,
KL(original || model). At the end the joins are of kind none and the model is an ordinary patched
one. With a folder (`keeping.py`) the work continues after Ctrl-C, bit for bit where the arithmetic
repeats itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from skipless.compiled import unwrapped
from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.model import Connection
from skipless.quant import evaluation_mode
from skipless.surgery.checking import check_batches
from skipless.surgery.conversion.distilling import Loss, Yardstick
from skipless.surgery.conversion.inputs import Batches, by_step, check_convertible, check_teacher
from skipless.surgery.conversion.keeping import Keeper, keeping
from skipless.surgery.conversion.results import Conversion
from skipless.surgery.conversion.settings import ConversionConfig
from skipless.surgery.conversion.skips import (
    close_joins,
    count_skips,
    open_joins,
    ordered,
    removal_curve,
)
from skipless.surgery.conversion.stages import Stages
from skipless.surgery.records import connections
from skipless.surgery.saving import save_pretrained
from skipless.surgery.tracing import trace

__all__ = ["convert"]


def convert(
    model: nn.Module,
    batches: Batches | Sequence[Any],
    held_out: Any,
    config: ConversionConfig | None = None,
    *,
    loss: Loss | None = None,
    teacher: nn.Module | None = None,
    folder: str | Path | None = None,
    source: dict[str, Any] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_finish: Callable[[Conversion], None] | None = None,
) -> Conversion:
    """Take skips out of `model`, in place, stage by stage; returns what was measured.

    `batches`: a list, gone through round and round, or a Loader; each as `skipless.evaluate.loss`
    takes it, for models without text whatever their forward takes. `held_out`: a list of such.
    `loss(model, held_out)` measures what is no causal language model. `teacher`: the original, by
    default a frozen copy of `model`, which doubles the memory of the weights; the same weights with
    a = 1 cannot stand in for it, because they learn. `folder` keeps record and checkpoints, resumes
    from them, and receives the model. `source` goes into the record. `on_step` gets stage, step,
    loss and grad_norm of every step. `on_finish` is called when the model is in `folder`, before
    the record there says finished: what belongs beside the model is written by it.

    The model is in eval mode throughout and afterwards. When no stage stayed within the budget it
    is the unpatched original. Raises UserError for a model that is patched at these sites already,
    16-bit or non-finite weights, weights that are all frozen or that a fit would change, a model
    that needs `loss`, a folder with other settings, a loss that is not finite; KeyboardInterrupt
    after Ctrl-C, everything saved. After these the model is left half-way.
    """
    config, source = config or ConversionConfig(), source or {}
    model, held_out = unwrapped(model), list(as_list(held_out))
    check_convertible(model, loss, folder)
    check_batches(model, held_out)
    if teacher is not None and config.distill:
        check_teacher(model, unwrapped(teacher))
    with keeping(folder, config, source) as keeper:
        batch = by_step(model, batches)
        original = (copy.deepcopy(model) if teacher is None else teacher).eval()
        if teacher is None:
            original.requires_grad_(False)
        total, already = count_skips(model)
        learnable = [p for p in model.eval().parameters() if p.requires_grad]
        joins = open_joins(model, config)
        try:
            measure = Yardstick(original, held_out, loss, config.precision)
            first = [batch(i) for i in range(config.fit_batches)]
            start = measure(model)[0]
            ends = _ends(model, joins, first[0], config)
            state = keeper.record()
            if state is None:
                state = Conversion(
                    settings=config, model=type(model).__name__, total=total, already=already,
                    loss=start, standard_error=measure.standard_error,
                    num_tokens=measure.num_tokens, source=source,
                    **_plan(model, joins, config, first, measure, total, already),
                )  # fmt: skip
                keeper.write(state)
        except BaseException:
            close_joins(model, joins, ())
            raise
        stages = Stages(
            model, original, config, state, joins=joins, ends=ends, batch=batch, measure=measure,
            learnable=learnable, keeper=keeper, on_step=on_step,
        )  # fmt: skip
        found = stages.run()
        for parameter in learnable:
            parameter.requires_grad_(True)
        return _finish(model, joins, found, keeper, on_finish)


def _ends(
    model: nn.Module, joins: Mapping[str, Connection], batch: Any, config: ConversionConfig
) -> dict[str, nn.Module]:
    """The linear layer that ends each branch, which a fit needs."""
    with evaluation_mode(model):
        ends = trace(model, dict(joins), batch).outputs
    for name in joins if config.start == "fit" else ():
        if name not in ends:
            raise UserError(
                f"the branch of {name} does not end in a linear layer, so nothing can be fitted "
                "there; choose start 'anneal'"
            )
        if not all(p.requires_grad for p in ends[name].parameters()):
            raise UserError(
                f"the linear layer that ends the branch of {name} is frozen, and a fit would "
                "change it; unfreeze it (requires_grad_(True)), or choose start 'anneal'"
            )
    return ends


def _plan(
    model: nn.Module,
    joins: Mapping[str, Connection],
    config: ConversionConfig,
    batches: Sequence[Any],
    measure: Yardstick,
    total: int,
    already: int,
) -> dict[str, Any]:
    """The order of the skips, and the control: the same skips gone without training."""
    order = ordered(model, joins, config.order, batches, measure)
    size = config.skips_per_stage or len(order)
    counts = [*range(size, len(order), size), len(order)]
    curve = removal_curve(model, joins, order, counts, measure, total, already)
    return {"order": tuple(order), "untrained": curve}


def _finish(
    model: nn.Module,
    joins: Mapping[str, Connection],
    found: Conversion,
    keeper: Keeper,
    on_finish: Callable[[Conversion], None] | None,
) -> Conversion:
    """Kind none where skips went, the plain addition elsewhere; then the folder, the record last:
    a folder that calls itself finished is whole."""
    close_joins(model, joins, found.converted)
    if keeper.path is not None and connections(model):
        save_pretrained(model, keeper.path)
    found = dataclasses.replace(found, finished=True)
    if on_finish is not None:
        on_finish(found)
    keeper.write(found)
    keeper.clear()
    return found
