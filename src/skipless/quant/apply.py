"""`quantize` a model in place and `restore` it bit for bit (Q1, Q2).

Weights are quantised once and take the place of the originals, which are kept; a parameter stays
the same object, so that tied weights stay tied and optimisers keep their references. Activations
are quantised by hooks at the sites of the scope; hooks opened before or after (probes) see the
quantised tensors. In scope `all`, and for -KV and -P, attention is switched to its eager form,
whose probabilities are a tensor, and back by `restore`.

    with quantized(model, "W8A6", scope="block"):
        loss(model, batches)

Works on our models, on Hugging Face models and on any nn.Module with linear layers or, if asked,
convolutions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from skipless.compiled import lasting, run_eagerly, unwrapped
from skipless.errors import UserError
from skipless.quant.activations import ActivationQuantizer, ForwardState, register_hooks
from skipless.quant.calibrate import run_calibration
from skipless.quant.methods import Method, method_name, needs_data, parse_methods
from skipless.quant.record import Quantization, check_free, find_untouched, quantization
from skipless.quant.targets import ActivationTarget, WeightTarget, find_targets
from skipless.quant.transforms.session import Session
from skipless.quant.weights import round_weight
from skipless.scheme import Scheme
from skipless.sites import ChoosesImplementation, chooses_implementation

__all__ = [
    "Quantization",
    "measured",
    "paused",
    "quantization",
    "quantize",
    "quantized",
    "restore",
]


@lasting
def quantize(
    model: nn.Module,
    scheme: Scheme | str,
    scope: str = "linear",
    *,
    method: str | Method | Sequence[str | Method] = "rtn",
    overrides: Mapping[str, Scheme | str | None] | Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
    include_head: bool = False,
    include_convolutions: bool = False,
    layers: Iterable[int | None] | None = None,
) -> nn.Module:
    """Quantise `model` in place (simulated) and return it; `restore(model)` undoes it.

    `scope` is linear, block or all (Q2). `method` is how: "rtn" rounds to the nearest, "gptq",
    "smooth+gptq" and others are in `quant.methods`. `overrides` sets places apart by name,
    {pattern: scheme}, None or "fp" leaving them in full precision (`skipless.scheme`).
    `calibration`, batches as in `quant.calibrate`, is read by `-static` schemes and by methods.
    `include_head` adds the head and embeddings (tied ones are rounded once and stay tied),
    `include_convolutions` nn.Conv1d to 3d with their inputs.
    `layers` limits everything to some layers. The state_dict then holds quantised weights, and
    other ones are not loaded over them. What `torch.compile` returned, or compiled inside the
    model, is traced anew when it is called next. Raises UserError, leaving the model as it was,
    when nothing matches, the model or a part of it is quantised already, calibration is missing or
    gives NaN, or a weight is not finite.
    """
    scheme = Scheme.parse(scheme).with_overrides(overrides)
    check_free(model)
    methods = parse_methods(method)
    weights, targets = find_targets(
        model, scheme, scope, include_head=include_head,
        include_convolutions=include_convolutions, layers=layers,
    )  # fmt: skip
    if needs_data(methods):
        calibration = _several_times(calibration, method_name(methods))
    batches = calibration if isinstance(calibration, list) else None
    session = Session(model, weights, batches, targets)
    state = ForwardState([target.site for target in targets])
    record = Quantization(
        scheme=scheme, scope=scope, include_head=include_head,
        include_convolutions=include_convolutions, activations=[], state=state,
        weights=[], untouched=find_untouched(model, weights, scheme), method=method_name(methods),
        changes=session.changes, inputs=session.inputs, notes=session.notes,
        handles=session.handles,
    )  # fmt: skip
    try:
        # What is made in inference mode could not be trained or changed outside of it.
        with torch.inference_mode(False), run_eagerly():
            _round(record, session, methods, weights, targets, calibration)
    except BaseException:
        for weight in record.weights:
            if weight.in_use:
                weight.swap()
        _detach(record)
        record.changes.undo()
        raise
    for weight in record.weights:
        if not weight.in_use:
            weight.swap()
    record.keep_on(model)
    return model


def _round(
    record: Quantization,
    session: Session,
    methods: Sequence[Method],
    weights: Sequence[WeightTarget],
    targets: list[ActivationTarget],
    calibration: Iterable[Any] | None,
) -> None:
    """Fill the record: methods prepare, weights are rounded, ranges fixed, codes chosen."""
    model, state = session.model, record.state
    record.eager = switch_to_eager(model, targets)  # methods may run the sites as well
    with torch.no_grad():
        for each in methods:
            each.prepare(session)
        record.weights = [
            round_weight(target, session.columns.get(target.modules[0])) for target in weights
        ]
    record.activations = [
        ActivationQuantizer(target, target.scheme, state, _columns(target, session))
        for target in targets
    ]
    register_hooks(model, record.activations, state, record.handles)
    session.attach_first()
    if any(quantizer.observer for quantizer in record.activations):
        state.mode = "observe"
        run_calibration(model, calibration, str(record.scheme))
        for quantizer in record.activations:
            quantizer.finish_calibration()
        state.mode = "quantize"
    with torch.no_grad():
        methods[-1].choose(session, record.weights)  # type: ignore[union-attr]
    state.unseen = set(state.names)


@lasting
def restore(model: nn.Module, *, discard_changes: bool = False) -> nn.Module:
    """Undo `quantize`: the original weights, bit for bit, no hooks. Returns the model.

    Raises UserError when the model is not quantised, or when its weights were changed meanwhile
    (by training or load_state_dict), which restoring would throw away; `discard_changes` does so.
    """
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; there is nothing to restore")
    changed = [weight.name for weight in record.weights if weight.is_changed]
    if changed and not discard_changes:
        raise UserError(
            f"{changed[0]} changed after quantize(), by training or loading, and restoring would "
            "lose that; save the model first, or call restore(model, discard_changes=True)"
        )
    if record.state.mode == "quantize":
        for weight in record.weights:
            weight.swap()
    _detach(record)
    record.changes.undo()
    record.leave(model)
    return model


@contextmanager
def quantized(
    model: nn.Module, scheme: Scheme | str, scope: str = "linear", **options: Any
) -> Iterator[nn.Module]:
    """`quantize` for the length of a with statement; options as there.

    What was compiled (`torch.compile`) runs uncompiled meanwhile, so that it need not be compiled
    again for a measurement or two.
    """
    inner = unwrapped(model)
    with run_eagerly():
        inspect.unwrap(quantize)(inner, scheme, scope, **options)
        try:
            yield model
        finally:
            if quantization(inner) is not None:
                inspect.unwrap(restore)(inner)


@contextmanager
def paused(model: nn.Module) -> Iterator[nn.Module]:
    """Full precision for the length of a with statement, inside a quantised model.

    Swaps the weights before rounding in and the quantised ones back; nothing is computed again.
    What a method scaled or rotated stays so, so that tensors inside can be compared; the function
    is the original one up to the last digits.
    """
    with _full_precision(model, "off"):
        yield model


@contextmanager
def measured(
    model: nn.Module, measure: Callable[[str, Tensor, Tensor], None]
) -> Iterator[nn.Module]:
    """`paused`, while `measure(site name, values, quantised values)` is called at every site."""
    with _full_precision(model, "measure", measure):
        yield model


@contextmanager
def _full_precision(model: nn.Module, mode: str, measure: Any = None) -> Iterator[None]:
    record = quantization(model)
    if record is None:
        raise UserError("the model is not quantised; call quantize(model, scheme) first")
    state = record.state
    if state.mode != "quantize":
        raise UserError("the model is in full precision already; leave the first paused block")
    for weight in record.weights:
        weight.swap()
    state.mode, state.measure = mode, measure
    try:
        yield
    finally:
        if quantization(model) is record:  # else restored inside the block
            state.mode, state.measure = "quantize", None
            for weight in record.weights:
                weight.swap()


def _several_times(calibration: Iterable[Any] | None, method: str) -> list[Any]:
    """Calibration batches as a list, since methods pass over them more than once."""
    if isinstance(calibration, (Tensor, Mapping)):
        return [calibration]
    batches = [] if calibration is None else list(calibration)
    if not batches:
        raise UserError(
            f"the method {method} looks at activations; pass calibration=batches, at least one"
        )
    return batches


def _columns(target: ActivationTarget, session: Session) -> Tensor | None:
    site = target.site
    is_input = site.kind == "linear_input" and site.direction == "input"
    return session.columns.get(site.module) if is_input else None


def switch_to_eager(
    model: nn.Module, targets: list[ActivationTarget]
) -> list[tuple[ChoosesImplementation, str]]:
    """Make attention whose probabilities are a target compute them as a tensor.

    Such a module says how it computes in its attribute `implementation`. Returns what to undo.
    """
    switched = []
    for target in targets:
        if target.site.kind == "probabilities":
            attention = model.get_submodule(target.site.module.rpartition(".")[0])
            if chooses_implementation(attention):
                switched.append((attention, attention.implementation))
                attention.implementation = "eager"
    return switched


def switch_back(switched: list[tuple[ChoosesImplementation, str]]) -> None:
    """Undo `switch_to_eager`, once."""
    for attention, implementation in switched:
        attention.implementation = implementation
    switched.clear()


def _detach(record: Quantization) -> None:
    for handle in record.handles:
        handle.remove()
    record.handles.clear()
    switch_back(record.eager)
