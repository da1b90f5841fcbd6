"""`diagnose`: every part of a diagnosis in order, each kept on disk as it is finished.

    1. parameters are finite, schemes are schemes, the folder is free
    2. sites      one pass over the batches, anatomy and remedies of what is rounded (site_rows.py)
    3. weights    every matrix
    4. attention, joins    S10, S7, S8 on the first sequences, on the eager path
       gradients           on request: one backward pass
    5. damage of one layer at a time, error by depth, milder schemes (by_layer.py)

What a model cannot show is listed in `missing` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from skipless.compiled import run_eagerly, unwrapped
from skipless.diagnose.batches import check_module, first_sequences
from skipless.diagnose.by_layer import Work, by_layer
from skipless.diagnose.gradients import Loss, gradient_rows
from skipless.diagnose.parts import Parts, checksum, fingerprints
from skipless.diagnose.result import Diagnosis
from skipless.diagnose.site_rows import Say, site_rows
from skipless.diagnose.streaming import is_streamed
from skipless.diagnose.weights import check_finite, weight_rows
from skipless.errors import UserError
from skipless.evaluate.losses import as_list
from skipless.probes import Probe
from skipless.quant import Scheme, evaluation_mode, quantization, restore, run_batch
from skipless.quant.targets import find_targets

SAMPLED_SEQUENCES = 2
"""Sequences on which attention and joins are measured: the eager path keeps all probabilities."""
GRADIENT_SEQUENCES = 4
"""Sequences of the backward pass, which keeps every activation."""


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
    gradients: bool = False,
    loss: Loss | None = None,
    target_db: float = 30.0,
    name: str | None = None,
    about: str = "",
    command: str | None = None,
    out: str | Path | None = None,
    say: Say = lambda text: None,
) -> Diagnosis:
    """Measure where quantising `model` goes wrong, and what would help.

    `batches`: token ids, pairs, dicts or any tensors that the model takes (`quant.calibrate`); an
    iterator is read once, for the sites, while `layer_batches` (default: the first batch) are kept
    for what needs several passes: layers, depth, alternatives; `layers=False` leaves these out.
    `scope` None takes block where the model has blocks, else linear. `measure` is loss, distance
    or auto (`damage.py`). `gradients` measures one backward pass on the first sequences
    (`gradients.py`), with the next-token loss, the labels of the batch or `loss(model, batch)`.
    `tokenizer` has a `decode(list of ids)` and names tokens. `command` is the start of a shell line
    that quantises the same model, for the lines to paste. `out` writes the report and keeps
    finished parts. Per-tensor S3 is taken batch by batch.

    The model is left as it was; what `torch.compile` made of it is not run. Raises UserError for a
    parameter that is not finite, no batch, a model that is quantised, an unknown scheme, an `out`
    that exists, and as the measures do.
    """
    parsed, model = parse_schemes(schemes), unwrapped(model)
    _check(model)
    source = iter(as_list(batches))
    first = next(source, None)
    if first is None:
        raise UserError("there is no batch to measure on; give at least one")
    few = [first] if layer_batches is None else list(as_list(layer_batches))
    if not few:
        raise UserError("layer_batches is empty; give at least one, or layers=False")
    name = name or type(model).__name__
    settings = {
        "model": name, "about": about, "schemes": [str(s) for s in parsed], "scope": scope,
        "measure": measure, "layers": layers, "gradients": gradients, "target_db": target_db,
        "checksum": checksum(model, [first, *few]),
    }  # fmt: skip
    parts, missing = Parts(out, settings), []
    if is_streamed(model) and (layers or gradients):
        gradients = False
        missing.append(
            "loss by layer, error by depth, milder schemes and gradients: they need all weights at "
            "once, and this model is read layer by layer"
        )
    chosen = _choose_scope(model, parsed[0], scope, missing)
    with parts.held():
        with evaluation_mode(model), _left_alone(model), run_eagerly():
            sites = parts.get(
                "sites",
                lambda: site_rows(model, chain([first], source), parsed, tokenizer, target_db, say),
            )
            weights = parts.get("weights", lambda: weight_rows(model, parsed))
            inside = parts.get("inside", lambda: _inside(model, first))
            back = {"found": None, "missing": []}
            if gradients:
                back = parts.get("gradients", lambda: _gradients(model, few[0], loss))
            found = {"layers": [], "depth": [], "alternatives": [], "damage": None, "missing": []}
            if layers and chosen is not None:
                found = by_layer(
                    Work(model, few, chosen, parts, say), parsed, measure, sites["rows"], weights
                )
        missing += [*sites["missing"], *inside["missing"], *back["missing"], *found.pop("missing")]
        result = Diagnosis(
            model=name, about=about, schemes=settings["schemes"], scope=chosen,
            num_tokens=sites["num_tokens"], num_batches=sites["num_batches"],
            sites=sites["rows"], weights=weights, attention=inside["attention"],
            joins=inside["joins"], gradients=back["found"], missing=missing,
            target_db=target_db, command=command, **found,
        )  # fmt: skip
        if out is not None:
            from skipless.diagnose.writing import write

            write(result, Path(out))
    return result


def parse_schemes(schemes: Sequence[str | Scheme] | str) -> list[Scheme]:
    """One or several, each once. Raises UserError for none and for what is no scheme."""
    names = [schemes] if isinstance(schemes, (str, Scheme)) else list(schemes)
    if not names:
        raise UserError("give at least one scheme, such as 'W8A8'")
    return list(dict.fromkeys(Scheme.parse(text) for text in names))


def _check(model: nn.Module) -> None:
    """Raise UserError for what cannot be diagnosed as it is."""
    check_module(model)
    if quantization(model) is not None:
        raise UserError("the model is quantised; call restore(model) before diagnosing it")
    check_finite(model)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Nothing quantised stays behind, and a forward pass that writes to parameters is an error:
    what is measured before and after would be of two models."""
    before = {} if is_streamed(model) else fingerprints(model)
    try:
        yield
    finally:
        if quantization(model) is not None:
            restore(model, discard_changes=True)
    after = fingerprints(model) if before else {}
    moved = next((name for name, found in before.items() if after.get(name) != found), None)
    if moved is not None:
        raise UserError(
            f"{moved} changed while the model was measured; diagnose a model whose forward pass "
            "leaves its parameters as they are"
        )


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


def _inside(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Attention and joins of the first sequences, and what the model does not show of them."""
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


def _gradients(model: nn.Module, batch: Any, loss: Loss | None) -> dict[str, Any]:
    """One backward pass on the first sequences, and what the model does not show of it."""
    small = first_sequences(batch, GRADIENT_SEQUENCES)
    try:
        return {"found": gradient_rows(model, small, loss), "missing": []}
    except UserError as error:
        return {"found": None, "missing": [f"gradients: {error}"]}
