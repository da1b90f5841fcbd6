"""The table of sites: one pass over the batches, then anatomy and remedies of every tensor.

Read by running, comparing and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from skipless.diagnose.anatomy import anatomy
from skipless.diagnose.batches import check_batch
from skipless.diagnose.collect import Collector, TensorRecord
from skipless.diagnose.remedies import choose_remedy, try_remedies
from skipless.diagnose.streaming import ensure_loaded
from skipless.errors import counted
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
    num_tokens}; no-grad and eval mode are the caller's. Without `remedies` these are left empty.

    A site is judged at the format that a scheme's overrides give it; one left in full precision has
    no numbers at that scheme."""
    parts = {part.activation_bits for scheme in schemes for part in scheme.parts()}
    collector = Collector(model, sorted(bits for bits in parts if bits is not None))
    with collector.active():
        for number, batch in enumerate(batches):
            check_batch(model, batch, number)
            collector.run(batch)
            say(f"batch {number + 1} measured")
    records = collector.finished()
    say(f"{counted(len(records), 'tensor')}: anatomy{' and remedies' if remedies else ''}")
    rows: list[dict[str, Any]] = []
    for record in records:
        numbers = _numbers(collector, record, tokenizer, target_db)
        ratios = _Ratios(collector, record, remedies)
        for place in record.places:
            site = place.site
            rows.append({
                "site": site.name, "kind": place.kind, "layer": site.layer,
                "sublayer": site.sublayer, "tensor": record.name, **numbers,
                **ratios.of(place, schemes),
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
    tokenizer: Any,
    target_db: float,
) -> dict[str, Any]:
    """What all sites of one tensor share."""
    numbers: dict[str, Any] = record.moments.summary()
    found = anatomy(record.outliers, target_db=target_db)
    for token in found.get("tokens", []):
        place = collector.locate(record, token.pop("number"))
        token |= place | {"text": _text(tokenizer, place["id"])}
    if found:
        places = [collector.locate(record, number) for number in found["all_tokens"]]
        found["all_tokens"] = [[place["sequence"], place["position"]] for place in places]
    numbers["anatomy"] = found
    return numbers


class _Ratios:
    """What rounding costs one tensor, by format; what several sites have in common is done once."""

    def __init__(self, collector: Collector, record: TensorRecord, remedies: bool) -> None:
        self._collector, self._record = collector, record
        kinds = {place.kind for place in record.places}
        self._remedies = remedies and bool(kinds & {"linear_input", "sublayer_output", "stream"})
        self._known: dict[Scheme, dict[str, Any]] = {}
        self._readers: dict[str, Tensor] | None = None

    def of(self, place: Any, schemes: Sequence[Scheme]) -> dict[str, dict[str, Any]]:
        """RATIOS of a site of the tensor, each by scheme."""
        found: dict[str, dict[str, Any]] = {ratio: {} for ratio in RATIOS}
        for scheme in schemes:
            part = scheme.at(place.site.name, place.site.module)
            if part is None or part.activation_bits is None:
                continue
            if part not in self._known:
                self._known[part] = self._measure(scheme, part)
            for ratio, value in self._known[part].items():
                found[ratio][str(scheme)] = value
        return found

    def _measure(self, scheme: Scheme, part: Scheme) -> dict[str, Any]:
        bits = part.activation_bits
        assert bits is not None, "`of` has looked"
        noise, ideal = self._record.outliers.noise[bits], gaussian_sqnr(bits)
        numbers: dict[str, Any] = {
            "sqnr": noise.sqnr, "token_sqnr": noise.token_sqnr, "ideal": ideal,
            "gap": ideal - noise.token_sqnr,
        }  # fmt: skip
        if self._remedies:
            rows, weights, _ = self._record.outliers.rows()
            # Readers whose weights an override sets apart are judged where they are.
            matrices = [matrix for name, matrix in self._matrices().items()
                        if scheme.at(name) == part]  # fmt: skip
            tried = try_remedies(rows, weights, part, matrices)
            numbers |= {"remedies": tried, "remedy": choose_remedy(tried, ideal)}
        return numbers

    def _matrices(self) -> dict[str, Tensor]:
        """{linear layer that reads the tensor: its weight [out, in]}."""
        if self._readers is None:
            self._readers, model = {}, self._collector.model
            modules = dict(model.named_modules())
            for place in self._record.places:
                module = modules[place.site.module]
                if place.kind == "linear_input" and is_linear(module):
                    ensure_loaded(model, place.site.module)
                    weight = weight_of(module)
                    transposed = type(module).__name__ == "Conv1D"
                    self._readers[place.site.module] = weight.t() if transposed else weight
        return self._readers


def _text(tokenizer: Any, token: int | None) -> str | None:
    if tokenizer is None or token is None:
        return None
    return str(tokenizer.decode([token]))
