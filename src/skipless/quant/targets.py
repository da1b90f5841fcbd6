"""What a scheme touches in a model: weights, and sites of activations by scope (Q2).

| scope  | activations                                                              |
|--------|--------------------------------------------------------------------------|
| linear | inputs of linear layers                                                  |
| block  | also the output of every sublayer and the stream between blocks          |
| all    | also queries, keys, values and attention probabilities                   |

Weights are those of nn.Linear and transformers' Conv1D in every scope. The head and the
embeddings stay in full precision unless `include_head`, convolutions unless `include_convolutions`:
their inputs then count as those of linear layers. A width given by name (-KV8, -P8) is applied in
every scope, since it was asked for. Each target carries the format it gets, which a
scheme's overrides may set apart by name. Read by `quant.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import nn

from skipless.errors import UserError, check_choice, suggestion
from skipless.heads import find_heads
from skipless.quant.convolutions import convolution_sites, example_dims, is_convolution
from skipless.scheme import Scheme, check_groups, matches
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
    scheme: Scheme
    """The format of this weight."""
    modules: tuple[str, ...]
    """Names of the modules that share it, the first of them in `name`."""

    @property
    def parameter(self) -> nn.Parameter:
        """The weight itself."""
        return cast(nn.Parameter, self.module.weight)


@dataclass(frozen=True, kw_only=True)
class ActivationTarget:
    """One site to quantise, and to how many bits."""

    site: Site
    bits: int
    scheme: Scheme
    """The format of this tensor."""
    example_dims: int | None = None
    """For the input of a convolution the dimensions of one example."""


def find_targets(
    model: nn.Module,
    scheme: Scheme,
    scope: str,
    *,
    include_head: bool = False,
    include_convolutions: bool = False,
    layers: Iterable[int | None] | None = None,
) -> tuple[list[WeightTarget], list[ActivationTarget]]:
    """Every weight and activation that `scheme` touches in `scope`; tied weights once.

    `layers` keeps some layers only (None in it stands for what belongs to no layer). Raises
    UserError when nothing matches, an override matches nothing, the scope or a -KV/-P width names
    sites the model lacks, or a group size does not divide a weight's inputs.
    """
    check_choice("scope", scope, SCOPES)
    _check_coverage(model, include_convolutions)
    kernels = convolution_sites(model) if include_convolutions else []
    if include_convolutions and not kernels:
        raise UserError(
            f"{type(model).__name__} has no nn.Conv1d, 2d or 3d; leave include_convolutions out"
        )
    # A bare stack of convolutions has no other site.
    only_kernels = bool(kernels) and not any(is_linear(m) for m in model.modules())
    sites = kernels if only_kernels else find_sites(model) + kernels
    heads = set() if include_head else find_heads(model)
    layer_of = {site.module: site.layer for site in sites if site.kind == "linear_input"}
    all_weights = _find_weights(model, layer_of, heads, include_head, include_convolutions, scheme)
    if not all_weights:
        raise UserError(
            f"{type(model).__name__} has no linear layer to quantise but its head "
            f"({', '.join(sorted(heads))}); pass include_head=True"
        )
    present = {site.kind for site in sites}
    widths = {part: _widths_by_kind(model, part, scope, present) for part in scheme.parts()}
    covered = {kind for of_part in widths.values() for kind in of_part}
    sites = [
        site
        for site in sites
        if site.kind in covered and not (site.kind == "linear_input" and site.module in heads)
    ]
    _check_overrides(model, scheme, all_weights, sites, heads)
    weights = [t for t in all_weights if scheme.at(*t.modules) is not None]
    if not weights:
        raise UserError(f"the overrides of {str(scheme)!r} leave every weight in full precision")
    modules = dict(model.named_modules())
    activations = [
        ActivationTarget(
            site=site, bits=widths[part][site.kind], scheme=part,
            example_dims=example_dims(modules[site.module]) if site in kernels else None,
        )
        for site in sites
        if (part := scheme.at(site.name, site.module)) and site.kind in widths[part]
    ]  # fmt: skip
    if layers is not None:
        weights, activations = _of_layers(weights, activations, _layer_set(layers))
    _check_groups(weights)
    return weights, activations


def _of_layers(
    weights: list[WeightTarget], activations: list[ActivationTarget], wanted: set[int | None]
) -> tuple[list[WeightTarget], list[ActivationTarget]]:
    """Those of some layers. Raises UserError for a layer that has none."""
    known = {target.layer for target in weights} | {target.site.layer for target in activations}
    if missing := wanted - known:
        numbers = sorted(layer for layer in known if layer is not None)
        raise UserError(
            f"layers {sorted(missing, key=str)} hold nothing to quantise; this model has "
            f"{numbers[0]} to {numbers[-1]}" if numbers else
            f"layers {sorted(missing, key=str)} hold nothing to quantise; this model has no blocks"
        )  # fmt: skip
    return (
        [target for target in weights if target.layer in wanted],
        [target for target in activations if target.site.layer in wanted],
    )


def _layer_set(layers: Iterable[int | None]) -> set[int | None]:
    if not isinstance(layers, Iterable) or not (wanted := set(layers)):
        raise UserError(
            f"layers is {layers!r}, which names none; give a list of numbers such as [0, 1], or "
            "leave layers out"
        )
    return wanted


def _check_overrides(
    model: nn.Module,
    scheme: Scheme,
    weights: list[WeightTarget],
    sites: list[Site],
    heads: set[str],
) -> None:
    """UserError for the first pattern that matches nothing that would be quantised."""
    names = {name for target in weights for name in target.modules}
    names |= {name for site in sites for name in (site.name, site.module) if name}
    for pattern, _ in scheme.overrides:
        if any(matches(pattern, name) for name in names):
            continue
        if found := [name for name in heads if matches(pattern, name)]:
            raise UserError(
                f"the override {pattern!r} names the head {found[0]}, which stays in full "
                "precision anyway; leave the override out, or pass include_head=True"
            )
        longer = f"*.{pattern}"
        if any(matches(longer, name) for name in names):
            advice = f"write {longer!r}: names here begin with another module"
        else:
            parents = {name.rpartition(".")[0] for name in names} | {
                ".".join(name.split(".")[:2]) for name in names if name.count(".") > 1
            }
            advice = suggestion(pattern, sorted(names | parents - {""})[:800], noun="name")
            advice = advice if len(advice) < 300 else advice[:300].rsplit(",", 1)[0] + ", ..."
        raise UserError(
            f"the override {pattern!r} matches nothing that would be quantised in "
            f"{type(model).__name__}; {advice}"
        )


def _check_groups(weights: list[WeightTarget]) -> None:
    """UserError for the first weight whose inputs its scheme's groups do not divide."""
    widths: dict[int, dict[str, int]] = {}
    for t in weights:
        if t.scheme.group_size is not None:
            of_size = widths.setdefault(t.scheme.group_size, {})
            shape = t.parameter.shape  # a kernel is the matrix [out, in * k]
            of_size[t.name] = shape[0] if t.transposed else shape[1:].numel()
    for size, of_size in widths.items():
        check_groups(size, of_size)


def _check_coverage(model: nn.Module, include_convolutions: bool) -> None:
    """UserError for a model without any layer to quantise, saying what quantising covers."""
    modules = dict(model.named_modules())
    if any(is_linear(m) or isinstance(m, nn.MultiheadAttention) for m in modules.values()):
        return
    if include_convolutions and any(is_convolution(m) for m in modules.values()):
        return
    kernels = [name for name, m in modules.items() if isinstance(m, nn.modules.conv._ConvNd)]
    there = f"; its convolutions ({', '.join(kernels[:3])}) are not covered" if kernels else ""
    raise UserError(
        f"{type(model).__name__} has no linear layer to quantise{there}: quantising covers "
        "nn.Linear and transformers' Conv1D; "
        + ("pass include_convolutions=True for nn.Conv1d to 3d, or round a kernel by hand with "
           "skipless.quant.fake_quantize(weight, bits)" if kernels else
           "give a model that has one of them inside")
    )  # fmt: skip


def _find_weights(
    model: nn.Module,
    layer_of: dict[str, int | None],
    heads: set[str],
    include_head: bool,
    include_convolutions: bool,
    scheme: Scheme,
) -> list[WeightTarget]:
    """Every weight that may be quantised; what an override leaves out carries the base scheme."""
    modules: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            raise UserError(
                f"{name or 'the model'} is nn.MultiheadAttention, whose products no hook reaches, "
                "so that they would stay in full precision unseen; use an attention built of "
                "nn.Linear layers"
            )
        wanted = is_linear(module) and name not in heads
        wanted |= include_convolutions and is_convolution(module)
        if wanted and "weight" not in module._parameters:
            if scheme.at(name) is None:
                continue
            raise UserError(
                f"{name or 'the model'} computes its weight from other parameters, as weight_norm "
                "does, so that a rounded one would not last; fold them first "
                "(torch.nn.utils.parametrize.remove_parametrizations), or leave it out with the "
                f"override {name}=fp"
            )
        if wanted or (include_head and isinstance(module, nn.Embedding)):
            modules.setdefault(id(module.weight), []).append((name, module))
    found = []
    for users in modules.values():
        (name, module), names = users[0], tuple(user for user, _ in users)
        found.append(
            WeightTarget(
                name=f"{name}.weight" if name else "weight",
                module=module,
                layer=layer_of.get(name),
                transposed=type(module).__name__ == "Conv1D",
                scheme=scheme.at(*names) or scheme.base,
                modules=names,
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
