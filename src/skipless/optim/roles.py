"""Which optimiser treatment each parameter of any nn.Module gets.

matrix       hidden weight matrices: the spectral optimiser
convolution  kernels [out, in, *k]: the spectral optimiser, as out x (in * k)
embedding    lookup tables (a tied head counts as the embedding): AdamW
head         the last projection onto the vocabulary or the classes: AdamW
norm         gains and shifts of normalisation layers: AdamW, gain decay
gain         connection gains, temperatures, attention biases: AdamW, gain lr and gain decay
vector       biases of linear layers and what else has one dimension: AdamW, gain decay

Found from the module that owns the parameter, never from one family's names alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from skipless.heads import HEAD_NAMES, find_heads

ROLES = ("matrix", "convolution", "embedding", "head", "norm", "gain", "vector")
SPECTRAL_ROLES = ("matrix", "convolution")
GAIN_DECAY_ROLES = ("norm", "gain", "vector")

_EMBEDDING_WORDS = ("embed", "wte", "wpe", "token", "position")


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Role of every parameter of `model` by its name in `named_parameters()`.

    Raises AssertionError if a parameter is left out or met twice.
    """
    owners: dict[int, tuple[nn.Module, str, str]] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            # A tied weight belongs to the embedding, whichever module is met first.
            if id(parameter) not in owners or isinstance(module, nn.Embedding):
                owners[id(parameter)] = (module, module_name, leaf)
    heads = {id(model.get_submodule(name)) for name in find_heads(model)}
    roles = {}
    for name, parameter in model.named_parameters():
        module, module_name, leaf = owners[id(parameter)]
        roles[name] = _role(module, module_name, leaf, parameter, heads)
    missing = [n for n, _ in model.named_parameters() if roles.get(n) not in ROLES]
    assert not missing, f"parameters without a role: {missing}"
    return roles


def roles_from_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Roles when only names and shapes are known: names that say embedding or head, else the
    number of dimensions."""
    roles = {}
    for name, parameter in named:
        parts = name.lower().split(".")
        if parameter.ndim < 2:
            roles[name] = "norm" if any("norm" in part for part in parts) else "vector"
        elif any(word in part for part in parts for word in _EMBEDDING_WORDS):
            roles[name] = "embedding"
        elif HEAD_NAMES & set(parts):
            roles[name] = "head"
        else:
            roles[name] = "convolution" if parameter.ndim > 3 else "matrix"
    return roles


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _role(module: nn.Module, module_name: str, leaf: str, parameter: Tensor, heads: set[int]):
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if _is_norm(module):
        return "norm"
    weighted = leaf in ("weight", "bias") or leaf.startswith(("weight_", "bias_"))
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    if parameter.ndim < 2:
        return "vector" if weighted or leaf.endswith("_bias") and _fused(module) else "gain"
    if callable(getattr(module, "gains", None)) and not list(module.children()):
        return "gain"  # per-head or per-channel connection gains kept as a table
    if convolution:
        return "convolution"
    if id(module) in heads:
        return "head"
    if parameter.squeeze().ndim < 2:
        return "matrix" if weighted else "gain"
    if not weighted and any(word in leaf.lower() for word in _EMBEDDING_WORDS):
        return "embedding"
    return "matrix"


def _fused(module: nn.Module) -> bool:
    """nn.MultiheadAttention keeps projection biases beside fused weights."""
    return isinstance(module, nn.MultiheadAttention)
