"""What a scheme touches in a model: weights, and sites of activations by scope (Q2).

| scope  | activations                                                              |
|--------|--------------------------------------------------------------------------|
| linear | inputs of linear layers                                                  |
| block  | also the output of every sublayer and the stream between blocks          |
| all    | also queries, keys, values and attention probabilities                   |

Weights are those of nn.Linear and transformers' Conv1D in every scope. The head and the
embeddings stay in full precision unless `include_head`. A width given by name (-KV8, -P8) is
applied in every scope, since it was asked for. Read by `quant.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import nn

from skipless.errors import UserError, check_choice
from skipless.heads import find_heads
from skipless.quant.scheme import Scheme
from skipless.scheme import check_groups
from skipless.sites import Site, find_sites, is_linear

SCOPES = ("linear", "block", "all")
ATTENTION_KINDS = ("query", "key", "value", "probabilities")


@dataclass(frozen=True, kw_only=True)
class WeightTarget:
    """One parameter to quantise."""

    name: str
    module: nn.Module
    layer: int | None
    transposed: bool
    """Stored as in x out (Conv1D), so that output channels are columns."""

    @property
    def parameter(self) -> nn.Parameter:
        """The weight itself."""
        return cast(nn.Parameter, self.module.weight)


@dataclass(frozen=True, kw_only=True)
class ActivationTarget:
    """One site to quantise, and to how many bits."""

    site: Site
    bits: int


def find_targets(
    model: nn.Module,
    scheme: Scheme,
    scope: str,
    *,
    include_head: bool = False,
    layers: Iterable[int | None] | None = None,
) -> tuple[list[WeightTarget], list[ActivationTarget]]:
    """Every weight and activation that `scheme` touches in `scope`; tied weights once.

    `layers` keeps some layers only (None in it stands for what belongs to no layer). Raises
    UserError when nothing matches, the scope or a -KV/-P width names sites the model lacks, or a
    group size does not divide a weight's inputs.
    """
    check_choice("scope", scope, SCOPES)
    _check_coverage(model)
    sites = find_sites(model)
    heads = set() if include_head else find_heads(model)
    layer_of = {site.module: site.layer for site in sites if site.kind == "linear_input"}
    weights = _find_weights(model, layer_of, heads, include_head)
    if not weights:
        raise UserError(
            f"{type(model).__name__} has no linear layer to quantise but its head "
            f"({', '.join(sorted(heads))}); pass include_head=True"
        )
    widths = _widths_by_kind(model, scheme, scope, {site.kind for site in sites})
    activations = [
        ActivationTarget(site=site, bits=widths[site.kind])
        for site in sites
        if site.kind in widths and not (site.kind == "linear_input" and site.module in heads)
    ]
    if layers is None:
        _check_groups(weights, scheme)
        return weights, activations
    wanted = set(layers)
    known = {target.layer for target in weights} | {target.site.layer for target in activations}
    if missing := wanted - known:
        numbers = sorted(layer for layer in known if layer is not None)
        raise UserError(
            f"layers {sorted(missing, key=str)} hold nothing to quantise; this model has "
            f"{numbers[0]} to {numbers[-1]}" if numbers else
            f"layers {sorted(missing, key=str)} hold nothing to quantise; this model has no blocks"
        )  # fmt: skip
    weights = [target for target in weights if target.layer in wanted]
    _check_groups(weights, scheme)
    return weights, [target for target in activations if target.site.layer in wanted]


def find_untouched(model: nn.Module, weights: list[WeightTarget]) -> dict[str, list[str]]:
    """Modules that keep a matrix in full precision, by "embedding", "head", "convolution", "other".

    A matrix is any parameter of two or more dimensions that is not in `weights`. Vectors (biases,
    gains of norms) are never quantised and not listed.
    """
    heads, chosen = find_heads(model), {id(target.parameter) for target in weights}
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        if not any(p.ndim > 1 and id(p) not in chosen for _, p in own):
            continue
        what = "head" if name in heads else "other"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            what = "embedding"
        elif isinstance(module, nn.modules.conv._ConvNd):
            what = "convolution"
        found.setdefault(what, []).append(name or type(module).__name__)
    return found


def _check_groups(weights: list[WeightTarget], scheme: Scheme) -> None:
    """UserError for the first weight whose inputs the scheme's groups do not divide."""
    if scheme.group_size is not None:
        widths = {t.name: t.parameter.shape[0 if t.transposed else -1] for t in weights}
        check_groups(scheme.group_size, widths)


def _check_coverage(model: nn.Module) -> None:
    """UserError for a model without any linear layer, saying what quantising covers."""
    modules = dict(model.named_modules())
    if any(is_linear(m) or isinstance(m, nn.MultiheadAttention) for m in modules.values()):
        return
    kernels = [name for name, m in modules.items() if isinstance(m, nn.modules.conv._ConvNd)]
    there = f"; its convolutions ({', '.join(kernels[:3])}) are not covered" if kernels else ""
    raise UserError(
        f"{type(model).__name__} has no linear layer to quantise{there}: quantising covers "
        "nn.Linear and transformers' Conv1D; "
        + ("round a kernel by hand with skipless.quant.fake_quantize(weight, bits)" if kernels else
           "give a model that has one of them inside")
    )  # fmt: skip


def _find_weights(
    model: nn.Module, layer_of: dict[str, int | None], heads: set[str], include_head: bool
) -> list[WeightTarget]:
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise UserError(
                f"{name or 'the model'} is nn.MultiheadAttention, whose products no hook reaches, "
                "so that they would stay in full precision unseen; use an attention built of "
                "nn.Linear layers"
            )
        wanted = is_linear(module) and name not in heads
        if not wanted and not (include_head and isinstance(module, nn.Embedding)):
            continue
        if id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        found.append(
            WeightTarget(
                name=f"{name}.weight" if name else "weight",
                module=module,
                layer=layer_of.get(name),
                transposed=type(module).__name__ == "Conv1D",
            )
        )
    return found


def _widths_by_kind(
    model: nn.Module, scheme: Scheme, scope: str, present: set[str]
) -> dict[str, int]:
    """{site kind: bits} after checking that the model has what was asked for."""
    model_name = type(model).__name__
    widths: dict[str, int | None] = {"linear_input": scheme.activation_bits}
    if scope in ("block", "all"):
        if not present & {"sublayer_output", "stream"}:
            raise UserError(
                f"{model_name} has no sublayer output and no stream, which scope {scope!r} "
                "quantises; use scope 'linear'"
            )
        widths |= dict.fromkeys(("sublayer_output", "stream"), scheme.activation_bits)
    if scope == "all":
        widths |= dict.fromkeys(ATTENTION_KINDS, scheme.activation_bits)
    if scheme.kv_bits is not None:
        widths |= {"key": scheme.kv_bits, "value": scheme.kv_bits}
    if scheme.probability_bits is not None:
        widths["probabilities"] = scheme.probability_bits
    asked = {kind: bits for kind, bits in widths.items() if bits is not None}
    missing = [kind for kind in ATTENTION_KINDS if kind in asked and kind not in present]
    if missing:
        raise UserError(
            f"{model_name} shows no {', '.join(missing)} to quantise, which "
            f"{str(scheme)!r} in scope {scope!r} asks for; use scope 'linear' or 'block' without "
            "-KV and -P, or a skipless model"
        )
    return asked
