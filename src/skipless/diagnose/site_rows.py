"""The table of sites: one pass over the batches, then anatomy and remedies of every tensor.

Read by running, comparing and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from skipless.diagnose.anatomy import anatomy
from skipless.diagnose.batches import check_batch
from skipless.diagnose.collect import Collector, TensorRecord
from skipless.diagnose.remedies import choose_remedy, try_remedies
from skipless.diagnose.streaming import ensure_loaded
from skipless.quant import Scheme, gaussian_sqnr
from skipless.sites import is_linear, weight_of

Say = Callable[[str], None]
RATIOS = ("sqnr", "token_sqnr", "ideal", "gap", "remedies", "remedy")


def site_rows(
    model: nn.Module,
    batches: Iterable[Any],
    schemes: Sequence[Scheme],
    tokenizer: Any,
    target_db: float,
    say: Say = lambda text: None,
    *,
    remedies: bool = True,
) -> dict[str, Any]:
    """{rows: every site in the order of computation (`Diagnosis.sites`), missing, num_batches,
    num_tokens}; no-grad and eval mode are the caller's. Without `remedies` these are left empty."""
    widths = sorted({s.activation_bits for s in schemes if s.activation_bits is not None})
    collector = Collector(model, widths)
    with collector.active():
        for number, batch in enumerate(batches):
            check_batch(model, batch, number)
            collector.run(batch)
            say(f"batch {number + 1} measured")
    records = collector.finished()
    say(f"{len(records)} tensors: anatomy{' and remedies' if remedies else ''}")
    rows: list[dict[str, Any]] = []
    for record in records:
        numbers = _numbers(collector, record, schemes, tokenizer, target_db, remedies)
        for place in record.places:
            site = place.site
            rows.append({
                "site": site.name, "kind": place.kind, "layer": site.layer,
                "sublayer": site.sublayer, "tensor": record.name, **numbers,
            })  # fmt: skip
    missing = []
    unseen = collector.unseen()
    if unseen:
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        missing.append(f"{', '.join(unseen[:3])}{more}: never ran in the forward pass")
    broken = [record.name for record in records if record.moments.nonfinite]
    if broken:
        missing.append(f"NaN or infinite values at {broken[0]} and after it were left out")
    return {
        "rows": rows, "missing": missing, "num_batches": collector.num_batches,
        "num_tokens": max(record.moments.count for record in records),
    }  # fmt: skip


def _numbers(
    collector: Collector,
    record: TensorRecord,
    schemes: Sequence[Scheme],
    tokenizer: Any,
    target_db: float,
    remedies: bool,
) -> dict[str, Any]:
    """What all sites of one tensor share."""
    kinds = {place.kind for place in record.places}
    numbers: dict[str, Any] = record.moments.summary()
    found = anatomy(record.outliers, target_db=target_db)
    for token in found.get("tokens", []):
        place = collector.locate(record, token.pop("number"))
        token |= place | {"text": _text(tokenizer, place["id"])}
    if found:
        places = [collector.locate(record, number) for number in found["all_tokens"]]
        found["all_tokens"] = [[place["sequence"], place["position"]] for place in places]
    numbers["anatomy"] = found
    modules = dict(collector.model.named_modules())
    matrices = []
    for place in record.places:
        module = modules[place.site.module]
        if place.kind == "linear_input" and is_linear(module):
            ensure_loaded(collector.model, place.site.module)
            weight = weight_of(module)
            matrices.append(weight.t() if type(module).__name__ == "Conv1D" else weight)
    rounded = kinds & {"linear_input", "sublayer_output", "stream"}
    for key in RATIOS:
        numbers[key] = {}
    rows, weights, _ = record.outliers.rows()
    for scheme in schemes:
        bits, key = scheme.activation_bits, str(scheme)
        if bits is None:
            continue
        noise = record.outliers.noise[bits]
        numbers["sqnr"][key], numbers["token_sqnr"][key] = noise.sqnr, noise.token_sqnr
        numbers["ideal"][key] = gaussian_sqnr(bits)
        numbers["gap"][key] = numbers["ideal"][key] - noise.token_sqnr
        if rounded and remedies:
            tried = try_remedies(rows, weights, scheme, matrices)
            numbers["remedies"][key] = tried
            numbers["remedy"][key] = choose_remedy(tried, gaussian_sqnr(bits))
    return numbers


def _text(tokenizer: Any, token: int | None) -> str | None:
    if tokenizer is None or token is None:
        return None
    return str(tokenizer.decode([token]))
