"""Where the skips of a Hugging Face model are: read from its source, not from a list of names.

Every layer's `forward` adds branch and stream somewhere (`residual + hidden_states`,
`hidden_states + input_tensor`). `find_stacks` reads the syntax tree of these methods, finds the
additions, and says what each one joins: the last module called before it is the attention, the
cross-attention or the MLP. So a family needs no adapter of its own, and one that joins in another
way (parallel sublayers, no named stream) is refused rather than guessed.

Shown by tests for FAMILIES; others work when their layers are written the same way. Nothing here
imports transformers. Read by everything that works on layers.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from torch import nn

from skipless.errors import UserError
from skipless.sublayers import SUBLAYERS, sublayer_of

__all__ = ["FAMILIES", "SUBLAYERS", "Join", "Layer", "Stack", "find_stacks"]

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral", "gpt2", "bert", "vit",
    "clip", "whisper",
)  # fmt: skip
"""Model types that the tests patch; SmolLM2 is a Llama."""

STREAM_NAMES = ("residual", "input_tensor")
"""What transformers calls the stream where it is added."""

_IN_BETWEEN = re.compile(r"norm|(^|\.)ln(_|$)|dropout|drop_path|activation|(^|\.)act(_|$)", re.I)


@dataclass(frozen=True, kw_only=True)
class Join:
    """One addition of a branch to the stream."""

    sublayer: str
    """One of SUBLAYERS."""
    owner: str
    """Module whose forward holds the addition, relative to the layer; "" is the layer."""
    position: int
    """Which of the owner's additions, from 0."""
    branch: str
    """Module that computes the branch, relative to the layer: "self_attn", "mlp", "fc2"."""

    @property
    def name(self) -> str:
        """Attribute of the owner under which the connection stands."""
        return f"{self.sublayer}_connection"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A member of a stack."""

    name: str
    """Dotted name in the model."""
    index: int
    module: nn.Module
    joins: tuple[Join, ...]

    def owner(self, join: Join) -> nn.Module:
        """The module that holds the addition `join`."""
        return self.module.get_submodule(join.owner)

    def path(self, join: Join) -> str:
        """Dotted name of the connection in the model."""
        return ".".join(part for part in (self.name, join.owner, join.name) if part)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of layers: a decoder, an encoder, one tower."""

    name: str
    layers: tuple[Layer, ...]


def find_stacks(model: nn.Module) -> list[Stack]:
    """Every list of layers whose skips can be replaced, in the model's order.

    Raises UserError, with what was found instead and what is needed, when there is none.
    """
    stacks, doubts = [], []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(name.startswith(stack.name + ".") for stack in stacks):
            continue
        layers = []
        for index, child in enumerate(module):
            joins, doubt = find_joins(child)
            if not joins:
                doubts += [doubt] if doubt and doubt not in doubts else []
                break
            path = f"{name}.{index}" if name else str(index)
            layers.append(Layer(name=path, index=index, module=child, joins=joins))
        if len(layers) == len(module):
            stacks.append(Stack(name=name, layers=tuple(layers)))
    if not stacks:
        raise UserError(_unknown(model, doubts))
    return stacks


def find_joins(layer: nn.Module) -> tuple[tuple[Join, ...], str]:
    """The joins of one layer in order of computation, and what was in doubt ("" when nothing)."""
    here = additions(original(type(layer)))
    if here.doubt:
        return (), here.doubt
    if here.found:
        owners = [("", here)]
    else:  # BERT and its kin add inside an output module of every sublayer
        owners = []
        for name, module in layer.named_modules():
            if name and "." not in name.replace(".output", ""):
                inner = additions(original(type(module)))
                owners += [(name, inner)] if len(inner.found) == 1 else []
    joins = []
    for owner, inner in owners:
        for position, branch in enumerate(inner.found):
            where = owner or branch
            sublayer = sublayer_of(where)
            if sublayer is None or any(join.sublayer == sublayer for join in joins):
                kind = type(layer).__name__
                return (), f"{kind} joins {where or 'something'!r}, a sublayer of unknown role"
            path = f"{owner}.{branch}" if owner else branch
            joins.append(Join(sublayer=sublayer, owner=owner, position=position, branch=path))
    present = dict(layer.named_children())
    kept = (j for j in joins if j.owner or j.branch.split(".")[0] in present)
    return tuple(kept), "" if joins else f"{type(layer).__name__} adds no named stream"


def original(cls: type) -> type:
    """The class as transformers wrote it, under our subclass if the model is patched."""
    return getattr(cls, "_skipless_base", cls)


@dataclass(frozen=True)
class Additions:
    """What one class's forward adds to the stream: the module behind each branch, in order."""

    found: tuple[str, ...] = ()
    doubt: str = ""


@lru_cache(maxsize=512)
def additions(cls: type) -> Additions:
    """Read the additions off the source of `cls.forward`."""
    tree = forward_tree(cls)
    if tree is None:
        return Additions()
    joins = stream_additions(tree)
    if not joins:
        return Additions()
    calls = sorted(_module_calls(tree), key=lambda call: call[0])
    found = []
    nested = {id(side) for node in ast.walk(tree) if _is_sum(node)
              for side in (node.left, node.right) if _is_sum(side)}  # fmt: skip
    for node, _ in joins:
        if id(node) in nested or _is_sum(node.left) or _is_sum(node.right):
            return Additions(
                doubt=f"{cls.__name__}.forward adds more than one branch at once (parallel "
                "sublayers), which one connection cannot join"
            )
        end = (node.end_lineno, node.end_col_offset)
        before = [name for place, name in calls if place <= end and not _IN_BETWEEN.search(name)]
        found.append(before[-1] if before else "")
    return Additions(found=tuple(found))


def stream_additions(tree: ast.FunctionDef) -> list[tuple[ast.BinOp, str]]:
    """Additions with the stream as one side: the node and which side ("left" or "right")."""
    found = []
    for node in ast.walk(tree):
        if _is_sum(node):
            for side in ("left", "right"):
                value = getattr(node, side)
                if isinstance(value, ast.Name) and value.id in STREAM_NAMES:
                    found.append((node, side))
    return sorted(found, key=lambda item: (item[0].lineno, item[0].col_offset))


def _is_sum(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def forward_tree(cls: type) -> ast.FunctionDef | None:
    """The syntax tree of `cls.forward`, decorators included; None when there is no source."""
    function: Any = inspect.unwrap(cls.forward)
    if not inspect.isfunction(function) or function.__module__.startswith("torch."):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None
    node = ast.parse(source).body[0]
    return node if isinstance(node, ast.FunctionDef) else None


def _module_calls(tree: ast.FunctionDef) -> list[tuple[tuple[int, int], str]]:
    """Calls of `self.name(...)`: where they end, and the name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            if isinstance(base, ast.Name) and base.id == "self":
                found.append(((node.end_lineno, node.end_col_offset), node.func.attr))
    return found


def _unknown(model: nn.Module, doubts: list[str]) -> str:
    reason = "; ".join(doubts[:3]) or "no list of layers was found"
    return (
        f"{type(model).__name__} cannot be patched: {reason}. Needed: a ModuleList of layers whose "
        f"forward adds a variable named {' or '.join(STREAM_NAMES)} to one sublayer at a time, "
        "called as self.<name> with attention, attn, cross, mlp, moe or fc in the name, and "
        "readable source. "
        f"Tested families: {', '.join(FAMILIES)}"
    )
