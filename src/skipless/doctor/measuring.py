"""Evidence out of a model: one batch through it, once to look, once for gradients, once to compare.

Any nn.Module. A batch is a dict of the forward's arguments, a tensor, or a pair (input_ids, labels)
as our loaders give. The model is left as it was: hooks, gradients, mode. Read by patient.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.compiled import run_eagerly, unwrapped
from skipless.config import ModelConfig
from skipless.doctor.evidence import OF_WEIGHTS, Evidence, Leak
from skipless.doctor.weights import weight_memory
from skipless.errors import UserError
from skipless.fallback import double
from skipless.jsonable import leaves
from skipless.probes import Probe
from skipless.quant import placed
from skipless.report.inside import layer_of
from skipless.sites import first_tensor

Batch = Tensor | tuple[Tensor, Tensor] | Mapping[str, Any]
IDS = ("input_ids", "decoder_input_ids")
NORMS = ("norm", "ln_", "layernorm")
"""Parts of names whose one-dimensional weights are norm gains, no gates."""


def measure(
    model: nn.Module,
    batch: Batch,
    *,
    name: str = "",
    causal: bool | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Evidence:
    """All that one batch tells of `model`, its time apart.

    `causal` says that positions may not see later ones; None asks the model. `loss` makes a scalar
    of the model's result; without it the model's own loss counts, or that of the next token where
    the result is logits of the ids. Raises UserError for a model that the batch does not fit.
    """
    model = unwrapped(model)
    causal = is_causal(model) if causal is None else causal
    found = Evidence(
        name=name or type(model).__name__, causal=causal, weights=weight_memory(model),
        num_keys=_length(batch), nonfinite=_broken_weights(model), settings=_settings(model),
    )  # fmt: skip
    with evaluating(model), run_eagerly():
        if not found.nonfinite:
            found = _looked_inside(found, model, batch)
        if found.nonfinite:  # NaN is neither equal to itself nor below any threshold
            why = "numbers that are finite"
            missing = dict.fromkeys(("leak", "gradients", "gate_norm"), why)
            return dataclasses.replace(found, missing={**found.missing, **missing})
        found = _with_leak(found, model, batch, causal)
        return _with_gradients(found, model, batch, loss)


def _settings(model: nn.Module) -> dict[str, Any]:
    """Those of a model of ours, under the names that a run has for them."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return {}
    return {f"model.{name}": value for name, value in leaves(config).items()}


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's result for one batch; a pair counts as (input_ids, labels)."""
    try:
        if isinstance(batch, Mapping):
            return model(**{key: placed(value, model) for key, value in batch.items()})
        if isinstance(batch, tuple):
            return model(placed(batch[0], model), labels=placed(batch[1], model))
        return model(placed(batch, model))
    except (TypeError, RuntimeError, IndexError) as error:
        raise UserError(
            f"{type(model).__name__} cannot run on the batch: {' '.join(str(error).split())}; pass "
            "the arguments of its forward as a dict"
        ) from error


def is_causal(model: nn.Module) -> bool | None:
    """Whether a model says that it is: ours by its setting, transformers' by generating alone."""
    config = getattr(model, "config", None)
    said = getattr(config, "causal", None)
    if isinstance(said, bool):
        return said
    generates = getattr(model, "can_generate", None)
    if callable(generates):
        return bool(generates()) and not getattr(config, "is_encoder_decoder", False)
    return None


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Learned connection weights: those of modules with `gains()`, or named gate, gain, alpha,
    gamma or lambda and of at most one dimension; norms are left out."""
    own = {
        id(p) for module in model.modules() if callable(getattr(module, "gains", None))
        and module is not model for p in module.parameters(recurse=False)
    }  # fmt: skip
    words = ("gate", "gain", "alpha", "gamma", "lambda", "layer_scale", "rezero")
    found = {}
    for name, parameter in model.named_parameters():
        last, low = name.rpartition(".")[2].lower(), name.lower()
        named = parameter.dim() <= 1 and any(w in last for w in words)
        if id(parameter) in own or named and not any(n in low for n in NORMS):
            found[name] = parameter
    return found


def find_leak(model: nn.Module, batch: Batch) -> Leak | None:
    """Change tokens from the middle on and compare what comes out before; None without ids.

    One sequence of the batch is enough, and every module's output before the cut is compared, so
    that the first one to move is named.
    """
    changed = _changed(batch)
    if changed is None:
        return None
    one, other, cut = changed
    seen: dict[str, Tensor] = {}
    moved: list[str] = []

    def early(result: Any) -> Tensor | None:
        x = first_tensor(result)
        fits = x is not None and x.dim() == 3 and x.shape[1] > cut and x.is_floating_point()
        return x[:, :cut].detach() if x is not None and fits else None

    def keep(name: str):
        def hook(_: nn.Module, __: tuple, result: Any) -> None:
            if (x := early(result)) is not None:
                seen[name] = x.clone()

        return hook

    def compare(name: str):
        def hook(_: nn.Module, __: tuple, result: Any) -> None:
            x, y = early(result), seen.get(name)
            if x is not None and y is not None and x.shape == y.shape and not _close(x, y):
                moved.append(name)

        return hook

    def run(hook: Callable[[str], Callable], tokens: Batch) -> Tensor | None:
        handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if n]
        try:
            with torch.no_grad():
                return early(_logits(call(model, tokens)))
        finally:
            for handle in handles:
                handle.remove()

    before, after = run(keep, one), run(compare, other)
    if before is None or after is None:
        return None
    return Leak(
        difference=float((double(after) - double(before)).abs().max()),
        largest=float(double(before).abs().max()), epsilon=torch.finfo(before.dtype).eps,
        cut=cut, first=moved[0] if moved else None,
    )  # fmt: skip


def _looked_inside(e: Evidence, model: nn.Module, batch: Batch) -> Evidence:
    probe = Probe(model)
    with probe, torch.no_grad():
        call(model, batch)
    broken = probe.nonfinite()
    first = next(iter(broken), None)
    width = next((m.num_channels for s in probe.sites if s.kind == "stream"
                  and (m := probe.moments[s.name]).num_channels), None)  # fmt: skip
    return dataclasses.replace(
        e, joins=tuple({**row, "channels": width} for row in probe.geometry()) if probe.joins
        else (),
        attention=tuple(probe.attention()) if probe.heads else (),
        nonfinite=f"{broken[first]} values at {first} and {len(broken) - 1} sites more"
        if first else "",
    )  # fmt: skip


def _with_leak(e: Evidence, model: nn.Module, batch: Batch, causal: bool | None) -> Evidence:
    if not causal:
        why = "a causal model" if causal is False else "to be told that the model is causal"
        return dataclasses.replace(e, missing={**e.missing, "leak": why})
    return dataclasses.replace(e, leak=find_leak(model, batch))


def _with_gradients(
    e: Evidence, model: nn.Module, batch: Batch, loss: Callable[[Any], Tensor] | None
) -> Evidence:
    gates = gate_parameters(model)
    kept = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    for p, _, _ in kept:
        p.grad = None
        p.requires_grad_(p.is_floating_point())
    try:
        with torch.enable_grad():
            result = call(model, batch)
            value = loss(result) if loss else _own_loss(result, batch)
            if value is None or not value.requires_grad:
                why = "a loss (labels in the batch, or loss=)"
                return dataclasses.replace(
                    e, missing={**e.missing, "gradients": why, "gate_norm": why}
                )
            value.backward()
        square = {n: float(double(p.grad).square().sum()) for n, p in model.named_parameters()
                  if p.grad is not None}  # fmt: skip
    finally:
        for p, gradient, wanted in kept:
            p.requires_grad_(wanted)
            p.grad = gradient
    broken = [n for n, value in square.items() if not math.isfinite(value)]
    if broken:
        return dataclasses.replace(e, nonfinite=f"the gradient of {_first(broken)}")
    norms: dict[int, float] = {}
    for n, value in square.items():
        layer = layer_of(n)
        if layer is not None and n not in gates:  # gates have a rule of their own
            norms[layer] = math.hypot(norms.get(layer, 0.0), value**0.5)
    gate = sum(square.get(name, 0.0) for name in gates)
    missing = e.missing if gates else {**e.missing, "gate_norm": "learned connection weights"}
    return dataclasses.replace(
        e, gradients=((0, norms),), gate_norm=gate**0.5 if gates else None,
        trunk_norm=max(0.0, sum(square.values()) - gate) ** 0.5 if gates else None,
        missing=missing,
    )  # fmt: skip


def _own_loss(result: Any, batch: Batch) -> Tensor | None:
    value = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(value, Tensor):
        return value
    logits, ids = _logits(result), _ids(batch)[1]
    if ids is None or logits is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        return None
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _logits(result: Any) -> Tensor | None:
    for name in ("logits", "last_hidden_state"):
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(value, Tensor):
            return value
    return first_tensor(result)


def _ids(batch: Batch) -> tuple[str | int | None, Tensor | None]:
    """(key, token ids [B, T]) of a batch, (None, None) if it has none."""
    items: Any = batch.items() if isinstance(batch, Mapping) else (
        enumerate(batch) if isinstance(batch, tuple) else [(None, batch)]
    )  # fmt: skip
    for key, value in items:
        wanted = not isinstance(batch, Mapping) or key in IDS
        is_ids = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
        if wanted and is_ids:
            return key, value
    return None, None


def _length(batch: Batch) -> int | None:
    ids = _ids(batch)[1]
    if ids is not None:
        return ids.shape[1]
    x = first_tensor(batch)
    return x.shape[1] if x is not None and x.dim() == 3 else None


def _changed(batch: Batch) -> tuple[Batch, Batch, int] | None:
    """One sequence, the same with other tokens from the cut on, and the cut."""
    if isinstance(batch, Tensor) and batch.dim() == 3 and batch.shape[1] > 1:
        x, cut = batch[:1], batch.shape[1] // 2
        return x, torch.cat([x[:, :cut], 1 - x[:, cut:].flip(1)], 1), cut
    key, ids = _ids(batch)
    if ids is None or ids.shape[1] < 2:
        return None
    ids, cut = ids[:1], ids.shape[1] // 2
    known = ids.unique()
    if len(known) == 1:
        known = torch.cat([known, (known - 1).abs() + (known == 0).long()]).unique()
    # Other tokens of the text at every place, and not the same ones in another order, which a mean
    # over all positions would not tell apart.
    generator = torch.Generator().manual_seed(0)
    late = ids[:, cut:]
    drawn = torch.randint(len(known), late.shape, generator=generator).to(ids.device)
    new = torch.where(known[drawn] == late, known[(drawn + 1) % len(known)], known[drawn])
    other = torch.cat([ids[:, :cut], new], 1)
    if isinstance(batch, Mapping):
        rest = {k: v[:1] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()
                if k != "labels"}  # fmt: skip
        return {**rest, key: ids}, {**rest, key: other}, cut
    return ids, other, cut


def _close(x: Tensor, y: Tensor) -> bool:
    scale = float(y.abs().max()) if y.numel() else 0.0
    return float((x - y).abs().max()) <= 64 * torch.finfo(x.dtype).eps * scale


def _broken_weights(model: nn.Module) -> str:
    broken = [n for n, p in model.named_parameters() if not bool(torch.isfinite(p.detach()).all())]
    return f"{OF_WEIGHTS}{_first(broken)}" if broken else ""


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} parameters more" if len(names) > 1 else "")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module gets its own mode back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
