"""How far two models are apart on the same batches: outputs, loss, stream, parameters (S9).

Read by comparing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipless.diagnose.damage import main_output, predicts_tokens
from skipless.diagnose.streaming import ensure_loaded, loaded_parameters
from skipless.errors import UserError
from skipless.evaluate.losses import IGNORE, SequenceLosses, split_batch, without_padding
from skipless.probes.moments import batch_moments
from skipless.quant import run_batch
from skipless.sites import Site, find_sites, first_tensor

KINDS = ("stream", "sublayer_output", "linear_output")
"""Where the distance by depth is taken: the first kind that the model has."""


class Outputs:
    """Sums over batches of what two models return; no-grad and eval mode are the caller's."""

    def __init__(self, a: nn.Module, b: nn.Module, batch: Any) -> None:
        self.a, self.b = a, b
        self.missing: list[str] = []
        self._predicts = predicts_tokens(a, batch) and predicts_tokens(b, batch)
        self._noise = self._energy = 0.0
        self._divergence = self._agree = 0.0
        self._sums: list[list[Tensor]] = [[], []]
        self._counts: list[Tensor] = []
        self._same_shape = True
        if not self._predicts:
            self.missing.append(
                "difference of losses, KL divergence: at least one of the models does not predict "
                "the next token"
            )

    def run(self, batch: Any) -> None:
        """One batch through both. Raises UserError for an output that is not finite."""
        pair = [main_output(run_batch(model, batch)).cpu() for model in (self.a, self.b)]
        for name, output in zip("AB", pair, strict=True):
            if not bool(torch.isfinite(output).all()):
                raise UserError(f"the outputs of model {name} hold NaN or infinity")
        if pair[0].shape == pair[1].shape:
            ya, yb = (without_padding(y, batch).double() for y in pair)
            self._noise += float((yb - ya).square().sum())
            self._energy += float(ya.square().sum())
        elif self._same_shape:
            self._same_shape = False
            shapes = " and ".join(str(tuple(y.shape)) for y in pair)
            self.missing.append(f"distance of the outputs: their shapes are {shapes}")
        if self._predicts:
            self._tokens(pair[0], pair[1], split_batch(batch)[1])

    def _tokens(self, a: Tensor, b: Tensor, labels: Tensor) -> None:
        """Losses, divergence and agreement over the tokens that are predicted, by sequence."""
        labels = labels.cpu()
        self._counts.append((labels != IGNORE).sum(1).double())
        for place, logits in enumerate((a, b)):
            each = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE,
                reduction="none",
            ).view(labels.shape)  # fmt: skip
            self._sums[place].append(each.double().sum(1))
        if a.shape != b.shape:
            return
        for one, other, wanted in zip(a, b, labels, strict=True):
            known = wanted != IGNORE
            log_a, log_b = (F.log_softmax(y[known].float(), -1) for y in (one, other))
            self._divergence += float((log_a.exp() * (log_a - log_b)).double().sum())
            self._agree += float((log_a.argmax(-1) == log_b.argmax(-1)).sum())

    def found(self) -> dict[str, Any]:
        """distance |b - a| / |a| over all values; for language models loss_a, loss_b, loss_change
        with standard_error (paired), kl (A to B, nats a token) and agreement (share of tokens with
        the same most likely next token). None where not defined."""
        known = self._same_shape and self._energy > 0
        result: dict[str, Any] = {
            "distance": math.sqrt(self._noise / self._energy) if known else None,
            "loss_a": None, "loss_b": None, "loss_change": None, "standard_error": None,
            "kl": None, "agreement": None,
        }  # fmt: skip
        count = torch.cat(self._counts) if self._counts else torch.zeros(0)
        if not count.sum() > 0:
            return result
        kept = count > 0
        losses = [
            SequenceLosses(sums=torch.cat(sums)[kept], counts=count[kept]) for sums in self._sums
        ]
        result |= {
            "loss_a": losses[0].nats, "loss_b": losses[1].nats,
            "loss_change": losses[1].nats - losses[0].nats,
            "standard_error": losses[1].standard_error(losses[0]),
        }  # fmt: skip
        if self._same_shape:
            total = float(count.sum())
            result |= {"kl": self._divergence / total, "agreement": self._agree / total}
        return result


def distance_by_depth(a: nn.Module, b: nn.Module, batch: Any) -> list[dict[str, Any]]:
    """|x_b - x_a| / |x_a| after every block (or sublayer, or linear layer) on one batch.

    Only of sites that both have, of equal shape: site, layer, sublayer, distance (S9).
    """
    places = _places(a)
    theirs = {site.name for site in _places(b)}
    places = [site for site in places if site.name in theirs]
    of_a, of_b = _record(a, places, batch), _record(b, places, batch)
    rows = []
    for site in places:
        xa, xb = of_a.get(site.name), of_b.get(site.name)
        if xa is None or xb is None or xa.shape != xb.shape:
            continue
        size = float(xa.double().norm())
        distance = float((xb.double() - xa.double()).norm()) / size if size > 0 else None
        rows.append({"site": site.name, "layer": site.layer, "sublayer": site.sublayer,
                     "distance": distance})  # fmt: skip
    return rows


def _places(model: nn.Module) -> list[Site]:
    sites = [site for site in find_sites(model) if site.direction == "output"]
    for kind in KINDS:
        found = [site for site in sites if site.kind == kind]
        if found:
            return found
    return []


def _record(model: nn.Module, places: Sequence[Site], batch: Any) -> dict[str, Tensor]:
    """The tensors at these outputs in one forward pass, without padding, on the CPU."""
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules())

    def keep(name: str, result: Any) -> None:
        x = first_tensor(result)
        if x is not None and x.is_floating_point():
            found[name] = without_padding(x.detach(), batch).cpu().clone()

    handles = [
        modules[site.module].register_forward_hook(lambda _, __, y, name=site.name: keep(name, y))
        for site in places
    ]
    try:
        run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def parameter_rows(a: nn.Module, b: nn.Module) -> tuple[list[dict[str, Any]], list[str]]:
    """(a row a parameter that both have, sentences about those that cannot be compared).

    Rows: site (its name), shape, distance |w_b - w_a| / |w_a|, and {a, b} of kurtosis and
    max_over_std (S1).
    """
    theirs, rows, shapes = {name for name, _ in b.named_parameters()}, [], []
    for name, mine in loaded_parameters(a):
        if name not in theirs:
            continue
        ensure_loaded(b, name)
        other = b.get_parameter(name)
        if other.shape != mine.shape:
            shapes.append(f"{name} ({tuple(mine.shape)} and {tuple(other.shape)})")
            continue
        x, y = mine.detach().cpu(), other.detach().cpu()
        wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        size, apart = (
            float(torch.linalg.vector_norm(w, dtype=torch.float64))
            for w in (x, y.to(wide) - x.to(wide))
        )
        moments = [batch_moments(w).summary() for w in (x, y)]
        rows.append({
            "site": name, "shape": list(mine.shape),
            "distance": apart / size if size > 0 else None,
            **{key: tuple(m[key] for m in moments) for key in ("kurtosis", "max_over_std")},
        })  # fmt: skip
    missing = []
    if shapes:
        missing.append(f"parameters of other shapes: {_some(shapes)}")
    return rows, missing


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{more}"
