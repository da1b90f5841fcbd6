"""Gradients of one backward pass: at every site, of every parameter, and by depth (S1, S2).

    gradient_rows(model, batch)             next-token loss, or the labels of the batch
    gradient_rows(model, batch, loss=f)     f(model, batch) -> scalar tensor

In eval mode, so that dropout adds no noise. The gradient at a site is the one with respect to the
tensor there, over all paths from it to the loss. Read by `skipless.diagnose.running`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.diagnose.collect import Place, find_places
from skipless.diagnose.damage import main_output, predicts_tokens
from skipless.errors import UserError
from skipless.evaluate.losses import IGNORE, split_batch
from skipless.probes.gradients import gradient_norms
from skipless.probes.moments import Moments, batch_moments
from skipless.probes.passes import ForwardPass, in_backward
from skipless.quant import evaluation_mode, placed, run_batch
from skipless.report.inside import layer_of
from skipless.sites import first_tensor

Loss = Callable[[nn.Module, Any], Tensor]
KEPT = ("max_abs", "max_over_std", "kurtosis", "kurtosis_per_token", "channel_energy")


def gradient_rows(model: nn.Module, batch: Any, loss: Loss | None = None) -> dict[str, Any]:
    """Measure the gradients of one backward pass; the model is left as it was, `.grad` included.

    Returns loss (a number), of (the loss in words), sites (a row a site: site, kind, layer,
    sublayer, tensor, count, channels, nonfinite, norm, rms and KEPT of `Moments.summary`), weights
    (a row a parameter: the same and weight_norm, relative = norm over it), depth (a row a layer
    and stack: of "stream" or "parameters", stack, layer, norm) and ratios (a row a stack: first
    layer's norm over the last one's). Masked tokens are left out of sites.

    Raises UserError for a model without a loss, a loss that is no finite number, and a backward
    pass that torch refuses.
    """
    with _ready(model) as grad_of, evaluation_mode(model), torch.enable_grad():
        batch = _with_gradient(batch)
        watch = _Watch(model)
        with watch.active():
            try:
                value, words = (loss(model, batch), "a loss that was given") if loss else _loss(
                    model, batch
                )  # fmt: skip
                _check(value)
                value.backward()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise UserError(
                    f"a backward pass of {type(model).__name__} fails: {str(error).splitlines()[0]}"
                ) from None
        sites = watch.rows()
        weights = [_weight(name, p) for name, p in grad_of if p.grad is not None]
        norms = gradient_norms(model) if weights else {}
    depth = [
        {"of": "stream", "stack": row["site"].rpartition(f"{row['layer']}:")[0].rstrip("."),
         "layer": row["layer"], "norm": row["norm"]}
        for row in sites if row["kind"] == "stream" and row["layer"] is not None
    ]  # fmt: skip
    depth += [
        {"of": "parameters", "stack": key.rpartition(".")[0], "layer": number, "norm": norm}
        for key, norm in norms.items() if (number := layer_of(key)) is not None
    ]  # fmt: skip
    return {
        "loss": value.item(), "of": words, "sites": sites, "weights": weights, "depth": depth,
        "ratios": _ratios(depth),
    }  # fmt: skip


def _ratios(depth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for of, stack in dict.fromkeys((row["of"], row["stack"]) for row in depth):
        rows = [r for r in depth if (r["of"], r["stack"]) == (of, stack) and r["norm"] is not None]
        rows.sort(key=lambda row: row["layer"])
        if len(rows) > 1:
            first, last = rows[0], rows[-1]
            found.append({
                "of": of, "stack": stack, "first_layer": first["layer"], "first": first["norm"],
                "last_layer": last["layer"], "last": last["norm"],
                "ratio": first["norm"] / last["norm"] if last["norm"] > 0 else None,
            })  # fmt: skip
    return found


def _loss(model: nn.Module, batch: Any) -> tuple[Tensor, str]:
    """The mean loss of a batch, and which it is."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        output = model(**{key: placed(value, model) for key, value in batch.items()})
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own, "the model's own loss"
    if predicts_tokens(model, batch):
        inputs, labels = split_batch(batch)
        return _cross_entropy(run_batch(model, inputs).logits, labels), "next-token loss"
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        logits, labels = main_output(run_batch(model, batch)), batch[1]
        if labels.shape == logits.shape[:-1] and not labels.is_floating_point():
            return _cross_entropy(logits, labels), "cross-entropy with the batch's labels"
    raise UserError(
        f"{type(model).__name__} has no loss on these batches: it does not predict the next token, "
        "and they hold no labels that it takes; give dicts with labels, pairs (inputs, class "
        "labels), or loss=f(model, batch) in Python"
    )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.to(logits.device).flatten()
    return F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=IGNORE)


def _check(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"a tensor of shape {tuple(value.shape)}"
            what += "" if value.requires_grad else " that depends on no parameter"
        raise UserError(f"the loss is {what}; a scalar tensor with a gradient was expected")
    if not math.isfinite(value.item()):
        raise UserError(f"the loss is {value.item()}, so that its gradients say nothing")


@contextmanager
def _ready(model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Every floating parameter requires a gradient and has none; both come back afterwards."""
    parameters = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    before = [(p, p.requires_grad, p.grad) for _, p in parameters]
    try:
        for p, _, _ in before:
            p.requires_grad_(True)
            p.grad = None
        yield parameters
    finally:
        for p, flag, grad in before:
            p.grad = grad
            p.requires_grad_(flag)


def _with_gradient(batch: Any) -> Any:
    """The batch with its floating inputs as leaves that take a gradient, so that the first module's
    input has one."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(True) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {k: v if k == "labels" else _with_gradient(v) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)) and batch:
        return (_with_gradient(batch[0]), *batch[1:])
    return batch


class _Watch:
    """Moments of the gradient at every place of a model; sites that see one tensor share them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.places = model, find_places(model)
        self.moments: dict[str, Moments] = {}
        self.leader: dict[str, str] = {}
        self._pass = ForwardPass()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hooks for the length of a with statement."""
        modules, handles = dict(self.model.named_modules()), []
        try:
            handles.append(self.model.register_forward_pre_hook(self._start, with_kwargs=True))
            for place in self.places:
                module = modules[place.site.module]
                if place.site.direction == "input":
                    hook = self._input_hook(place)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(self._output_hook(place)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._pass = ForwardPass()

    def _start(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self._pass = ForwardPass.start(self.model, args, kwargs)

    def _input_hook(self, place: Place) -> Callable[..., None]:
        return lambda _, args, kwargs: self._see(place, first_tensor([args, kwargs]))

    def _output_hook(self, place: Place) -> Callable[..., None]:
        return lambda _, __, result: self._see(place, first_tensor(result))

    def _see(self, place: Place, x: Tensor | None) -> None:
        if x is None or not x.requires_grad or in_backward() or x.dim() == 0:
            return
        name, tensor = place.site.name, x

        def add() -> str:
            mask = self._pass.mask_for(tensor)

            def keep(gradient: Tensor) -> None:
                moments = batch_moments(gradient, mask)
                self.moments.setdefault(name, Moments()).merge(moments)

            tensor.register_hook(keep)
            return name

        self.leader.setdefault(name, self._pass.remember(x, "gradient", add))

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for place in self.places:
            site, leader = place.site, self.leader.get(place.site.name)
            moments = self.moments.get(leader or "")
            if leader is None or moments is None or not (moments.count or moments.nonfinite):
                continue
            found.append({
                "site": site.name, "kind": place.kind, "layer": site.layer,
                "sublayer": site.sublayer, "tensor": leader, **_numbers(moments),
            })  # fmt: skip
        return found


def _numbers(moments: Moments) -> dict[str, Any]:
    summary = moments.summary()
    n, mean, m2, _, _ = moments.pooled()
    energy = n * mean * mean + m2
    known = n > 0 and math.isfinite(energy)
    return {
        "count": summary["count"], "channels": summary["channels"],
        "nonfinite": summary["nonfinite"],
        "norm": math.sqrt(energy) if known else None,
        "rms": math.sqrt(energy / n) if known else None,
        **{key: summary[key] for key in KEPT},
    }  # fmt: skip


def _weight(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    gradient = parameter.grad
    assert gradient is not None, "the caller looked"
    gradient = gradient.coalesce().to_dense() if gradient.is_sparse else gradient
    numbers = _numbers(batch_moments(gradient))
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    size = float(torch.linalg.vector_norm(parameter.detach(), dtype=dtype))
    return {
        "site": name, "layer": layer_of(name), "shape": list(parameter.shape), **numbers,
        "weight_norm": size,
        "relative": numbers["norm"] / size if numbers["norm"] is not None and size > 0 else None,
    }  # fmt: skip
