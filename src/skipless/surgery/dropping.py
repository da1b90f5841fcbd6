"""Sublayers of patched Hugging Face models taken out for good: neither computed nor stored.

A layer's `forward` stays as it is. Between two joins it calls modules of its own, such as
`self.input_layernorm` and `self.self_attn`; these become `PassThrough`, which hand on what they
get, and the join becomes `Absent`, which returns the stream. Which modules lie between two joins,
and how many values each returns, is read from the source as in `stacks.py`.

Where that is not possible `drop_modules` leaves a sublayer alone, and its join multiplies it by 0:
joins inside an output module (BERT), a module whose result is indexed, attentions of a model whose
layers are of several types (the cache stores them by position), and the last attention of a stack.
Read by `patching.py` (when loading), and where models are pruned and folded.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from skipless.errors import UserError
from skipless.model import IDENTITY, Connection, build_connection
from skipless.surgery.stacks import (
    Join,
    Layer,
    Stack,
    find_stacks,
    forward_tree,
    original,
    stream_additions,
)

__all__ = [
    "Absent",
    "PassThrough",
    "drop_modules",
    "has_absent",
    "layer_types",
    "number_caches",
    "refuse_absent",
    "revive",
]

CACHE_INDEX = "layer_idx"
"""By which an attention of transformers addresses its entry of the cache."""


class Absent(Connection):
    """The join of a sublayer that is gone: y = x."""

    def forward(self, stream: Tensor, branch: Any, context: Any) -> Tensor:
        return stream


class PassThrough(nn.Module):
    """Stands where a module was: returns its first input, and None for every further output."""

    def __init__(self, num_outputs: int = 1):
        super().__init__()
        self.num_outputs = num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["hidden_states"]
        return first if self.num_outputs == 1 else (first, *[None] * (self.num_outputs - 1))


def has_absent(model: nn.Module) -> bool:
    """Whether a sublayer of a patched model is gone."""
    return any(isinstance(module, Absent) for module in model.modules())


def drop_modules(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Take out the sublayers of these connections (`layers.0.mlp_connection`); returns those that
    the architecture let go. Attentions that stay are numbered anew for the cache."""
    wanted, gone = set(names), []
    mixed = len(layer_types(model)) > 1
    for stack in find_stacks(model):
        left = _num_attentions(stack)
        for layer in stack.layers:
            for join in layer.joins:
                name = layer.path(join)
                modules = branch_modules(layer, join) if name in wanted else None
                caches = any(_cached(layer.module.get_submodule(m)) for m in modules or ())
                if modules is None or caches and (mixed or left[join.sublayer] == 1):
                    continue
                left[join.sublayer] -= caches
                _put(layer, join, {m: PassThrough(n) for m, n in modules.items()})
                gone.append(name)
        if gone and not mixed:
            number_caches(stack)
    return tuple(gone)


def branch_modules(layer: Layer, join: Join) -> dict[str, int] | None:
    """Modules of `layer` that only this join's branch needs, and how many values each returns;
    None where they cannot be told."""
    tree = None if join.owner else forward_tree(original(type(layer.module)))
    if tree is None:
        return None
    ends = [_end(node) for node, _ in stream_additions(tree)]
    start = ends[join.position - 1] if join.position else (0, 0)
    children = dict(layer.module.named_children())
    inside: dict[str, int] = {}
    outside: set[str] = set()
    for name, end, count in _uses(tree):
        if name not in children:
            continue
        if start < end <= ends[join.position] and count:
            inside[name] = max(count, inside.get(name, 1))
        else:
            outside.add(name)
    found = {name: count for name, count in inside.items() if name not in outside}
    return found if join.branch.split(".")[0] in found else None


def number_caches(stack: Stack) -> None:
    """Number the attentions that stay 0, 1, ... by sublayer: the cache holds entries for these
    alone, and reads the length of the text off the first."""
    counts: dict[str, int] = {}
    for layer in stack.layers:
        for join in layer.joins:
            branch = layer.module.get_submodule(join.branch.split(".")[0])
            parts = [part for part in branch.modules() if _cached(part)]
            for part in parts:
                setattr(part, CACHE_INDEX, counts.get(join.sublayer, 0))
            counts[join.sublayer] = counts.get(join.sublayer, 0) + bool(parts)


@torch.no_grad()
def revive(model: nn.Module) -> tuple[str, ...]:
    """Put zero weights where sublayers are gone, so that a plain class can hold the model; returns
    the names of their connections, which then join b = 0 times the branch."""
    if not has_absent(model):
        return ()
    config: Any = copy.deepcopy(model.config)
    with torch.random.fork_rng(devices=[]):  # its random start must not disturb the caller's
        fresh = original(type(model))(config)
    back = []
    for stack in find_stacks(model):
        for layer in stack.layers:
            for join in layer.joins:
                if not isinstance(getattr(layer.owner(join), join.name, None), Absent):
                    continue
                modules = branch_modules(layer, join)
                assert modules is not None, f"{layer.path(join)} was dropped without a plan"
                like = next(p for p in model.parameters() if p.is_floating_point())
                old = fresh.get_submodule(layer.name)
                put = {m: _zeroed(old.get_submodule(m), like) for m in modules}
                _put(layer, join, put, absent=False)
                back.append(layer.path(join))
        number_caches(stack)
    return tuple(back)


def layer_types(model: nn.Module) -> set[str | None]:
    """Kinds of attention that the layers of a model have (full, sliding); one where it says
    nothing."""
    return set(getattr(getattr(model, "config", None), "layer_types", None) or [None])


def _put(layer: Layer, join: Join, modules: dict[str, nn.Module], *, absent: bool = True) -> None:
    connection = getattr(layer.owner(join), join.name)
    width = connection.hidden_size
    for name, module in modules.items():
        setattr(layer.module, name, module.train(layer.module.training))
    new = Absent(IDENTITY, width) if absent else build_connection(IDENTITY, width)
    setattr(layer.owner(join), join.name, new.train(connection.training))


def _zeroed(module: nn.Module, like: Tensor) -> nn.Module:
    """The module with matrices of zeros, its branch 0; a norm keeps its start."""
    if any(p.ndim > 1 for p in module.parameters()):
        for parameter in module.parameters():
            parameter.zero_()
    return module.to(like.device, like.dtype)


def _cached(module: nn.Module) -> bool:
    return isinstance(getattr(module, CACHE_INDEX, None), int)


def _num_attentions(stack: Stack) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in stack.layers:
        for join in layer.joins:
            branch = layer.module.get_submodule(join.branch.split(".")[0])
            cached = any(_cached(part) for part in branch.modules())
            counts[join.sublayer] = counts.get(join.sublayer, 0) + cached
    return counts


def _uses(tree: ast.FunctionDef) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Every `self.<name>` of a method: the name, where its use ends, and how many values it
    returns; 0 where it is not called, or its result is indexed."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    indexed = {
        node.value.id for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    }  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id != "self":
            continue
        call = parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            yield node.attr, _end(node), 0
            continue
        above = parents[call]
        count = 0 if isinstance(above, ast.Subscript) else 1
        if isinstance(above, ast.Assign):
            target = above.targets[0]
            if isinstance(target, ast.Tuple):
                count = len(target.elts)
            elif isinstance(target, ast.Name) and target.id in indexed:
                count = 0
        yield node.attr, _end(call), count


def _end(node: ast.AST) -> tuple[int, int]:
    end: Any = node
    return end.end_lineno, end.end_col_offset


def refuse_absent(model: nn.Module) -> None:
    """Raise UserError for a model from which sublayers were dropped."""
    if has_absent(model):
        raise UserError(
            "sublayers of this model were dropped and their weights are gone, so the original "
            "cannot come back; load it anew, or fold the pruned model into a plain one"
        )
