"""`patch`: other skip connections in a loaded Hugging Face model; `unpatch` undoes it.

    patch(model, "rezero")                        # gains at 1: the same logits, bit for bit
    patch(model, "interpolate", sites="mlp", layers=range(-4, 0))
    patch(whisper, "none", stacks="encoder", layers=[-1])

How: in every chosen layer the one expression `residual + hidden_states` of its `forward` becomes
`self.mlp_connection(residual, hidden_states, None)`; the rest of the method (dropout, caches,
casts, decorators) stays as transformers wrote it (`rewriting.py`). The new method lives in a
subclass of the same name that the layer's `__class__` is set to. So weights, parameter names,
hooks, isinstance checks, output recording, gradient checkpointing, caches and attention back ends
are untouched, and putting the class back undoes it all. The only new modules are the
connections; `model.config.skipless_patch` records them. Universal interpolation reads padding and
cache as well: `causality.py` says whether its stack is causal, `contexts.py` hands it the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from skipless.checks import is_plain
from skipless.config import ConnectionConfig, UniversalConfig
from skipless.errors import UserError, check_choice, suggestion
from skipless.model import CONNECTIONS, Connection, build_connection
from skipless.model.initializers import generator_for
from skipless.sites import weight_of
from skipless.surgery.checking import check_model
from skipless.surgery.choosing import Place, check_patchable, choose
from skipless.surgery.dropping import drop_modules, refuse_absent
from skipless.surgery.records import connections, refresh_record
from skipless.surgery.rewriting import joining_class, joins_of
from skipless.surgery.saving import is_pretrained, saving_class
from skipless.surgery.stacks import SUBLAYERS, Join, Layer, find_stacks, original
from skipless.surgery.universal.causality import is_causal
from skipless.surgery.universal.contexts import PatchedUniversal, carries, carry, place, uncarry

__all__ = ["CONSTANT_KINDS", "kinds", "patch", "patch_as", "read_connection", "unpatch"]

CONSTANT_KINDS = (
    "residual", "none", "fixed", "rezero", "layerscale", "interpolate", "anneal", "learned",
)  # fmt: skip
"""Kinds whose weights do not depend on the token: what `fold` and `prune` work on."""

NEUTRAL: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in CONSTANT_KINDS},
    "rezero": {"init": 1.0}, "layerscale": {"init": 1.0}, "interpolate": {"scale": 2.0},
    "gated": {"scale": 2.0}, "universal": {"universal": UniversalConfig(rho=0.0, kappa=2.0)},
    "sphere": {},
}  # fmt: skip
"""What a kind given by name starts with: the weights that change no logit, if it has such."""


def patch(
    model: nn.Module,
    connection: str | ConnectionConfig = "rezero",
    *,
    sites: str | Sequence[str] | None = SUBLAYERS,
    layers: Iterable[int] | int | None = None,
    stacks: str | Sequence[str] | None = None,
) -> nn.Module:
    """Replace skip connections in place; returns the model.

    `connection` by name starts neutral: every kind but none and sphere then leaves all logits
    bit-equal. A ConnectionConfig is taken literally (rezero then starts at 0). `sites`: attention,
    cross_attention, mlp. `layers`: indices, negative ones from the end; None means all. `stacks`:
    part of a name ("encoder", "vision") or a pattern, for models with several.
    Gains have the dtype and device of their layer. Raises UserError, with the model as it was, for
    a site that is patched already, for anything that matches nothing, for an architecture whose
    skips cannot be found, and, with kind universal, where it is unknown whether tokens see later
    ones.
    """
    check_model(model)
    config = read_connection(connection)
    _put(model, config, choose(model, sites, layers, stacks))
    refresh_record(model)
    return model


def _put(model: nn.Module, config: ConnectionConfig, chosen: list[Place]) -> None:
    """Make all connections first, so that a mistake leaves the model as it was; then put them in
    and change the classes."""
    universal = config.kind == "universal"
    touched = {stack.name: stack for stack, _, _ in chosen} if universal else {}
    causal = {name: is_causal(model, stack) for name, stack in touched.items()}
    new = [(s, layer, join, _build(config, layer, join, causal.get(s.name, False)))
           for s, layer, join in chosen]  # fmt: skip
    for stack, layer, join, module in new:
        owner = layer.owner(join)
        setattr(owner, join.name, module)
        replaced = {*joins_of(owner), (join.position, join.name)}
        owner.__class__ = joining_class(type(owner), frozenset(replaced))
        if universal:
            place(layer, stack.name, causal[stack.name])
        carry(layer.module)
    for module in _savers(model):
        module.__class__ = saving_class(type(module))


def unpatch(model: nn.Module) -> nn.Module:
    """Put every original class back and remove the connections; returns the model.

    The forward pass is then transformers' own again; weights are left as they are, so that a model
    that was not trained in between is the original bit for bit. Raises UserError for a model that
    is not patched, and for one from which `prune` dropped sublayers.
    """
    check_model(model, wrapped=True)
    owners = [m for m in model.modules() if joins_of(m)]
    if not owners:
        raise UserError(f"{type(model).__name__} is not patched; there is nothing to undo")
    refuse_absent(model)
    for module in (*owners, *filter(carries, model.modules())):
        if "_skipless_joins" not in type(module).__dict__:
            raise UserError(
                f"{type(module).__name__} was wrapped after patch() (fully_shard does that); "
                "unpatch a model before wrapping it"
            )
    for module in owners:
        for _, name in joins_of(module):
            delattr(module, name)
        module.__class__ = original(type(module))
    for module in model.modules():
        if carries(module):
            uncarry(module)
        if "_skipless_saver" in type(module).__dict__:
            module.__class__ = original(type(module))
    refresh_record(model)
    return model


def kinds() -> tuple[str, ...]:
    """Names of the connections that can be patched in."""
    return tuple(kind for kind in NEUTRAL if kind in CONNECTIONS.names())


def patch_as(model: nn.Module, rows: list[dict[str, Any]]) -> nn.Module:
    """Patch as `record` says, and take out what it calls dropped. Raises UserError for a place
    that the model does not have."""
    places = {
        layer.path(join): (stack, layer, join)
        for stack in find_stacks(model)
        for layer in stack.layers
        for join in layer.joins
    }
    for row in rows:
        for name in row["at"]:
            if name not in places:
                raise UserError(
                    f"the record names the connection {name!r}, and {type(model).__name__} has no "
                    f"such place; {suggestion(name, places, noun='place')}"
                )
        chosen = [places[name] for name in row["at"]]
        check_patchable(chosen)
        _put(model, _settings(ConnectionConfig.from_dict(row["connection"])), chosen)
    gone = [name for row in rows if row.get("dropped") for name in row["at"]]
    left = sorted(set(gone) - set(drop_modules(model, gone)))
    if left:
        raise UserError(
            f"the record calls {left[0]} dropped, and this version of transformers writes "
            f"{type(model).__name__} so that it cannot be taken out"
        )
    refresh_record(model)
    return model


def read_connection(connection: str | ConnectionConfig) -> ConnectionConfig:
    """The settings of a connection that is asked for by name or as they are.

    Raises UserError for one that cannot be patched in, and for one that would change nothing.
    """
    config = _settings(connection)
    if is_plain(config):
        raise UserError(
            "a fixed connection with a=1, b=1, c=0 is the plain skip, so nothing would change; "
            "set a or b in Python, as in patch(model, ConnectionConfig(kind='fixed', a=0.9)), or "
            "take kind residual to mark the places"
        )
    return config


def _settings(connection: str | ConnectionConfig) -> ConnectionConfig:
    if isinstance(connection, str):
        check_choice("connection kind", connection, kinds())
        return ConnectionConfig(kind=connection, **NEUTRAL[connection])
    if not isinstance(connection, ConnectionConfig):
        raise UserError(f"connection is {connection!r}; a kind's name or a ConnectionConfig")
    check_choice("connection kind", connection.kind, kinds())
    if connection.granularity == "block":
        raise UserError("granularity 'block' cannot be patched in; use 'scalar' or 'channel'")
    if connection.kind == "universal" and connection.universal.gate_feature == "entropy":
        raise UserError(
            "gate_feature 'entropy' cannot be patched in: transformers' attention does not hand on "
            "its weights; use gate_feature 'spread'"
        )
    if connection.kind == "fixed" and connection.c != 0:
        raise UserError(
            f"a fixed connection with c={connection.c} needs the embedding, which the layers of a "
            "patched model do not see; set c=0"
        )
    return connection


def _build(config: ConnectionConfig, layer: Layer, join: Join, causal: bool) -> Connection:
    floats = [p for p in layer.module.parameters() if p.is_floating_point()]
    if not floats:
        raise UserError(f"{layer.name} has no floating-point weight to take width and dtype from")
    dtypes = {p.dtype for p in floats}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UserError(
            f"{layer.name} mixes {names}, so the gains have no dtype to follow; cast the layer to "
            "one dtype first (model.to(dtype))"
        )
    build = PatchedUniversal if config.kind == "universal" else build_connection
    with torch.device("meta"):
        module = build(config, _width(layer))
    module.place(layer.index, join.sublayer, causal)
    module = module.to_empty(device=floats[0].device)
    module.reset_parameters()
    if isinstance(module, PatchedUniversal) and module.encoder is not None:
        module.encoder.reset_parameters(generator_for(0, layer.path(join)))
    for parameter in module.parameters():
        parameter.data = parameter.data.to(floats[0].dtype)
    return module.train(layer.module.training)


def _width(layer: Layer) -> int:
    """The stream's width: that of the layer's norms, which stand in front of every sublayer."""
    for name, module in layer.module.named_modules():
        if "norm" in type(module).__name__.lower() and "." not in name.replace(".output.", "_"):
            shape = getattr(module, "normalized_shape", None) or weight_of(module).shape
            return int(shape[-1])
    raise UserError(f"{layer.name} has no norm of its own, so its width is unknown")


def _savers(model: nn.Module) -> list[nn.Module]:
    """Modules with a `save_pretrained` that would otherwise write connections a plain load drops;
    the model and any part of it that can be saved on its own."""
    return [
        module for module in model.modules()
        if is_pretrained(module) and connections(module)
        and "_skipless_saver" not in type(module).__dict__
    ]  # fmt: skip
