"""Sites: named places in a model where tensors are measured or quantised.

A site is one direction (input or output) of one module. Our own models list theirs
(`model.sites()`); for any other `nn.Module`, Hugging Face models included, `find_sites` reads the
structure:

| structure                                            | kind                            |
|------------------------------------------------------|---------------------------------|
| member of a top-level list of blocks, output         | stream                          |
| child of a block that maps the stream to its width   | sublayer_input, sublayer_output |
| Linear, transformers' Conv1D                         | linear_input, linear_output     |
| class name contains "Norm"                           | norm_output                     |
| activation module                                    | activation_output               |
| Embedding, first one only                            | embedding                       |

Read by `skipless.probes`, `skipless.quant` and `skipless.evaluate`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn

from skipless.errors import UserError, check_choice, suggestion
from skipless.sublayers import sublayer_of

__all__ = [
    "KINDS",
    "Site",
    "bias_of",
    "block_names",
    "chooses_implementation",
    "find_sites",
    "first_tensor",
    "is_linear",
    "linear_widths",
    "select_sites",
    "weight_of",
]

KINDS = (
    "embedding", "stream", "sublayer_input", "sublayer_output", "norm_output",
    "activation_output", "linear_input", "linear_output", "query", "key", "value",
    "probabilities", "other",
)  # fmt: skip

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_ACTIVATION = re.compile(r"(gelu|relu6?|silu|swish|mish|elu|sigmoid|tanh|activation)$", re.I)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One measured place: a direction of one module."""

    name: str
    """Unique label, "layers.3.mlp.act:output"."""
    module: str
    """Dotted module name; "" is the model itself."""
    direction: str
    """"input" (first tensor argument) or "output" (first tensor returned)."""
    kind: str = "other"
    """One of KINDS."""
    layer: int | None = None
    sublayer: str | None = None
    """"attention", "mlp" or None."""

    def __post_init__(self) -> None:
        check_choice("site direction", self.direction, ("input", "output"))
        check_choice("site kind", self.kind, KINDS)


def find_sites(model: nn.Module, kinds: Iterable[str] | str | None = None) -> list[Site]:
    """List the sites of `model` in order of definition; `kinds` keeps some kinds only.

    A model with a method `sites()` answers for itself. Raises UserError for an unknown kind, for
    a kind that the model does not have, and for a model without any site.
    """
    wanted = None
    if kinds is not None:
        wanted = [kinds] if isinstance(kinds, str) else list(kinds)
        for kind in wanted:
            check_choice("site kind", kind, KINDS)
    own: Callable[[], Iterable[Site]] | None = getattr(model, "sites", None)
    sites = list(own()) if callable(own) else _from_structure(model)
    if not sites:
        raise UserError(
            f"{type(model).__name__} has no linear, norm, activation, embedding or block to "
            "measure; pass a list of Site"
        )
    if wanted is None:
        return sites
    for kind in wanted:
        if not any(site.kind == kind for site in sites):
            present = ", ".join(sorted({site.kind for site in sites}))
            raise UserError(
                f"{type(model).__name__} has no site of kind {kind!r}; it has: {present}"
            )
    return [site for site in sites if site.kind in wanted]


def select_sites(model: nn.Module, wanted: str | Site | Sequence[str | Site]) -> list[Site]:
    """Sites by kind ("stream"), exact name, pattern ("layers.*.mlp.act:output") or as Site.

    Patterns are fnmatch's on site names; "*" crosses dots. Returns them in the model's order,
    each once, then the given Site objects. Raises UserError, with near names, for an entry that
    matches nothing, and for a Site whose module does not exist.
    """
    entries = [wanted] if isinstance(wanted, (str, Site)) else list(wanted)
    if not entries:
        raise UserError("the list of sites is empty; give kinds, patterns or Site objects")
    modules = dict(model.named_modules())
    given = [entry for entry in entries if isinstance(entry, Site)]
    for site in given:
        if site.module not in modules:
            raise UserError(
                f"site {site.name!r} is on module {site.module!r}, which the model does not "
                f"have; {suggestion(site.module, modules, noun='module')}"
            )
    patterns = [entry for entry in entries if not isinstance(entry, Site)]
    chosen: set[str] = set()
    known = find_sites(model) if patterns else []
    for pattern in patterns:
        names = {
            site.name
            for site in known
            if site.kind == pattern or site.name == pattern or fnmatchcase(site.name, pattern)
        }
        if not names:
            if pattern in KINDS:
                find_sites(model, pattern)  # says which kinds the model has
            near = suggestion(pattern, [site.name for site in known][:400], noun="site")
            raise UserError(f"no site matches {pattern!r}; {_shorten(near)}")
        chosen |= names
    taken = {site.name for site in given}
    return [s for s in known if s.name in chosen and s.name not in taken] + given


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a module's arguments or result (tensor, tuple, dict, ModelOutput)."""
    if isinstance(value, Tensor):
        return value
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    for item in items:
        found = first_tensor(item)
        if found is not None:
            return found
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a matrix product: nn.Linear or transformers' Conv1D.

    The output projection inside nn.MultiheadAttention is left out: torch reads its weight and
    never calls it, so that a hook on it would stay silent.
    """
    name = type(module).__name__
    if name == "NonDynamicallyQuantizableLinear":
        return False
    return isinstance(module, nn.Linear) or name == "Conv1D"


class ChoosesImplementation(Protocol):
    """Attention that says how it computes; "eager" forms its probabilities as a tensor."""

    implementation: str


def chooses_implementation(module: object) -> TypeGuard[ChoosesImplementation]:
    """Whether the attribute `implementation` of `module` says how it computes."""
    return isinstance(getattr(module, "implementation", None), str)


def _shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit].rsplit(",", 1)[0] + ", ..."


def linear_widths(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear module; Conv1D stores its weight as in x out."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    rows, columns = weight_of(module).shape
    return int(rows), int(columns)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear module or a norm; torch types every attribute Tensor | Module."""
    weight = module.weight
    assert isinstance(weight, Tensor), f"the weight of {type(module).__name__} is {type(weight)}"
    return weight


def bias_of(module: nn.Module) -> Tensor | None:
    """The bias of a linear module or a norm, None without one."""
    return getattr(module, "bias", None)


def block_names(model: nn.Module) -> list[str]:
    """Names of the members of the outermost lists of blocks.

    A list of blocks is a ModuleList, or a Sequential of at least two modules of one class, whose
    members hold linear modules without being ones.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) == 0:
            continue
        if any(name.startswith(block + ".") for block in found):
            continue
        members = list(module)
        if isinstance(module, nn.Sequential) and (
            len(members) < 2 or len({type(member) for member in members}) > 1
        ):
            continue
        if all(_holds_linear(member) and not is_linear(member) for member in members):
            prefix = name + "." if name else ""
            found += [prefix + child for child, _ in module.named_children()]
    return found


def _holds_linear(module: nn.Module) -> bool:
    return any(is_linear(m) or isinstance(m, nn.MultiheadAttention) for m in module.modules())


def _ends(linears: list[nn.Module]) -> tuple[int, int]:
    return linear_widths(linears[0])[0], linear_widths(linears[-1])[1]


def _sublayers(block: nn.Module) -> list[str]:
    """Children of a block that lead from the stream's width back to it."""
    linears = [m for m in block.modules() if is_linear(m)]
    width = linear_widths(linears[0])[0] if linears else None
    found = []
    for name, child in block.named_children():
        inner = [m for m in child.modules() if is_linear(m)]
        same_width = inner and inner[0] is not child and _ends(inner) == (width, width)
        if same_width or isinstance(child, nn.MultiheadAttention):
            found.append(name)
    return found


def _sublayer_of(name: str) -> str | None:
    found = sublayer_of(name)
    return "attention" if found == "cross_attention" else found


def _layer_of(name: str) -> int | None:
    match = _NUMBER.search(name)
    return int(match.group(1)) if match else None


def _from_structure(model: nn.Module) -> list[Site]:
    blocks = block_names(model)
    is_block = set(blocks)
    modules = dict(model.named_modules())
    sublayers = {f"{block}.{child}" for block in blocks for child in _sublayers(modules[block])}
    sites: list[Site] = []

    def add(module: str, direction: str, kind: str, local: str) -> None:
        sites.append(
            Site(
                name=f"{module}:{direction}", module=module, direction=direction, kind=kind,
                layer=_layer_of(module), sublayer=_sublayer_of(local),
            )
        )  # fmt: skip

    embedded = False
    for name, module in modules.items():
        parent = next((b for b in blocks if name.startswith(b + ".")), None)
        local = name[len(parent) + 1 :] if parent else ""
        class_name = type(module).__name__
        if name in is_block:
            add(name, "output", "stream", "")
        elif name in sublayers:
            add(name, "input", "sublayer_input", local)
            add(name, "output", "sublayer_output", local)
        elif is_linear(module):
            add(name, "input", "linear_input", local)
            add(name, "output", "linear_output", local)
        elif isinstance(module, nn.Embedding) and not embedded:
            embedded = True
            add(name, "output", "embedding", local)
        elif "norm" in class_name.lower() and not _holds_linear(module):
            # A norm that is a block's own child feeds what follows, whatever its name says
            # ("post_attention_layernorm" feeds the MLP): no sublayer is claimed for it.
            add(name, "output", "norm_output", local if "." in local else "")
        elif isinstance(module, nn.Softmax):
            add(name, "output", "probabilities", local)
        elif not list(module.children()) and _ACTIVATION.search(class_name):
            add(name, "output", "activation_output", local)
    return sites
