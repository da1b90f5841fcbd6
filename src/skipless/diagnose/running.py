"""`diagnose`: every part of a diagnosis in order, each kept on disk as it is finished.

    1. parameters are finite, schemes are schemes, the folder is free
    2. sites      one pass over the batches (collect.py), anatomy and remedies of what is rounded
    3. weights    every matrix
    4. attention, joins    S10, S7, S8 on the first sequences, on the eager path
    5. layers     damage of one layer at a time, at each scheme; prediction
    6. depth      R_l (S9), at the first scheme
    7. alternatives    milder schemes and exempted layers, measured

What a model cannot show is listed in `missing` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from skipless.diagnose.anatomy import anatomy
from skipless.diagnose.collect import Collector, TensorRecord
from skipless.diagnose.damage import Damage
from skipless.diagnose.parts import Parts, checksum
from skipless.diagnose.remedies import choose_remedy, try_remedies
from skipless.diagnose.result import Diagnosis
from skipless.diagnose.sensitivity import (
    alternatives,
    layer_sensitivity,
    predict,
    rank_correlation,
)
from skipless.diagnose.weights import check_finite, weight_rows
from skipless.errors import UserError
from skipless.evaluate import error_propagation
from skipless.evaluate.losses import as_list
from skipless.probes import Probe
from skipless.quant import Scheme, evaluation_mode, gaussian_sqnr, quantization
from skipless.quant.targets import find_targets
from skipless.sites import is_linear, weight_of

SAMPLED_SEQUENCES = 2
"""Sequences on which attention and joins are measured: the eager path keeps all probabilities."""
Say = Callable[[str], None]


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    schemes: Sequence[str | Scheme] | str = ("W8A8",),
    *,
    scope: str | None = None,
    measure: str = "auto",
    tokenizer: Any = None,
    layer_batches: Iterable[Any] | None = None,
    layers: bool = True,
    target_db: float = 30.0,
    name: str | None = None,
    about: str = "",
    out: str | Path | None = None,
    say: Say = lambda text: None,
) -> Diagnosis:
    """Measure where quantising `model` goes wrong, and what would help.

    `batches`: token ids, pairs, dicts or any tensors that the model takes (`quant.calibrate`); an
    iterator is read once, for the sites, while `layer_batches` (default: the first batch) are kept
    for what needs several passes: layers, depth, alternatives; `layers=False` leaves these out.
    `scope` None takes block where the model has blocks, else linear. `measure` is loss, distance
    or auto (`damage.py`). `tokenizer` has a `decode(list of ids)` and names tokens. `out` writes
    the report and keeps finished parts. Per-tensor S3 is taken batch by batch.

    The model is left as it was. Raises UserError for a parameter that is not finite, no batch, a
    model that is quantised, an unknown scheme, an `out` that exists, and as the measures do.
    """
    names = [schemes] if isinstance(schemes, (str, Scheme)) else list(schemes)
    parsed = list(dict.fromkeys(Scheme.parse(text) for text in names))
    if not parsed:
        raise UserError("give at least one scheme, such as 'W8A8'")
    if quantization(model) is not None:
        raise UserError("the model is quantised; call restore(model) before diagnosing it")
    check_finite(model)
    source = iter(as_list(batches))
    first = next(source, None)
    if first is None:
        raise UserError("there is no batch to measure on; give at least one")
    few = [first] if layer_batches is None else list(as_list(layer_batches))
    if not few:
        raise UserError("layer_batches is empty; give at least one, or layers=False")
    settings = {
        "model": name or type(model).__name__, "about": about,
        "schemes": [str(s) for s in parsed], "scope": scope, "measure": measure, "layers": layers,
        "target_db": target_db, "checksum": checksum(model, [first, *few]),
    }  # fmt: skip
    parts, missing = Parts(out, settings), []
    chosen = _choose_scope(model, parsed[0], scope, missing)

    def every() -> Iterable[Any]:
        yield first
        yield from source

    with evaluation_mode(model):
        sites = parts.get(
            "sites", lambda: _sites(model, every(), parsed, tokenizer, target_db, say)
        )
        weights = parts.get("weights", lambda: weight_rows(model, parsed))
        inside = parts.get("inside", lambda: _inside(model, first))
        missing += sites["missing"] + inside["missing"]
        found = {"layers": [], "depth": [], "alternatives": [], "damage": None}
        if layers and chosen is not None:
            found = _by_layer(
                model, few, parsed, chosen, measure, sites["rows"], weights, parts, say
            )
            missing += found.pop("missing")
    result = Diagnosis(
        model=name or type(model).__name__, about=about, schemes=[str(s) for s in parsed],
        scope=chosen, num_tokens=sites["num_tokens"], num_batches=sites["num_batches"],
        sites=sites["rows"], weights=weights, attention=inside["attention"],
        joins=inside["joins"], missing=missing, target_db=target_db, **found,
    )  # fmt: skip
    if out is not None:
        from skipless.diagnose.writing import write

        write(result, Path(out))
        parts.clear()
    return result


def _choose_scope(
    model: nn.Module, scheme: Scheme, scope: str | None, missing: list[str]
) -> str | None:
    """The scope of layers, depth and alternatives; None, with the reason, if quantising fails."""
    if scope is not None:
        find_targets(model, scheme, scope)
        return scope
    for wanted in ("block", "linear"):
        try:
            find_targets(model, scheme, wanted)
            return wanted
        except UserError as error:
            reason = str(error)
    missing.append(f"loss by layer, error by depth and milder schemes: {reason}")
    return None


def _sites(
    model: nn.Module,
    batches: Iterable[Any],
    schemes: Sequence[Scheme],
    tokenizer: Any,
    target_db: float,
    say: Say,
) -> dict[str, Any]:
    """Rows of every site, in the order of computation."""
    widths = sorted({s.activation_bits for s in schemes if s.activation_bits is not None})
    collector = Collector(model, widths)
    with collector.active():
        for number, batch in enumerate(batches):
            collector.run(batch)
            say(f"batch {number + 1} measured")
    records = collector.finished()
    say(f"{len(records)} tensors: anatomy and remedies")
    rows: list[dict[str, Any]] = []
    for record in records:
        numbers = _numbers(collector, record, schemes, tokenizer, target_db)
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
) -> dict[str, Any]:
    """What all sites of one tensor share."""
    kinds = {place.kind for place in record.places}
    numbers: dict[str, Any] = record.moments.summary()
    found = anatomy(record.outliers, target_db=target_db)
    for token in found.get("tokens", []):
        place = collector.locate(record, token.pop("number"))
        token |= place | {"text": _text(tokenizer, place["id"])}
    numbers["anatomy"] = found
    modules = dict(collector.model.named_modules())
    readers = [modules[p.site.module] for p in record.places if p.kind == "linear_input"]
    matrices = [
        weight_of(m).t() if type(m).__name__ == "Conv1D" else weight_of(m)
        for m in readers if is_linear(m)
    ]  # fmt: skip
    rounded = kinds & {"linear_input", "sublayer_output", "stream"}
    for key in ("sqnr", "token_sqnr", "ideal", "gap", "remedies", "remedy"):
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
        if rounded:
            tried = try_remedies(rows, weights, scheme, matrices)
            numbers["remedies"][key] = tried
            numbers["remedy"][key] = choose_remedy(tried, gaussian_sqnr(bits))
    return numbers


def _text(tokenizer: Any, token: int | None) -> str | None:
    if tokenizer is None or token is None:
        return None
    return str(tokenizer.decode([token]))


def _inside(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Attention and joins of the first sequences, and what the model does not show of them."""
    from skipless.quant import run_batch

    found: dict[str, Any] = {"attention": [], "joins": [], "missing": []}
    small = first_sequences(batch, SAMPLED_SEQUENCES)
    for stat, key in (("attention", "attention"), ("geometry", "joins")):
        try:
            with Probe(model, stats=[stat]) as probe:
                run_batch(model, small)
            found[key] = probe.attention() if stat == "attention" else probe.geometry()
        except UserError as error:
            found["missing"].append(f"{key}: {error}")
    return found


def first_sequences(batch: Any, number: int) -> Any:
    """The first rows of every tensor of a batch that has the batch's number of them."""
    if isinstance(batch, Tensor):
        return batch[:number]
    if isinstance(batch, Mapping):
        tensors = [v for v in batch.values() if isinstance(v, Tensor) and v.dim()]
        size = tensors[0].shape[0] if tensors else 0
        return {
            k: v[:number] if isinstance(v, Tensor) and v.dim() and v.shape[0] == size else v
            for k, v in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        return type(batch)(first_sequences(item, number) for item in batch)
    return batch


def _by_layer(
    model: nn.Module,
    batches: list[Any],
    schemes: Sequence[Scheme],
    scope: str,
    measure: str,
    sites: list[dict[str, Any]],
    weights: list[dict[str, Any]],
    parts: Parts,
    say: Say,
) -> dict[str, Any]:
    found: dict[str, Any] = {"layers": [], "depth": [], "alternatives": [], "missing": []}
    damage = Damage(model, batches, measure)
    found["damage"] = {
        "kind": damage.kind, "unit": damage.unit, "baseline": damage.baseline, "correlation": {},
    }  # fmt: skip
    for scheme in schemes:
        options = {} if scheme.dynamic else {"calibration": batches}
        part = f"layers-{str(scheme).replace(':', '_')}"
        known: list[dict[str, Any]] = parts.known(part) or []

        def note(row: dict[str, Any], done: list, part: str = part) -> None:
            done.append(row)
            parts.keep(part, done)

        done: list[dict[str, Any]] = []
        say(f"one layer at a time at {scheme}")
        try:
            rows = layer_sensitivity(
                damage, scheme, scope, options, lambda row, done=done: note(row, done), known
            )
        except UserError as error:
            found["missing"].append(f"loss by layer at {scheme}: {error}")
            continue
        predicted = predict(model, scheme, scope, sites, weights)
        rows = [r | {"scheme": str(scheme), "predicted": predicted.get(r["layer"])} for r in rows]
        pairs = [r for r in rows if r["predicted"] is not None]
        found["damage"]["correlation"][str(scheme)] = rank_correlation(
            [r["predicted"] for r in pairs], [r["increase"] for r in pairs]
        )
        found["layers"] += rows
    scheme = schemes[0]
    options: dict[str, Any] = {} if scheme.dynamic else {"calibration": batches}
    say(f"error by depth at {scheme}")
    try:
        found["depth"] = parts.get(
            "depth", lambda: error_propagation(model, scheme, batches, scope, **options)
        )
    except UserError as error:
        found["missing"].append(f"error by depth: {error}")
    mine = [row for row in found["layers"] if row["scheme"] == str(scheme)]
    found["alternatives"] = parts.get(
        "alternatives", lambda: alternatives(damage, scheme, scope, options, mine, say)
    )
    return found
